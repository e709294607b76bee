"""A folder, a store on a disk, or a URL as storage: a few threads read, and one that fails in
passing is asked again."""

from __future__ import annotations

import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import StorageError
from lightning_dlres.core.units import format_seconds
from lightning_dlres.prefetch.order.sequence import Positions
from lightning_dlres.prefetch.storage.base import Reply, ReportProgress, Storage
from lightning_dlres.prefetch.storage.manifest import SampleTable
from lightning_dlres.prefetch.storage.readers import Reader, check
from lightning_dlres.prefetch.storage.source import read_source
from lightning_dlres.prefetch.storage.source_options import SourceConfig

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
# A read that ends shortly after its deadline says more than that it hangs.
GRACE = 2.0
# A read of so many files has waited for the storage if its thread has waited once. Beside that it
# waits for the interpreter's lock, a few times for each read.
_FILES_A_WAIT = 4


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
        read_threads: how many requests are read at once, where the reader allows several.
        timeout: seconds for which a request is tried again.
    """

    def __init__(
        self, reader: Reader, nodes: int = 1, read_threads: int = 4, timeout: float = 30.0
    ):
        super().__init__()
        self.table, self.nodes, self.note = reader.table, nodes, reader.note
        self._reader, self._timeout = reader, timeout
        self._closing = threading.Event()
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._last_answer = time.monotonic()
        # Whether the last read has waited for the storage, and was not only copied from memory.
        self.has_waited = True
        # A request that only waited for another one's read would count as begun, and as hung.
        self._most_threads = read_threads if reader.is_concurrent else 1
        self._threads = 0
        self._queue: SimpleQueue[tuple[int, Positions] | None] = SimpleQueue()

    def submit(self, fetch_id: int, node: int, numbers: Positions) -> None:
        """See `Storage`."""
        with self._lock:
            self._open[fetch_id] = _Open(numbers, time.monotonic())
        self._queue.put((fetch_id, numbers))
        if self._threads < self._most_threads:
            self._threads += 1
            # One that hangs must not keep the interpreter from ending, as a pool's thread would.
            threading.Thread(target=self._serve, name="dlres-read", daemon=True).start()

    def close(self) -> None:
        """See `Storage`."""
        self._closing.set()
        with self._lock:
            self._open.clear()
        # A read that hangs is left behind.
        for _ in range(self._threads):
            self._queue.put(None)

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
                (fetch_id, found)
                for fetch_id, found in self._open.items()
                if (found.begun < latest if found.begun else stuck and found.asked < latest)
            ]
        for fetch_id, found in late:
            what = "reading has hung" if found.begun else "all that reads has hung"
            text = (
                f"{self._first(found.numbers)}: {what} for more than "
                f"{format_seconds(self._timeout)}. Does the file system still answer?"
            )
            self._settle(Reply(fetch_id, StorageError(text)))

    def _settle(self, reply: Reply) -> None:
        with self._lock:
            known = self._open.pop(reply.fetch_id, None)
            self._last_answer = time.monotonic()
        if known is not None:
            self._reply(reply)

    def _serve(self) -> None:
        while (request := self._queue.get()) is not None:
            self._run(*request)

    def _run(self, fetch_id: int, numbers: Positions) -> None:
        with self._lock:
            if fetch_id not in self._open:
                return
            self._open[fetch_id].begun = time.monotonic()
        try:
            switches = _own_switches()
            data = self._read(numbers)
            # A thread that is only pushed aside by others gives up the processor unasked.
            self.has_waited = _own_switches() - switches >= len(numbers) / _FILES_A_WAIT
            self._settle(Reply(fetch_id, data))
        except StorageError as error:
            self._settle(Reply(fetch_id, error))
        except Exception as error:  # whatever a file system of fsspec may raise
            self._settle(Reply(fetch_id, StorageError(f"{self._first(numbers)}: {error!r}.")))

    def _read(self, numbers: Positions) -> NDArray[np.uint8]:
        return read_in_time(self._reader, numbers, self._timeout, self._closing)

    def _first(self, numbers: Positions) -> str:
        return f"sample {self.table.key(int(numbers[0]))!r} or one of {len(numbers) - 1} after it"


def open_files(
    config: SourceConfig, directory: Path, report_progress: ReportProgress | None = None
) -> FileStorage:
    """Return the storage of `storage="files"`; see `open_storage`."""
    reader = read_source(config, report_progress)
    return FileStorage(reader, config.nodes, config.read_threads, config.timeout)


def _own_switches() -> int:
    """Return how often this thread has given up the processor to wait for something. Where the
    system counts for the whole process only, other threads' waits count, too."""
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(who).ru_nvcsw


def read_in_time(
    reader: Reader, numbers: Positions, timeout: float, closing: threading.Event
) -> NDArray[np.uint8]:
    """Return samples as `Reader.read_joined` does. Where they cannot be read or are damaged, try
    again for `timeout` seconds, unless `closing` is set.

    Raises:
        StorageError: they cannot be had.
    """
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    while True:
        try:
            data = reader.read_joined(numbers)
            wrong = _damage(reader.table, numbers, data)
            if wrong is None:
                return data
        except OSError as error:
            wrong = str(error)
        if time.monotonic() + pause > deadline or closing.wait(pause):
            raise StorageError(
                f"{wrong}. It was tried for {format_seconds(timeout)}. Check the "
                "storage; `dlres store verify` reads all of it."
            )
        pause = min(2 * pause, _LONGEST_PAUSE)


def _damage(table: SampleTable, numbers: Positions, data: NDArray[np.uint8]) -> str | None:
    if table.checksums is None:
        return None
    ends = np.cumsum(table.sizes[numbers]).tolist()
    starts = [0, *ends[:-1]]
    pieces = [data.data[start:end] for start, end in zip(starts, ends, strict=True)]
    return check(table, numbers, pieces)
