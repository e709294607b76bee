"""A storage node: sends samples, many in one reply. One thread talks, a few read.

It keeps no state of its clients, so it may be killed and started again at any time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from lightning_dlres.core.errors import (
    ConfigError,
    PeerError,
    ProtocolError,
    StorageError,
    got_expected,
)
from lightning_dlres.core.frames import Message
from lightning_dlres.core.net import CurveKeys, Server
from lightning_dlres.core.units import format_bytes, parse_seconds
from lightning_dlres.prefetch.storage import protocol
from lightning_dlres.prefetch.storage.readers import Reader

_POLL_SECONDS = 1.0
_SEND_SECONDS = 5.0
# A reply is one message, which is in memory as a whole, on both sides.
_MOST_BYTES = 1 << 32


class StoreNode:
    """Serves the samples of a source as one of N nodes, from a thread of its own until `close`.

    Any node can serve every sample that its source has; which are asked of it follows from its
    place among the nodes.

    Args:
        reader: of the source.
        node, nodes: which node of how many this is.
        bind, port, path, curve, allowed, allow_any: as for `core.net.Server`.
        concurrency: how many requests are read at once.
        emulate_delay: seconds, or text such as "5ms", that every request takes longer; for
            measuring.

    Raises:
        ConfigError: a bad number, or the address cannot be bound.
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
        concurrency: int = 4,
        emulate_delay: float | str = 0.0,
    ) -> None:
        if not 0 <= node < nodes:
            raise ConfigError(got_expected("node", node, f"0 to {nodes - 1}", "node=0, nodes=1"))
        if concurrency < 1:
            raise ConfigError(got_expected("concurrency", concurrency, "at least 1", "4"))
        self._delay = parse_seconds(emulate_delay, "emulate_delay")
        self._reader = reader
        table = reader.table
        self._welcome = protocol.Welcome(protocol.VERSION, len(table), table.digest, node, nodes)
        self._server = Server(
            bind=bind,
            port=port,
            path=path,
            curve=curve,
            allowed=allowed,
            allow_any=allow_any,
            send_timeout=_SEND_SECONDS,
        )
        self.endpoint = self._server.endpoint
        self.requests = 0
        self.sent_bytes = 0
        self._done: deque[tuple[Message, str, bytes]] = deque()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="dlres-store-read")
        self._thread = threading.Thread(target=self._run, name="dlres-store", daemon=True)
        self._thread.start()

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

    def _run(self) -> None:
        while not self._closing.is_set():
            # A client that sends nonsense is told so where it can be; others are served on.
            with contextlib.suppress(ProtocolError):
                message = self._server.receive(_POLL_SECONDS)
                if message:
                    self._take(message)
            while self._done:
                self._answer(*self._done.popleft())

    def _take(self, message: Message) -> None:
        try:
            if message.kind == protocol.HELLO:
                self._answer(message, protocol.WELCOME, msgspec.msgpack.encode(self._welcome))
            elif message.kind == protocol.TABLE:
                wish = message.decode(protocol.PartWish)
                self._pool.submit(self._work, message, wish)
            elif message.kind == protocol.GET:
                self._pool.submit(self._work, message, None)
            else:
                raise ProtocolError(f"got {message.kind!r}, expected hello, table or get.")
        except ProtocolError as error:
            self._answer(message, protocol.FAILED, str(error).encode())

    def _work(self, message: Message, wish: protocol.PartWish | None) -> None:
        try:
            if wish is not None:
                if not 0 < wish.count <= len(self._reader.table) - wish.first:
                    raise ProtocolError(f"{wish} is no part of {len(self._reader.table)} samples.")
                part = self._reader.table.part(wish.first, wish.count)
                kind, payload = protocol.TABLE, b"".join(part.to_bytes())
            else:
                kind, payload = protocol.DATA, self._read(message)
        except (StorageError, ProtocolError, OSError) as error:
            kind, payload = protocol.FAILED, str(error).encode()
        except Exception as error:  # a client must not wait for its deadline to hear of a fault
            kind, payload = protocol.FAILED, repr(error).encode()
        self._done.append((message, kind, payload))
        self._server.interrupt()

    def _read(self, message: Message) -> bytes:
        samples = len(self._reader.table)
        numbers = protocol.unpack_numbers(message.payload, samples, message.peer)
        if self._delay:
            time.sleep(self._delay)
        wanted = int(self._reader.table.sizes[numbers].sum())
        if wanted > _MOST_BYTES and len(numbers) > 1:
            raise ProtocolError(
                f"{message.peer} asked for {format_bytes(wanted)} at once, expected at most "
                f"{format_bytes(_MOST_BYTES)}. Try a smaller `prefetch`."
            )
        data = b"".join(self._reader.read(numbers))
        self.requests += 1
        self.sent_bytes += len(data)
        return data

    def _answer(self, message: Message, kind: str, payload: bytes) -> None:
        # Gone, or too slow to take replies in: it asks again, or is no more.
        with contextlib.suppress(PeerError):
            self._server.send(message.peer, kind, payload, sequence=message.sequence)
