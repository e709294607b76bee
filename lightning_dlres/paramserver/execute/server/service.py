"""A server: answers the requests of workers, shuts out silent ones, and makes snapshots.

One thread does everything, between two messages: merges, updates, copies for a snapshot. ZeroMQ's
own thread receives and sends in the meantime, and another thread writes snapshots.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from lightning_dlres.core.errors import ConfigError, PeerError, ProtocolError, text_of
from lightning_dlres.core.host.service import start_service
from lightning_dlres.core.units import parse_seconds
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.core.wire.message import Message
from lightning_dlres.core.wire.server import Server, SocketLimits
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.riders import pushes_with_riders
from lightning_dlres.paramserver.execute.server.consistency import Answer
from lightning_dlres.paramserver.execute.server.merge_notices import MergeNoticeSender
from lightning_dlres.paramserver.execute.server.shard import MAX_WORKERS, Shard
from lightning_dlres.paramserver.execute.server.snapshot_schedule import SnapshotSchedule
from lightning_dlres.paramserver.execute.server.snapshots import SnapshotFiles
from lightning_dlres.paramserver.execute.server.status import StatusAnswer, server_status
from lightning_dlres.paramserver.execute.server.values import ValueQueue

# Longest wait for a message in seconds.
_IDLE_SECONDS = 0.25
# Connections of a worker: the second one is for notices.
_CONNECTIONS = 2
# Limits of the server's socket. `queued` bounds the messages that wait in each direction, for each
# worker.
_LIMITS = SocketLimits(
    frame_bytes=protocol.FRAME_BYTES,
    unread_bytes=256 << 20,
    connections=_CONNECTIONS * MAX_WORKERS,
    queued=64,
)
# Seconds between two looks for silent workers.
_LOOK_SECONDS = 0.25
_R = TypeVar("_R", bound=protocol.Request)


class ParameterServer:
    """Server of a part of the parameters; it runs in a thread until `close`.

    Args:
        bind, port, curve, allowed, allow_any, insecure: See `core.wire.server.Server`.
        snapshot: Directory of snapshots; None: the parameters are lost with the server. A server
            that finds a snapshot of its port there goes on from it.
        snapshot_every: Seconds between two snapshots, or text such as "30s".

    Attributes:
        address: Address for workers.

    Raises:
        ConfigError: If the address cannot be bound, the snapshot is damaged, or its job has more
            workers than this process can connect.
    """

    def __init__(
        self,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        curve: CurveKeys | None = None,
        allowed: Collection[bytes] = (),
        allow_any: bool = False,
        insecure: bool = False,
        snapshot: Path | None = None,
        snapshot_every: float | str = "30s",
    ) -> None:
        seconds = parse_seconds(snapshot_every, "snapshot_every")
        self._server = Server(
            bind=bind,
            port=port,
            curve=curve,
            allowed=allowed,
            allow_any=allow_any,
            insecure=insecure,
            limits=_LIMITS,
            copies=False,
        )
        self.address = self._server.address
        self._boot, self._started = secrets.randbits(62), time.monotonic()
        self._use(None)
        self._next_look = 0.0
        self._status_answer = StatusAnswer(self.status)
        files: SnapshotFiles | None = None
        if snapshot is not None:
            port = int(self.address.rpartition(":")[2])
            try:
                files, shard = SnapshotFiles.open(snapshot, port, self._started)
                if shard is not None:
                    _require_room(shard.setup.workers, "workers of the snapshot's job")
            except ConfigError:
                self._server.close()
                raise
            self._use(shard)
        self._snapshots = SnapshotSchedule(files, seconds, self._server.refusals.note)
        self._handlers: dict[str, Callable[[Message], None]] = {
            protocol.HELLO: self._hello,
            protocol.LOAD: self._load,
            protocol.START: self._start,
            protocol.PUSH: self._push,
            protocol.PULL: self._pull,
            protocol.COMMIT: self._commit,
            protocol.CONTENT: self._content,
            protocol.STATE: self._state,
            protocol.VERSIONS: self._versions,
            protocol.PING: self._ping,
            protocol.SNAPSHOT: self._snapshot,
            protocol.LEAVE: self._leave,
            protocol.LISTEN: self._listen,
        }
        self._closing = threading.Event()
        self._thread = start_service(self._run, "dlres-ps")

    def close(self) -> None:
        """Stop serving, without a last snapshot. May be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._server.interrupt()
        self._thread.join()
        self._server.close()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def refused(self) -> int:
        """Number of messages and connections that were refused."""
        return self._server.refusals.count

    def status(self) -> protocol.ServerStatus:
        """Return the state of the server."""
        now = time.monotonic()
        return server_status(
            self._shard,
            address=self.address,
            now=now,
            uptime=now - self._started,
            snapshot_seconds=-1.0 if self._snapshots.last is None else now - self._snapshots.last,
            snapshot_error=self._snapshots.error,
            refused=self.refused,
        )

    def _run(self) -> None:
        while not self._closing.is_set():
            wait = _IDLE_SECONDS
            if self._values is not None and not self._values.is_empty:
                wait = self._values.wait.seconds
            # A snapshot goes on between two messages, without waiting for one.
            copied, is_durable = self._snapshots.advance(self._shard, time.monotonic())
            if is_durable:
                self._tell_durable()
            message = self._server.receive(0.0 if copied else wait)
            if message is not None:
                self._handle(message)
                # Free the payload. Otherwise it stays in memory until the next message comes.
                del message
            if self._values is not None:
                self._values.advance()
            self._look(time.monotonic())

    def _handle(self, message: Message) -> None:
        try:
            if message.kind == protocol.STATUS:
                self._answer(message, protocol.STATUS, self._status_answer())
            elif message.kind == protocol.SETUP:
                self._setup(message)
            elif message.kind in self._handlers:
                self._handlers[message.kind](message)
            else:
                raise ProtocolError(f"{message.peer} sent an unknown request {message.kind!r}.")
        except (ProtocolError, msgspec.MsgspecError) as error:
            self._refuse(message, text_of(error))
        except Exception as error:  # A job that fails must not end the server for later jobs.
            text = f"the server failed at {message.kind!r}: {error!r}."
            if self._shard is not None and self._is_of_job(message):
                self._shard.failure = text
            self._refuse(message, text)

    def _refuse(self, message: Message, text: str) -> None:
        self._server.refusals.note(text)
        if self._is_of_job(message):
            self._answer(message, protocol.FAILED, text.encode())

    def _is_of_job(self, message: Message) -> bool:
        with contextlib.suppress(ProtocolError, msgspec.MsgspecError):
            # Every request begins with the fields of `Request`.
            request = from_msgpack(message.details, list)
            return self._shard is not None and request[:1] == [self._shard.setup.job]
        return False

    def _admitted(self, message: Message, kind: type[_R]) -> tuple[Shard, _R] | None:
        """Return the shard and the request; None, after an answer, if it may not be carried out.

        Raises:
            ProtocolError: If the details are malformed.
        """
        request = message.decode_details(kind)
        shard = self._shard
        if shard is None or request.job != shard.setup.job:
            self._answer(message, protocol.UNKNOWN_JOB)
            return None
        if request.worker >= shard.setup.workers:
            raise ProtocolError(f"worker {request.worker} of {shard.setup.workers}.")
        name = protocol.worker_name(request.worker, request.incarnation)
        if message.peer != name:
            # Otherwise a replayed message would get the answers, and count as a sign of life.
            raise ProtocolError(f"{message.peer!r} sent a request of {name!r}.")
        if shard.members.is_shut_out(request):
            self._answer(message, protocol.FENCED)
            return None
        if shard.failure and message.kind != protocol.LEAVE:
            raise ProtocolError(shard.failure)
        self._server.trust(message.connection)
        is_first = not shard.members.by_index[request.worker].incarnation
        if shard.members.admit(request, message.peer, time.monotonic()):
            if not is_first:
                # The others wait for the first process of a worker, however late it begins.
                shard.rejoin(request.worker)
            assert self._values is not None
            self._values.forget(request.worker)
            self._snapshots.save_workers(shard)
        return shard, request

    def _setup(self, message: Message) -> None:
        job = message.decode_details(protocol.Request).job
        now = time.monotonic()
        if self._shard is not None:
            members = self._shard.members
            if self._shard.setup.job == job:
                members.note_description(now)
                self._answer(message, protocol.DONE)
                return
            if not members.are_over(now):
                silence = msgspec.msgpack.encode(members.silence(now))
                self._answer(message, protocol.BUSY, silence)
                return
        try:
            setup = message.decode(protocol.JobSetup)
            if setup.job != job:
                raise ProtocolError(f"{message.peer} described another job than its own.")
            _require_room(setup.workers, "workers")
            shard = Shard(setup, is_persistent=self._snapshots.is_on, now=now)
        except Exception as error:  # Nothing has changed yet, whatever a description contains.
            self._server.refusals.note(error)
            self._answer(message, protocol.FAILED, text_of(error).encode())
            return
        self._end_job()
        self._use(shard)
        self._answer(message, protocol.DONE)

    def _use(self, shard: Shard | None) -> None:
        self._shard = shard
        self._values = None if shard is None else ValueQueue(self._server, shard)
        self._notices = None if shard is None else MergeNoticeSender(self._server, shard.members)

    def _end_job(self) -> None:
        """Forget the job, and remove its snapshot: a restarted server would resume the job."""
        self._snapshots.forget()
        self._use(None)

    def _hello(self, message: Message) -> None:
        hello = message.decode_details(protocol.Hello)
        if hello.version != protocol.VERSION:
            raise ProtocolError(
                f"{message.peer} speaks version {hello.version} of the protocol, expected "
                f"{protocol.VERSION}."
            )
        admitted = self._admitted(message, protocol.Hello)
        if admitted is not None:
            welcome = protocol.ServerWelcome(
                version=protocol.VERSION, boot=self._boot, is_started=admitted[0].is_started
            )
            self._answer(message, protocol.WELCOME, msgspec.msgpack.encode(welcome))

    def _load(self, message: Message) -> None:
        admitted = self._admitted(message, protocol.Load)
        if admitted is not None:
            admitted[0].load(admitted[1], memoryview(message.payload))
            self._answer(message, protocol.DONE)

    def _start(self, message: Message) -> None:
        admitted = self._admitted(message, protocol.Request)
        if admitted is None:
            return
        shard = admitted[0]
        if not shard.is_started:
            shard.require_loaded()
            self._snapshots.make_first(shard, time.monotonic())
            if self._snapshots.error:
                raise ProtocolError(f"no snapshot could be written: {self._snapshots.error}.")
            self._snapshots.save_workers(shard)
            shard.start()
        self._answer(message, protocol.DONE)

    def _push(self, message: Message) -> None:
        admitted = self._admitted(message, protocol.Push)
        if admitted is None or self._notices is None:
            return
        shard, answered = admitted[0], []
        try:
            for push, payload in pushes_with_riders(admitted[1], memoryview(message.payload)):
                shard.members.by_index[push.worker].pushed_bytes += len(payload)
                answered.append((push.key, shard.push(push, payload)))
                self._reply(*answered[-1])
        finally:
            self._notices.tell(answered)

    def _pull(self, message: Message) -> None:
        admitted = self._admitted(message, protocol.KeyRequest)
        if admitted is not None:
            self._reply(admitted[1].key, [admitted[0].pull(admitted[1])])

    def _commit(self, message: Message) -> None:
        admitted = self._admitted(message, protocol.Commit)
        if admitted is not None:
            shard, commit = admitted
            for key, answer in shard.commit(commit, memoryview(message.payload)):
                self._reply(key, [answer])

    def _content(self, message: Message) -> None:
        admitted = self._admitted(message, protocol.ContentRequest)
        # A restarted server waits for pushes; the worker asks again.
        if admitted is not None and admitted[0].has_applied(admitted[1]):
            shard, request = admitted
            self._answer(message, protocol.CONTENT, shard.state_of(request.key).payload().tobytes())

    def _state(self, message: Message) -> None:
        admitted = self._admitted(message, protocol.ContentRequest)
        if admitted is not None and admitted[0].has_applied(admitted[1]):
            shard, request = admitted
            payload = protocol.encode_state(shard.optimizer_state(shard.state_of(request.key)))
            self._answer(message, protocol.STATE, payload)

    def _versions(self, message: Message) -> None:
        admitted = self._admitted(message, protocol.Request)
        if admitted is not None:
            payload = msgspec.msgpack.encode(admitted[0].versions(admitted[1].worker))
            self._answer(message, protocol.VERSIONS, payload)

    def _ping(self, message: Message) -> None:
        if self._admitted(message, protocol.Request) is not None:
            self._answer(message, protocol.ALIVE, msgspec.msgpack.encode(self._boot))

    def _snapshot(self, message: Message) -> None:
        admitted = self._admitted(message, protocol.Request)
        if admitted is not None:
            self._snapshots.is_wanted = True
            self._send_durable(admitted[0], admitted[1].worker)

    def _leave(self, message: Message) -> None:
        admitted = self._admitted(message, protocol.Request)
        if admitted is None:
            return
        shard, request = admitted
        member = shard.members.by_index[request.worker]
        is_new, member.has_left = not member.has_left, True
        if shard.members.have_left():
            # The job itself stays in memory, since a worker asks again if the answer is lost.
            self._snapshots.forget()
        elif is_new:
            self._snapshots.save_workers(shard)
        if shard.members.have_left() or shard.are_durable(
            request.worker, memoryview(message.payload)
        ):
            self._answer(message, protocol.DONE)
        else:
            # The worker keeps its log, which a restarted server would need. It asks again.
            self._snapshots.is_wanted = True

    def _listen(self, message: Message) -> None:
        request = message.decode_details(protocol.Request)
        is_own = self._shard is not None and request.job == self._shard.setup.job
        if is_own and self._notices is not None:
            self._notices.listen(request, message)

    def _reply(self, key: int, answers: Iterable[Answer]) -> None:
        """Send answers about a key."""
        shard, values = self._shard, self._values
        assert shard is not None
        assert values is not None
        state = shard.states[key]
        for answer in answers:
            if answer.kind == protocol.VALUE:
                values.add(answer.worker, key, answer.number)
                continue
            reply = protocol.KeyReply(
                key=key,
                number=answer.number,
                durable=shard.durable(state, answer.worker),
                workers=list(answer.workers),
                norm=state.norm,
            )
            peer = shard.members.by_index[answer.worker].peer
            with contextlib.suppress(PeerError):
                self._server.send(
                    peer, answer.kind, sequence=0, details=msgspec.msgpack.encode(reply)
                )

    def _answer(self, message: Message, kind: str, payload: bytes = b"") -> None:
        # A worker that is gone needs no answer, and one that reads too slowly asks again.
        with contextlib.suppress(PeerError):
            self._server.send(message.peer, kind, payload, sequence=message.sequence)

    def _look(self, now: float) -> None:
        """Shut out silent workers."""
        if now < self._next_look or self._shard is None:
            return
        self._next_look = now + _LOOK_SECONDS
        silent, released = self._shard.shut_out_silent(now)
        if silent or not self._snapshots.workers_are_saved:
            self._snapshots.save_workers(self._shard)
        for key, answer in released:
            self._reply(key, [answer])

    def _tell_durable(self) -> None:
        """Tell all workers what they need not keep any more."""
        assert self._shard is not None
        for worker, member in enumerate(self._shard.members.by_index):
            if member.is_active:
                self._send_durable(self._shard, worker)

    def _send_durable(self, shard: Shard, worker: int) -> None:
        payload = msgspec.msgpack.encode(shard.versions(worker))
        with contextlib.suppress(PeerError):
            self._server.send(
                shard.members.by_index[worker].peer, protocol.DURABLE, payload, sequence=0
            )


def _require_room(workers: int, name: str) -> None:
    """Check that this process can hold the connections of so many workers."""
    _LIMITS.for_clients(workers, name, connections_each=_CONNECTIONS)
