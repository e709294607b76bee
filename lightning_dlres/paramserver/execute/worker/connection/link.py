"""Connection of a worker to one server, with a thread that sends, receives and asks again.

Nothing is taken for granted: a message may be lost, arrive twice, or arrive late. The thread asks
for each awaited value from time to time. The server then sends it, names the workers that it waits
for, or asks for pushes that it lacks.
"""

from __future__ import annotations

import math
import threading
import time

import msgspec

from lightning_dlres.core.errors import PeerError, PeerLostError, ProtocolError
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.core.wire.message import Buffer, Message
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.riders import values_with_riders
from lightning_dlres.paramserver.execute.worker.connection.merge_listener import MergeListener
from lightning_dlres.paramserver.execute.worker.connection.pending_request import (
    PendingRequest,
    backoff,
)
from lightning_dlres.paramserver.execute.worker.connection.push_window import PushWindow
from lightning_dlres.paramserver.execute.worker.connection.worker_outbox import (
    FIRST_SEQUENCE,
    WorkerOutbox,
)
from lightning_dlres.paramserver.execute.worker.state.exchange import Exchange, KeyExchange
from lightning_dlres.paramserver.execute.worker.state.push_log import NOT_COMMITTED, LogEntry

# Longest wait for a message in seconds, unless messages are sent again earlier.
_IDLE_SECONDS = 0.25
# Queries in one look.
_MAX_QUERIES = 32
# Answers that ask for pushes that are not in the log, before the worker gives up. A late message
# may ask for pushes that are not needed any more.
_MAX_UNANSWERABLE = 20
# Longest text of a server in an error, in bytes, and the most workers that an error names.
_MAX_TEXT, _MAX_NAMED = 2000, 8


class ServerLink:
    """Connection to one server.

    Args:
        address: Address of the server.
        index: Index of the server.
        exchange: State of the exchange, shared by all threads.
        retry_seconds: Time without an answer after which a message is sent again.
        silence_seconds: Time without any message after which the connection is replaced.
        curve, server_key: See `core.wire.endpoint.Client`.
    """

    def __init__(
        self,
        address: str,
        index: int,
        exchange: Exchange,
        *,
        retry_seconds: float,
        silence_seconds: float,
        curve: CurveKeys | None = None,
        server_key: bytes | None = None,
    ) -> None:
        self.address, self.index = address, index
        self.name = f"server {index} ({address})"
        # Servers know no job, and answer no ping, before worker 0 has described it.
        self.pings = False
        # Clock at the last message of the server; -inf before the first.
        self.last_heard = -math.inf
        # Clock at the last value or merge that was awaited; -inf before the first.
        self._last_progress = -math.inf
        # Clock at the last answer to a request; -inf before the first.
        self._last_answer = -math.inf
        self._exchange, self._retry_seconds = exchange, retry_seconds
        self._silence_seconds, self._connected = silence_seconds, time.monotonic()
        self._client = Client(
            protocol.worker_name(exchange.worker, exchange.incarnation),
            address,
            server=f"server {index}",
            curve=curve,
            server_key=server_key,
            max_frame_bytes=protocol.FRAME_BYTES,
            copies=False,
        )
        self._listener = MergeListener(
            address, f"server {index}", exchange, self._client, curve=curve, server_key=server_key
        )
        self._keys = [one for one in exchange.keys if one.key.server == index]
        self._window = PushWindow(
            is_synchronous=exchange.is_synchronous,
            lead=exchange.lead,
            server=index,
            wake=self._client.interrupt,
        )
        self._outbox = WorkerOutbox(self._client, exchange, self._window, retry_seconds)
        self._next_query = self._next_ping = 0.0
        # Random number of the server's process; None before its first message.
        self._boot: int | None = None
        # Request for the versions of a restarted server.
        self._version_request: PendingRequest | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"dlres-ps-{index}", daemon=True)
        self._thread.start()

    def push(self, entry: LogEntry) -> None:
        """Send a push; the caller holds the exchange's lock."""
        self._outbox.add_push(entry)
        self._client.interrupt()

    def request(self, kind: str, details: msgspec.Struct, payload: Buffer = b"") -> PendingRequest:
        """Send a request until it is answered; its answer comes later."""
        encoded = msgspec.msgpack.encode(details)
        with self._exchange.lock:
            pending = self._outbox.add_request(kind, encoded, payload)
        self._client.interrupt()
        return pending

    def post(self, kind: str, details: msgspec.Struct, payload: bytes = b"") -> None:
        """Send a message once, which has no answer of its own."""
        with self._exchange.lock:
            self._outbox.add_note(kind, msgspec.msgpack.encode(details), payload)
        self._client.interrupt()

    def post_commit(self, numbers: list[tuple[int, int]], scale: float) -> None:
        """Send a commit of keys, by index and number."""
        request = self._exchange.request()
        commit = protocol.Commit(
            job=request.job, worker=request.worker, incarnation=request.incarnation, scale=scale
        )
        self.post(protocol.COMMIT, commit, msgspec.msgpack.encode(numbers))

    def close(self) -> None:
        """End the thread, and close the connection. May be called again."""
        self._closing = True
        self._client.interrupt()
        self._thread.join()
        self._listener.close()
        self._client.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._turn()
                except ProtocolError:
                    # A damaged message is like a lost one: what it answered is asked for again.
                    continue
        except PeerError as error:
            self._exchange.fail(error)
        except Exception as error:  # The training thread must not wait for an ended thread.
            self._exchange.fail(PeerError(f"the connection to {self.name} failed: {error!r}"))

    def _turn(self) -> None:
        """Send what is due, and handle the next message."""
        with self._exchange.lock:
            self._outbox.send(self._last_answer)
            idle = self._outbox.idle_seconds(min(_IDLE_SECONDS, self._retry_seconds / 4))
        message = self._client.receive(idle)
        with self._exchange.lock:
            now = time.monotonic()
            if message is not None:
                self.last_heard = now
                self._handle(message, now)
            self._hear(now)
            self._reconnect_if_silent(now)
            if now >= self._next_query:
                self._next_query = now + self._retry_seconds / 4
                self._query(now)
            if now >= self._next_ping:
                self._next_ping = now + max(self._retry_seconds, 0.5)
                self._send_ping()

    def _reconnect_if_silent(self, now: float) -> None:
        is_silent = now - max(self.last_heard, self._connected) > self._silence_seconds
        if is_silent and (self.pings or self._outbox.requests):
            self._connected = now
            self._client.reconnect()
            self._listener.reconnect()

    def _hear(self, now: float) -> None:
        """Let pushes go on whose predecessors were merged."""
        for notice in self._listener.heard():
            if notice.number >= self._own(notice.key).number:
                self._window.merged(notice.key, now)

    def _query(self, now: float) -> None:
        """Ask for values that have been awaited for long.

        While other values arrive, the awaited ones are probably in the queue behind them. Asking
        would send them twice, over a link that is slow already.
        """
        asked = 0
        for one in self._keys:
            if not one.is_unconfirmed and (not one.is_awaited or one.is_queued):
                continue
            wait = backoff(self._retry_seconds, one.queries)
            is_early = now - max(one.touched, self._last_progress) < wait
            if is_early or not self._outbox.is_open:
                continue
            one.touched, one.queries = now, one.queries + 1
            self._outbox.send_now(
                protocol.PULL,
                self._exchange.key_request(
                    one.key.index, one.number if one.is_unconfirmed else one.expected
                ),
            )
            asked += 1
            if asked == _MAX_QUERIES:
                return

    def _send_ping(self) -> None:
        if self.pings and self._outbox.is_open:
            self._outbox.send_now(protocol.PING, self._exchange.request())
            self._listener.listen()

    def _handle(self, message: Message, now: float) -> None:
        kind = message.kind
        if kind == protocol.FENCED:
            raise PeerLostError(
                f"{self.name} has shut this process out: it was silent for longer than the "
                "deadline of workers, or another process has taken its place. Start it again; a "
                "Trainer resumes from a checkpoint."
            )
        if kind in (protocol.VALUE, protocol.MERGED, protocol.WAITING, protocol.BEHIND):
            self._handle_key(message, now)
        elif kind == protocol.DURABLE:
            for version in self.versions(message):
                self._exchange.log.note_durable(version.key, version.durable)
            self._exchange.changed.notify_all()
        else:
            self._handle_answer(message)

    def _handle_answer(self, message: Message) -> None:
        pending = self._outbox.requests.get(message.sequence)
        if pending is None:
            if message.kind == protocol.ALIVE:
                self._note_boot(message.decode(int))
                return
            if message.sequence >= FIRST_SEQUENCE:
                # The answer to a request that was sent twice.
                return
            if message.kind == protocol.UNKNOWN_JOB:
                raise PeerLostError(
                    f"{self.name} was started again and has lost the parameters. Start servers "
                    "with --snapshot DIR."
                )
            if message.kind == protocol.FAILED:
                raise self._refusal(message)
            return
        is_unknown = message.kind == protocol.UNKNOWN_JOB
        if is_unknown and pending.kind == protocol.HELLO and self._exchange.worker > 0:
            # Worker 0 has not described the job yet: ask again later.
            return
        self._outbox.requests.remove(message.sequence)
        if pending.tries == 1:
            self._window.note_round_trip(time.monotonic() - pending.sent)
        if message.kind == protocol.FAILED:
            raise self._refusal(message)
        if is_unknown:
            text = "does not know this job any more: it was started again, or another job has begun"
            raise PeerLostError(f"{self.name} {text}. Start this job again.")
        pending.answer, self._last_answer = message, time.monotonic()
        if pending.kind == protocol.HELLO:
            self._note_boot(message.decode(protocol.ServerWelcome).boot)
        elif pending is self._version_request:
            self._confirm(self.versions(message))
        self._exchange.progress = time.monotonic()
        self._exchange.changed.notify_all()

    def _note_boot(self, boot: int) -> None:
        """Compare the versions with a server that was started again.

        It may lack pushes whose values this worker has, while other workers wait for them.
        """
        is_new, self._boot = self._boot not in (None, boot), boot
        if is_new:
            details = msgspec.msgpack.encode(self._exchange.request())
            self._version_request = self._outbox.add_request(protocol.VERSIONS, details)

    def _confirm(self, versions: list[protocol.KeyVersion]) -> None:
        for version in versions:
            one = self._exchange.keys[version.key]
            self._exchange.log.note_durable(version.key, version.durable)
            if self._exchange.owed_after(version.key, version.number) < one.number:
                # The server may have lost its merged gradient, too.
                one.is_merged, one.is_unconfirmed = False, not one.is_awaited
                one.touched, one.queries = -math.inf, 0

    def _handle_key(self, message: Message, now: float) -> None:
        reply = message.decode_details(protocol.KeyReply)
        if message.kind == protocol.VALUE:
            for own, payload in values_with_riders(reply, memoryview(message.payload)):
                self._take_value(own, payload)
            return
        one = self._own(reply.key)
        self._exchange.log.note_durable(reply.key, reply.durable)
        if message.kind == protocol.MERGED:
            self._take_merged(one, reply)
        elif message.kind == protocol.WAITING:
            if reply.number in (one.expected, one.replayed):
                one.waiting_for = tuple(reply.workers[:_MAX_NAMED])
            if not self._exchange.is_synchronous:
                # The push is applied, and only its value is withheld.
                self._go_on_replaying(one, reply.number)
        else:
            self._replay(one, reply.number)

    def versions(self, message: Message) -> list[protocol.KeyVersion]:
        """Return the versions of this server's keys in a message.

        Raises:
            ProtocolError: If it is malformed, or names a key of another server.
        """
        versions = message.decode(list[protocol.KeyVersion])
        for version in versions:
            self._own(version.key)
        return versions

    def _own(self, key: int) -> KeyExchange:
        """Return the exchange of a key, which must be one of this server."""
        if key >= len(self._exchange.keys) or self._exchange.keys[key].key.server != self.index:
            raise ProtocolError(f"{self.name} sent key {key}, which is not one of its own.")
        return self._exchange.keys[key]

    def _refusal(self, message: Message) -> PeerError:
        text = bytes(message.payload[:_MAX_TEXT]).decode(errors="replace")
        return PeerError(f"{self.name} refused: {text}")

    def _take_value(self, reply: protocol.KeyReply, payload: memoryview) -> None:
        one = self._own(reply.key)
        self._exchange.log.note_durable(reply.key, reply.durable)
        one.is_unconfirmed = one.is_unconfirmed and reply.number < one.number
        self._go_on_replaying(one, reply.number)
        if not one.is_awaited or reply.number < one.expected:
            return
        if len(payload) != one.key.nbytes:
            raise ProtocolError(f"{self.name} sent {len(payload)} bytes of {one.key}.")
        one.value, one.value_number, one.is_merged = payload, reply.number, False
        # Another worker may have committed before this one heard of the merge.
        one.norm = reply.norm
        self._exchange.pulled_bytes += len(payload)
        self._note_progress(reply.key)
        self._exchange.answered(reply.key, has_value=True)

    def _take_merged(self, one: KeyExchange, reply: protocol.KeyReply) -> None:
        entry = self._exchange.log.get(reply.key, reply.number)
        if entry is not None and entry.scale != NOT_COMMITTED:
            # The commit was lost, or the server was started again.
            self.post_commit([(reply.key, reply.number)], entry.scale)
        elif reply.number == one.expected and one.is_awaited:
            # A late answer after the commit must not end the queries: the value may be lost. A
            # repeated one is no progress.
            if one.is_committed or one.is_merged:
                return
            if reply.norm < 0:
                raise ProtocolError(f"{self.name} sent the squared norm {reply.norm} of {one.key}.")
            one.is_merged, one.norm = True, reply.norm
            self._note_progress(reply.key)
            self._exchange.answered(reply.key, has_value=False)

    def _note_progress(self, key: int) -> None:
        self._last_progress = time.monotonic()
        self._window.answered(key, self._last_progress)

    def _go_on_replaying(self, one: KeyExchange, number: int) -> None:
        """Send the next push again, if the server has the last one that was sent again."""
        if 0 <= one.replayed <= number:
            self._exchange.progress = self._last_progress = time.monotonic()
            self._replay(one, number)

    def _replay(self, one: KeyExchange, number: int) -> None:
        """Send the push of a key after a number again; later ones follow when the server has it.

        It would refuse later ones until then, and ask for all of them again with each refusal.
        """
        number = self._exchange.owed_after(one.key.index, number)
        if number >= one.number:
            one.replayed = -1
            return
        entry = self._exchange.log.get(one.key.index, number + 1)
        if entry is None:
            one.unanswerable += 1
            if one.unanswerable > _MAX_UNANSWERABLE:
                raise PeerLostError(
                    f"{self.name} has lost push {number + 1} of {one.key}, which is not in this "
                    "worker's log any more. Resume from a checkpoint."
                )
            return
        one.replayed = number + 1
        self.push(entry)
