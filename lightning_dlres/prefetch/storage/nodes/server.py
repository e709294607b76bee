"""A storage node: sends samples, many in one reply. One thread talks, a few read.

What it keeps of its clients are the requests under way, so it may be killed and started again at
any time. Clients are served in turn, and a request is read only where there is room for its reply:
one that asks for much or reads slowly costs a bounded amount, and the others nothing.
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
from lightning_dlres.core.wire.frames import Message
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.core.wire.outbox import Outbox, SendPatience
from lightning_dlres.core.wire.server import Server, SocketLimits
from lightning_dlres.prefetch.storage.nodes import protocol
from lightning_dlres.prefetch.storage.readers import Reader

_POLL_SECONDS = 1.0
# While replies wait for clients, ZeroMQ does not say when they have left.
_BUSY_SECONDS = 0.02
# Messages of this protocol are small.
_LIMITS = SocketLimits(
    message_bytes=protocol.MESSAGE_BYTES, unread_bytes=32 << 20, connections=1024, queued=256
)
# Requests of one client that wait for their turn.
_MOST_WAITING = 1024


@dataclass(frozen=True)
class _Work:
    """A request, and the bytes that are reserved for its reply. Either `numbers` are asked for, or
    `wish` is a part of the table."""

    message: Message
    nbytes: int
    numbers: NDArray[np.uint32] | None = None
    wish: protocol.PartWish | None = None


class StoreNode:
    """Serves the samples of a source as one of N nodes, from a thread of its own until `close`.

    Any node can serve every sample that its source has; which are asked of it follows from its
    place among the nodes.

    Args:
        reader: of the source.
        node, nodes: which node of how many this is.
        bind, port, path, curve, allowed, allow_any, insecure: as for `core.net.Server`.
        read_threads: how many requests are read at once.
        emulate_delay: seconds, or text such as "5ms", that every request takes longer; for
            measuring.
        patience: with clients that read slowly.

    Raises:
        ConfigError: a bad number, or the address cannot be bound.
        StorageError: a sample that is looked at first cannot be read.
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
        patience: SendPatience | None = None,
    ) -> None:
        if not 0 <= node < nodes:
            raise ConfigError(got_expected("node", node, f"0 to {nodes - 1}", "node=0, nodes=1"))
        if read_threads < 1:
            raise ConfigError(got_expected("read_threads", read_threads, "at least 1", "4"))
        self._delay = parse_seconds(emulate_delay, "emulate_delay")
        self._reader = reader
        table = reader.table
        self._welcome = protocol.Welcome(
            protocol.VERSION, len(table), table.digest, node, nodes, reader.contents
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
        self._outbox = Outbox(self._server, patience)
        # Clients whose requests wait, in the order in which they are served.
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()
        self._reading, self._read_threads = 0, read_threads
        self.endpoint = self._server.endpoint
        self.requests = 0
        self.sent_bytes = 0
        self._done: deque[tuple[_Work, str, bytes]] = deque()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(read_threads, thread_name_prefix="dlres-store-read")
        self._thread = start_service(self._run, "dlres-store")

    def close(self) -> None:
        """Stop; may be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._server.interrupt()
        self._thread.join()
        # A read that hangs is left behind.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._server.close()

    def __enter__(self) -> StoreNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def refused(self) -> int:
        """How many messages and connections were refused."""
        return self._server.refusals.count

    def _run(self) -> None:
        while not self._closing.is_set():
            busy = bool(self._outbox.nbytes)
            message = self._server.receive(_BUSY_SECONDS if busy else _POLL_SECONDS)
            if message:
                self._take(message)
            while self._done:
                work, kind, payload = self._done.popleft()
                self._reading -= 1
                if not self._outbox.reply(work.message, work.nbytes, kind, payload):
                    # Other clients must not wait for reads of a client that is gone.
                    self._waiting.pop(work.message.peer, None)
            self._outbox.release_sent_and_drop_slow()
            self._start_reading()

    def _take(self, message: Message) -> None:
        try:
            if message.kind == protocol.HELLO:
                self._answer(message, protocol.WELCOME, msgspec.msgpack.encode(self._welcome))
            elif message.kind == protocol.TABLE:
                self._queue(self._part(message))
            elif message.kind == protocol.GET:
                self._queue(self._samples(message))
            else:
                raise ProtocolError(
                    f"{message.peer} sent {message.kind!r}, expected hello, table or get."
                )
        except ProtocolError as error:
            self._server.refusals.note(error)
            self._answer(message, protocol.FAILED, text_of(error).encode())

    def _part(self, message: Message) -> _Work:
        wish = message.decode(protocol.PartWish)
        samples = len(self._reader.table)
        if not 0 < wish.count <= samples - wish.first:
            raise ProtocolError(f"{message.peer} sent {wish}, no part of {samples} samples.")
        return _Work(message, protocol.REPLY_BYTES, wish=wish)

    def _samples(self, message: Message) -> _Work:
        table = self._reader.table
        numbers = protocol.unpack_numbers(message.payload, len(table), message.peer)
        sizes = table.sizes[numbers]
        count = protocol.fitting(sizes)
        return _Work(message, int(sizes[:count].sum()), numbers=numbers[:count])

    def _queue(self, work: _Work) -> None:
        peer = work.message.peer
        own = self._waiting.setdefault(peer, deque())
        if len(own) >= _MOST_WAITING:
            raise ProtocolError(
                f"{peer} has {len(own)} requests under way, expected fewer. Try a smaller "
                "`max_inflight_requests`."
            )
        own.append(work)

    def _start_reading(self) -> None:
        """Begin with those requests, one of each client in turn, whose replies have room."""
        for peer in list(self._waiting):
            if self._reading >= self._read_threads:
                return
            own = self._waiting[peer]
            if self._outbox.reserve(own[0].message, own[0].nbytes):
                self._reading += 1
                self._pool.submit(self._work, own.popleft())
            if own:
                self._waiting.move_to_end(peer)
            else:
                del self._waiting[peer]

    def _work(self, work: _Work) -> None:
        try:
            if work.wish is not None:
                kind, payload = protocol.TABLE, self._read_part(work.wish)
            else:
                assert work.numbers is not None
                kind, payload = protocol.DATA, self._read(work.numbers)
        except StorageError as error:
            kind, payload = protocol.LOST, text_of(error).encode()
        except OSError as error:
            kind, payload = protocol.FAILED, text_of(error).encode()
        except Exception as error:  # a client must not wait for its deadline to hear of a fault
            kind, payload = protocol.FAILED, text_of(repr(error)).encode()
        self._done.append((work, kind, payload))
        self._server.interrupt()

    def _read_part(self, wish: protocol.PartWish) -> bytes:
        count = wish.count
        while True:
            data = b"".join(self._reader.table.part(wish.first, count).to_bytes())
            if len(data) <= protocol.REPLY_BYTES or count == 1:
                return data
            count = -(-count // 2)

    def _read(self, numbers: NDArray[np.uint32]) -> bytes:
        if self._delay:
            time.sleep(self._delay)
        data = b"".join(self._reader.read(numbers))
        self.requests += 1
        self.sent_bytes += len(data)
        return data

    def _answer(self, message: Message, kind: str, payload: bytes) -> None:
        # Gone, or too slow to take replies in: it asks again, or is no more.
        with contextlib.suppress(PeerError):
            self._server.send(message.peer, kind, payload, sequence=message.sequence)
