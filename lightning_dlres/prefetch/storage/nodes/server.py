"""Storage node: server that sends samples, many in one reply.

One thread serves the socket, and a few others read samples. A node may be killed and started again
at any time, because it keeps no state of clients except their requests in flight. Clients are
served in turn, and samples are read only once there is room for the reply. So a client that
requests many samples, or receives slowly, takes a bounded amount of memory and delays no other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import (
    ConfigError,
    PeerError,
    ProtocolError,
    StorageError,
    got_expected,
    text_of,
)
from lightning_dlres.core.host.service import start_service
from lightning_dlres.core.units import parse_seconds
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.core.wire.message import Message, protocol_error
from lightning_dlres.core.wire.outbox import Outbox, ReplyLimits
from lightning_dlres.core.wire.server import Server, SocketLimits
from lightning_dlres.prefetch.storage.nodes import protocol
from lightning_dlres.prefetch.storage.readers import Reader

# Longest wait for a message, in seconds.
_POLL_SECONDS = 1.0
# The same while replies wait for clients: ZeroMQ does not announce when replies have been sent.
_BUSY_SECONDS = 0.02
# Requests of this protocol are small.
_LIMITS = SocketLimits(
    frame_bytes=protocol.MESSAGE_BYTES, unread_bytes=32 << 20, connections=1024, queued=256
)
# Maximum number of requests of one client that wait for their turn.
_MAX_WAITING = 1024


@dataclass(frozen=True)
class _ReadTask:
    """Request whose samples or rows have to be read from the source.

    Attributes:
        message: The request.
        nbytes: Bytes that are reserved for its reply.
        sample_ids: uint32[n], the samples of a "get"; None for a "table".
        rows: Rows of a "table"; None for a "get".
    """

    message: Message
    nbytes: int
    sample_ids: NDArray[np.uint32] | None = None
    rows: protocol.TableRows | None = None


class StoreNode:
    """Server of the samples of a source, as one of N nodes; it runs in a thread until `close`.

    Every node can serve all samples of its source. Clients request sample i from node i mod
    `nodes`, or from the next nodes if samples have replicas.

    Args:
        reader: Reader of the source.
        node: Index of this node, from 0.
        nodes: Number of nodes.
        bind, port, path, curve, allowed, allow_any, insecure: See `core.wire.server.Server`.
        read_threads: Number of requests that are read at once.
        emulate_delay: Seconds, or text such as "5ms", by which each read of samples is delayed;
            for benchmarks. Requests for the table are not delayed.
        reply_limits: Limits for clients that receive slowly; None for the default.

    Raises:
        ConfigError: If a value is out of range, or the address cannot be bound.
        StorageError: If one of the samples that are hashed at the start cannot be read.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        node: int = 0,
        nodes: int = 1,
        bind: str = "127.0.0.1",
        port: int = 0,
        path: Path | None = None,
        curve: CurveKeys | None = None,
        allowed: Collection[bytes] = (),
        allow_any: bool = False,
        insecure: bool = False,
        read_threads: int = 4,
        emulate_delay: float | str = 0.0,
        reply_limits: ReplyLimits | None = None,
    ) -> None:
        if not 0 <= node < nodes:
            raise ConfigError(got_expected("node", node, f"0 to {nodes - 1}", "node=0, nodes=1"))
        if read_threads < 1:
            raise ConfigError(
                got_expected("read_threads", read_threads, "at least 1", "read_threads=4")
            )
        self._delay = parse_seconds(emulate_delay, "emulate_delay")
        self._reader = reader
        table = reader.table
        self._welcome = protocol.Welcome(
            protocol.VERSION, len(table), table.digest, node, nodes, reader.content_digest
        )
        self._server = Server(
            bind=bind,
            port=port,
            path=path,
            curve=curve,
            allowed=allowed,
            allow_any=allow_any,
            insecure=insecure,
            limits=_LIMITS,
        )
        self._outbox = Outbox(self._server, reply_limits)
        # Waiting requests of each client; the client at the front is served next.
        self._waiting: OrderedDict[str, deque[_ReadTask]] = OrderedDict()
        # Number of requests that are being read.
        self._num_reading, self._read_threads = 0, read_threads
        self.address = self._server.address
        # Totals since the start: "get" requests whose samples were read, and bytes of the samples.
        self.requests = 0
        self.sent_bytes = 0
        # Replies: the reading threads append them, and the node's own thread sends them.
        self._done: deque[tuple[_ReadTask, str, bytes]] = deque()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(read_threads, thread_name_prefix="dlres-store-read")
        self._thread = start_service(self._run, "dlres-store")

    def close(self) -> None:
        """Stop serving. May be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._server.interrupt()
        self._thread.join()
        # Do not wait: a read that hangs never ends.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._server.close()

    def __enter__(self) -> StoreNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def refused(self) -> int:
        """Number of messages and connections that were refused."""
        return self._server.refusals.count

    def _run(self) -> None:
        while not self._closing.is_set():
            has_unsent = bool(self._outbox.nbytes)
            message = self._server.receive(_BUSY_SECONDS if has_unsent else _POLL_SECONDS)
            if message:
                self._handle(message)
            while self._done:
                task, kind, payload = self._done.popleft()
                self._num_reading -= 1
                if not self._outbox.reply(task.message, task.nbytes, kind, payload):
                    # The client is gone. Drop its requests, so that others do not wait for them.
                    self._waiting.pop(task.message.peer, None)
            self._outbox.release_sent_and_drop_slow()
            self._start_reading()

    def _handle(self, message: Message) -> None:
        try:
            if message.kind == protocol.HELLO:
                self._answer(message, protocol.WELCOME, msgspec.msgpack.encode(self._welcome))
            elif message.kind == protocol.TABLE:
                self._enqueue(self._table_task(message))
            elif message.kind == protocol.GET:
                self._enqueue(self._samples_task(message))
            else:
                raise protocol_error(message.peer, f"{message.kind!r}", "hello, table or get")
        except ProtocolError as error:
            self._server.refusals.note(error)
            self._answer(message, protocol.FAILED, text_of(error).encode())

    def _table_task(self, message: Message) -> _ReadTask:
        rows = message.decode(protocol.TableRows)
        samples = len(self._reader.table)
        if not 0 < rows.count <= samples - rows.first:
            raise protocol_error(message.peer, f"{rows}", f"rows within {samples} samples")
        return _ReadTask(message, protocol.REPLY_BYTES, rows=rows)

    def _samples_task(self, message: Message) -> _ReadTask:
        table = self._reader.table
        sample_ids = protocol.unpack_sample_ids(bytes(message.payload), len(table), message.peer)
        sizes = table.sizes[sample_ids]
        count = protocol.samples_in_reply(sizes)
        return _ReadTask(message, int(sizes[:count].sum()), sample_ids=sample_ids[:count])

    def _enqueue(self, task: _ReadTask) -> None:
        peer = task.message.peer
        tasks = self._waiting.setdefault(peer, deque())
        if len(tasks) >= _MAX_WAITING:
            raise ProtocolError(
                f"{peer} has {len(tasks)} requests in flight, expected fewer. Use a smaller "
                "max_inflight_requests."
            )
        tasks.append(task)

    def _start_reading(self) -> None:
        """Start to read the samples of requests whose replies have room, one request of each client
        in turn."""
        for peer in list(self._waiting):
            if self._num_reading >= self._read_threads:
                return
            tasks = self._waiting[peer]
            if self._outbox.reserve(tasks[0].message, tasks[0].nbytes):
                self._num_reading += 1
                self._pool.submit(self._run_task, tasks.popleft())
            if tasks:
                self._waiting.move_to_end(peer)
            else:
                del self._waiting[peer]

    def _run_task(self, task: _ReadTask) -> None:
        """Read the samples or rows of a request; runs in a reading thread."""
        try:
            if task.rows is not None:
                kind, payload = protocol.TABLE, self._read_rows(task.rows)
            else:
                assert task.sample_ids is not None
                kind, payload = protocol.DATA, self._read(task.sample_ids)
        except StorageError as error:
            kind, payload = protocol.LOST, text_of(error).encode()
        except OSError as error:
            kind, payload = protocol.FAILED, text_of(error).encode()
        except Exception as error:  # the client must get an answer, not wait for its deadline
            kind, payload = protocol.FAILED, text_of(repr(error)).encode()
        self._done.append((task, kind, payload))
        self._server.interrupt()

    def _read_rows(self, rows: protocol.TableRows) -> bytes:
        """Return the first rows of those requested, about as many as fit into a reply."""
        count = rows.count
        while True:
            data = b"".join(self._reader.table.rows(rows.first, count).to_bytes())
            if len(data) <= protocol.REPLY_BYTES or count == 1:
                return data
            count = -(-count // 2)

    def _read(self, sample_ids: NDArray[np.uint32]) -> bytes:
        if self._delay:
            time.sleep(self._delay)
        data = b"".join(self._reader.read(sample_ids))
        self.requests += 1
        self.sent_bytes += len(data)
        return data

    def _answer(self, message: Message, kind: str, payload: bytes) -> None:
        # A client that is gone needs no answer. One that receives too slowly sends its request
        # again.
        with contextlib.suppress(PeerError):
            self._server.send(message.peer, kind, payload, sequence=message.sequence)
