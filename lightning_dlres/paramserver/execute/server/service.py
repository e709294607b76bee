"""A server: its socket, its thread, the job that it serves, and snapshots.

One thread does everything, between two messages: merges, updates, copies for a snapshot. ZeroMQ's
own thread receives and sends in the meantime, and another thread writes snapshots.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from lightning_dlres.core.errors import ConfigError, ProtocolError, text_of
from lightning_dlres.core.host.service import start_service
from lightning_dlres.core.units import parse_seconds
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.core.wire.message import Message
from lightning_dlres.core.wire.server import Server, SocketLimits
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.job_requests import JobRequests, answer, request_of
from lightning_dlres.paramserver.execute.server.shard import MAX_WORKERS, Shard
from lightning_dlres.paramserver.execute.server.snapshot_schedule import SnapshotSchedule
from lightning_dlres.paramserver.execute.server.snapshots import SnapshotFiles
from lightning_dlres.paramserver.execute.server.status import StatusAnswer, server_status

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
        ConfigError: If the address cannot be bound, the snapshot is damaged or used by another
            server, or its job has more workers than this process can connect.
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
        # Lock of the snapshot's files.
        self._held = contextlib.ExitStack()
        # Requests of the job; None without one.
        self._job: JobRequests | None = None
        self._status_answer = StatusAnswer(self.status)
        files: SnapshotFiles | None = None
        shard: Shard | None = None
        if snapshot is not None:
            port = int(self.address.rpartition(":")[2])
            try:
                files, shard = SnapshotFiles.open(snapshot, port, self._started, self._held)
                if shard is not None:
                    _require_room(shard.setup.workers, "workers of the snapshot's job")
            except ConfigError:
                self._held.close()
                self._server.close()
                raise
        self._snapshots = SnapshotSchedule(files, seconds, self._server.refusals.note)
        if shard is not None:
            self._take(shard)
        self._closing = threading.Event()
        self._thread = start_service(self._run, "dlres-ps")

    def close(self) -> None:
        """Stop serving, without a last snapshot. May be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._server.interrupt()
        self._thread.join()
        self._held.close()
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
            self._shard(),
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
            if self._job is not None and not self._job.values.is_empty:
                wait = self._job.values.wait.seconds
            # A snapshot goes on between two messages, without waiting for one.
            copied, is_durable = self._snapshots.advance(self._shard(), time.monotonic())
            if is_durable and self._job is not None:
                self._job.tell_durable()
            message = self._server.receive(0.0 if copied else wait)
            if message is not None:
                self._handle(message)
                # Free the payload. Otherwise it stays in memory until the next message comes.
                del message
            if self._job is not None:
                self._job.values.advance()
                self._job.look(time.monotonic())

    def _handle(self, message: Message) -> None:
        try:
            if message.kind == protocol.STATUS:
                answer(self._server, message, protocol.STATUS, self._status_answer())
            elif message.kind == protocol.SETUP:
                self._setup(message)
            else:
                self._request(message)
        except (ProtocolError, msgspec.MsgspecError) as error:
            self._refuse(message, text_of(error))
        except Exception as error:  # A job that fails must not end the server for later jobs.
            text = f"the server failed at {message.kind!r}: {error!r}."
            if self._job is not None and self._is_of_job(message):
                self._job.shard.failure = text
            self._refuse(message, text)

    def _request(self, message: Message) -> None:
        request = request_of(message)
        if self._job is not None and request.job == self._job.shard.setup.job:
            self._job.handle(message, request)
        elif message.kind != protocol.LISTEN:
            answer(self._server, message, protocol.UNKNOWN_JOB)

    def _refuse(self, message: Message, text: str) -> None:
        self._server.refusals.note(text)
        if self._is_of_job(message):
            answer(self._server, message, protocol.FAILED, text.encode())

    def _is_of_job(self, message: Message) -> bool:
        with contextlib.suppress(ProtocolError, msgspec.MsgspecError):
            # Every request begins with the fields of `Request`.
            request = from_msgpack(message.details, list)
            return self._job is not None and request[:1] == [self._job.shard.setup.job]
        return False

    def _setup(self, message: Message) -> None:
        job = message.decode_details(protocol.Request).job
        now = time.monotonic()
        if self._job is not None:
            shard = self._job.shard
            if shard.setup.job == job:
                shard.members.note_description(now)
                answer(self._server, message, protocol.DONE)
                return
            if not shard.members.are_over(now):
                silence = msgspec.msgpack.encode(shard.members.silence(now))
                answer(self._server, message, protocol.BUSY, silence)
                return
        try:
            setup = message.decode(protocol.JobSetup)
            if setup.job != job:
                raise ProtocolError(f"{message.peer} described another job than its own.")
            _require_room(setup.workers, "workers")
            shard = Shard(setup, is_persistent=self._snapshots.is_on, now=now)
        except Exception as error:  # Nothing has changed yet, whatever a description contains.
            self._server.refusals.note(error)
            answer(self._server, message, protocol.FAILED, text_of(error).encode())
            return
        # A restarted server would resume the earlier job.
        self._snapshots.forget()
        self._take(shard)
        answer(self._server, message, protocol.DONE)

    def _take(self, shard: Shard) -> None:
        """Serve a job from now on."""
        self._job = JobRequests(self._server, shard, self._snapshots, self._boot)

    def _shard(self) -> Shard | None:
        return None if self._job is None else self._job.shard


def _require_room(workers: int, name: str) -> None:
    """Check that this process can hold the connections of so many workers."""
    _LIMITS.for_clients(workers, name, connections_each=_CONNECTIONS)
