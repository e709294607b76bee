"""A folder, a store on a disk, or a URL as storage: a few threads read, and one that fails in
passing is asked again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import StorageError
from lightning_dlres.core.units import format_seconds
from lightning_dlres.prefetch.sequence import Positions
from lightning_dlres.prefetch.storage.base import Reply, Storage
from lightning_dlres.prefetch.storage.readers import Reader, check

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
# A read that ends shortly after its deadline says more than that it hangs.
GRACE = 2.0


@dataclass(eq=False)
class _Open:
    """A request that is not answered: its samples, when it was asked for, and when begun."""

    numbers: Positions
    asked: float
    begun: float = 0.0


class FileStorage(Storage):
    """Storage that this process reads itself.

    Args:
        reader: of the source.
        nodes: into how many prefetch lists the samples are split.
        threads: how many requests are read at once, where the reader allows several.
        timeout: seconds for which a request is tried again.
    """

    def __init__(self, reader: Reader, nodes: int = 1, threads: int = 4, timeout: float = 30.0):
        super().__init__()
        self.table, self.nodes = reader.table, nodes
        self._reader, self._timeout = reader, timeout
        self._closing = threading.Event()
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._last_answer = time.monotonic()
        # A request that only waited for another one's read would count as begun, and as hung.
        threads = threads if reader.is_concurrent else 1
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dlres-read")

    def submit(self, ticket: int, node: int, numbers: Positions) -> None:
        """See `Storage`."""
        with self._lock:
            self._open[ticket] = _Open(numbers, time.monotonic())
        self._pool.submit(self._run, ticket, numbers)

    def close(self) -> None:
        """See `Storage`."""
        self._closing.set()
        # A read that hangs is left behind.
        self._pool.shutdown(wait=False, cancel_futures=True)

    def replies(self) -> list[Reply]:
        """See `Storage`."""
        self._give_up_hanging()
        return super().replies()

    def _give_up_hanging(self) -> None:
        """Nothing ends a read that hangs, as those of a dead file server do. What was not begun
        waits for as long as others are answered."""
        latest = time.monotonic() - self._timeout - GRACE
        with self._lock:
            stuck = self._last_answer < latest
            late = [
                (ticket, found)
                for ticket, found in self._open.items()
                if (found.begun < latest if found.begun else stuck and found.asked < latest)
            ]
        for ticket, found in late:
            what = "reading has hung" if found.begun else "all that reads has hung"
            text = (
                f"{self._first(found.numbers)}: {what} for more than "
                f"{format_seconds(self._timeout)}. Does the file system still answer?"
            )
            self._settle(Reply(ticket, StorageError(text)))

    def _settle(self, reply: Reply) -> None:
        with self._lock:
            known = self._open.pop(reply.ticket, None)
            self._last_answer = time.monotonic()
        if known is not None:
            self._reply(reply)

    def _run(self, ticket: int, numbers: Positions) -> None:
        with self._lock:
            if ticket not in self._open:
                return
            self._open[ticket].begun = time.monotonic()
        try:
            self._settle(Reply(ticket, self._read(numbers)))
        except StorageError as error:
            self._settle(Reply(ticket, error))
        except Exception as error:  # whatever a file system of fsspec may raise
            self._settle(Reply(ticket, StorageError(f"{self._first(numbers)}: {error!r}.")))

    def _read(self, numbers: Positions) -> NDArray[np.uint8]:
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        while True:
            try:
                found = self._reader.read(numbers)
                wrong = check(self.table, numbers, found)
                if wrong is None:
                    return np.frombuffer(b"".join(found), dtype=np.uint8)
            except OSError as error:
                wrong = str(error)
            if time.monotonic() + pause > deadline or self._closing.wait(pause):
                raise StorageError(
                    f"{wrong}. It was tried for {format_seconds(self._timeout)}. Check the "
                    "storage; `dlres store verify` reads all of it."
                )
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _first(self, numbers: Positions) -> str:
        return f"sample {self.table.key(int(numbers[0]))!r} or one of {len(numbers) - 1} after it"
