"""Requests of a job's workers: who may make them, what they change, and the answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from lightning_dlres.core.errors import PeerError, ProtocolError
from lightning_dlres.core.wire.message import Message
from lightning_dlres.core.wire.server import Server
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.riders import pushes_with_riders
from lightning_dlres.paramserver.execute.server.consistency import Answer
from lightning_dlres.paramserver.execute.server.merge_notices import MergeNoticeSender
from lightning_dlres.paramserver.execute.server.shard import Shard
from lightning_dlres.paramserver.execute.server.snapshot_schedule import SnapshotSchedule
from lightning_dlres.paramserver.execute.server.values import ValueQueue

# Seconds between two looks for silent workers.
_LOOK_SECONDS = 0.25
_REQUESTS: dict[str, type[protocol.Request]] = {
    protocol.HELLO: protocol.Hello,
    protocol.LOAD: protocol.Load,
    protocol.START: protocol.Request,
    protocol.PUSH: protocol.Push,
    protocol.PULL: protocol.KeyRequest,
    protocol.COMMIT: protocol.Commit,
    protocol.CONTENT: protocol.ContentRequest,
    protocol.STATE: protocol.ContentRequest,
    protocol.VERSIONS: protocol.Request,
    protocol.PING: protocol.Request,
    protocol.SNAPSHOT: protocol.Request,
    protocol.LEAVE: protocol.Request,
    protocol.LISTEN: protocol.Request,
}


def request_of(message: Message) -> protocol.Request:
    """Return the request of a worker.

    Raises:
        ProtocolError: If its kind is unknown, its details are malformed, or the worker speaks
            another version of the protocol.
    """
    if message.kind not in _REQUESTS:
        raise ProtocolError(f"{message.peer} sent an unknown request {message.kind!r}.")
    request = message.decode_details(_REQUESTS[message.kind])
    if isinstance(request, protocol.Hello) and request.version != protocol.VERSION:
        raise ProtocolError(
            f"{message.peer} speaks version {request.version} of the protocol, expected "
            f"{protocol.VERSION}."
        )
    return request


def answer(server: Server, message: Message, kind: str, payload: bytes = b"") -> None:
    """Answer a message."""
    # A worker that is gone needs no answer, and one that reads too slowly asks again.
    with contextlib.suppress(PeerError):
        server.send(message.peer, kind, payload, sequence=message.sequence)


class JobRequests:
    """Requests of the workers of one job; only for the server's thread.

    Args:
        server: The server's socket.
        shard: Keys of the server.
        snapshots: Schedule of the server's snapshots.
        boot: Random number of the server's process.

    Attributes:
        shard: As given.
        values: Values that wait to be sent.
        notices: Sender of notices of merged keys.
    """

    def __init__(
        self, server: Server, shard: Shard, snapshots: SnapshotSchedule, boot: int
    ) -> None:
        self.shard, self._server, self._snapshots, self._boot = shard, server, snapshots, boot
        self.values = ValueQueue(server, shard)
        self.notices = MergeNoticeSender(server, shard.members)
        self._next_look = 0.0

    def handle(self, message: Message, request: protocol.Request) -> None:
        """Carry a request out, and answer it.

        Raises:
            ProtocolError: If the request may not be made.
        """
        if message.kind == protocol.LISTEN:
            self.notices.listen(request, message)
        elif self._admits(message, request):
            _HANDLERS[message.kind](self, message, request)

    def look(self, now: float) -> None:
        """Shut out silent workers."""
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        silent, released = self.shard.shut_out_silent(now)
        if silent or not self._snapshots.workers_are_saved:
            self._snapshots.save_workers(self.shard)
        for key, released_answer in released:
            self._reply(key, [released_answer])

    def tell_durable(self) -> None:
        """Tell all workers what they need not keep any more."""
        for worker, member in enumerate(self.shard.members.by_index):
            if member.is_active:
                self._send_durable(worker)

    def _admits(self, message: Message, request: protocol.Request) -> bool:
        """Return True if a request may be carried out; otherwise it is answered.

        Raises:
            ProtocolError: If another than the named worker has made it, or the job has failed.
        """
        shard = self.shard
        if request.worker >= shard.setup.workers:
            raise ProtocolError(f"worker {request.worker} of {shard.setup.workers}.")
        name = protocol.worker_name(request.worker, request.incarnation)
        if message.peer != name:
            # Otherwise a replayed message would get the answers, and count as a sign of life.
            raise ProtocolError(f"{message.peer!r} sent a request of {name!r}.")
        if shard.members.is_shut_out(request):
            self._answer(message, protocol.FENCED)
            return False
        if shard.failure and message.kind != protocol.LEAVE:
            raise ProtocolError(shard.failure)
        self._server.trust(message.connection)
        is_first = not shard.members.by_index[request.worker].incarnation
        if shard.members.admit(request, message.peer, time.monotonic()):
            if not is_first:
                # The others wait for the first process of a worker, however late it begins.
                shard.rejoin(request.worker)
            self.values.forget(request.worker)
            self._snapshots.save_workers(shard)
        return True

    def _hello(self, message: Message, _: protocol.Hello) -> None:
        welcome = protocol.ServerWelcome(
            version=protocol.VERSION, boot=self._boot, is_started=self.shard.is_started
        )
        self._answer(message, protocol.WELCOME, msgspec.msgpack.encode(welcome))

    def _load(self, message: Message, load: protocol.Load) -> None:
        self.shard.load(load, memoryview(message.payload))
        self._answer(message, protocol.DONE)

    def _start(self, message: Message, _: protocol.Request) -> None:
        if not self.shard.is_started:
            self.shard.require_loaded()
            self._snapshots.make_first(self.shard, time.monotonic())
            if self._snapshots.error:
                raise ProtocolError(f"no snapshot could be written: {self._snapshots.error}.")
            self._snapshots.save_workers(self.shard)
            self.shard.start()
        self._answer(message, protocol.DONE)

    def _push(self, message: Message, first: protocol.Push) -> None:
        answered: list[tuple[int, list[Answer]]] = []
        try:
            for push, payload in pushes_with_riders(first, memoryview(message.payload)):
                self.shard.members.by_index[push.worker].pushed_bytes += len(payload)
                answers = self.shard.push(push, payload)
                answered.append((push.key, answers))
                self._reply(push.key, answers)
        finally:
            self.notices.tell(answered)

    def _pull(self, _: Message, request: protocol.KeyRequest) -> None:
        self._reply(request.key, [self.shard.pull(request)])

    def _commit(self, message: Message, commit: protocol.Commit) -> None:
        for key, committed in self.shard.commit(commit, memoryview(message.payload)):
            self._reply(key, [committed])

    def _content(self, message: Message, request: protocol.ContentRequest) -> None:
        # A restarted server waits for pushes; the worker asks again.
        if self.shard.has_applied(request):
            payload = self.shard.state_of(request.key).payload()
            self._answer(message, protocol.CONTENT, payload.tobytes())

    def _state(self, message: Message, request: protocol.ContentRequest) -> None:
        if self.shard.has_applied(request):
            state = self.shard.optimizer_state(self.shard.state_of(request.key))
            self._answer(message, protocol.STATE, protocol.encode_state(state))

    def _versions(self, message: Message, request: protocol.Request) -> None:
        versions = self.shard.versions(request.worker)
        self._answer(message, protocol.VERSIONS, msgspec.msgpack.encode(versions))

    def _ping(self, message: Message, _: protocol.Request) -> None:
        self._answer(message, protocol.ALIVE, msgspec.msgpack.encode(self._boot))

    def _snapshot(self, _: Message, request: protocol.Request) -> None:
        self._snapshots.is_wanted = True
        self._send_durable(request.worker)

    def _leave(self, message: Message, request: protocol.Request) -> None:
        members = self.shard.members
        member = members.by_index[request.worker]
        is_new, member.has_left = not member.has_left, True
        if members.have_left():
            # The job itself stays in memory, since a worker asks again if the answer is lost.
            self._snapshots.forget()
        elif is_new:
            self._snapshots.save_workers(self.shard)
        pushed = memoryview(message.payload)
        if members.have_left() or self.shard.are_durable(request.worker, pushed):
            self._answer(message, protocol.DONE)
        else:
            # The worker keeps its log, which a restarted server would need. It asks again.
            self._snapshots.is_wanted = True

    def _reply(self, key: int, answers: Iterable[Answer]) -> None:
        """Send answers about a key."""
        state = self.shard.states[key]
        for one in answers:
            if one.kind == protocol.VALUE:
                self.values.add(one.worker, key, one.number)
                continue
            reply = protocol.KeyReply(
                key=key,
                number=one.number,
                durable=self.shard.durable(state, one.worker),
                workers=list(one.workers),
                norm=state.norm,
            )
            self._send(one.worker, one.kind, details=msgspec.msgpack.encode(reply))

    def _send_durable(self, worker: int) -> None:
        versions = self.shard.versions(worker)
        self._send(worker, protocol.DURABLE, msgspec.msgpack.encode(versions))

    def _send(self, worker: int, kind: str, payload: bytes = b"", details: bytes = b"") -> None:
        peer = self.shard.members.by_index[worker].peer
        # A worker that is gone, or reads too slowly, asks again.
        with contextlib.suppress(PeerError):
            self._server.send(peer, kind, payload, sequence=0, details=details)

    def _answer(self, message: Message, kind: str, payload: bytes = b"") -> None:
        answer(self._server, message, kind, payload)


# Not in the object, where a cycle of references would keep the parameters of a past job in memory.
_HANDLERS: dict[str, Callable[[JobRequests, Message, Any], None]] = {
    protocol.HELLO: JobRequests._hello,
    protocol.LOAD: JobRequests._load,
    protocol.START: JobRequests._start,
    protocol.PUSH: JobRequests._push,
    protocol.PULL: JobRequests._pull,
    protocol.COMMIT: JobRequests._commit,
    protocol.CONTENT: JobRequests._content,
    protocol.STATE: JobRequests._state,
    protocol.VERSIONS: JobRequests._versions,
    protocol.PING: JobRequests._ping,
    protocol.SNAPSHOT: JobRequests._snapshot,
    protocol.LEAVE: JobRequests._leave,
}
