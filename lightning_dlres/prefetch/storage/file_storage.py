"""Storage that reads a folder, a store or a URL in threads of this process.

A read that fails is repeated until the timeout, because failures of file servers often pass.
"""

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
from lightning_dlres.prefetch.order.sequence import SampleIds
from lightning_dlres.prefetch.storage.base import Reply, ReportProgress, Storage
from lightning_dlres.prefetch.storage.manifest import SampleTable
from lightning_dlres.prefetch.storage.readers import Reader, checksum_error, joined
from lightning_dlres.prefetch.storage.source import open_source_unchecked
from lightning_dlres.prefetch.storage.source_options import SourceConfig

# Seconds between two tries of a read; the pause doubles after each try.
_FIRST_PAUSE, _MAX_PAUSE = 0.05, 2.0
# Seconds beyond the timeout before a fetch counts as hanging. A read that fails shortly after the
# timeout gives an error that says more.
GRACE_SECONDS = 2.0
# A fetch counts as having waited for the storage if its thread gave up the processor at least once
# in this many files. If it did so more rarely, it waited for the interpreter's lock.
_FILES_PER_WAIT = 4


@dataclass(eq=False)
class _PendingFetch:
    """Fetch without a reply.

    Attributes:
        sample_ids: uint32[n].
        submitted: Time of `submit`, in seconds of `time.monotonic`.
        started: Time at which a thread began to read; 0 before.
    """

    sample_ids: SampleIds
    submitted: float
    started: float = 0.0


class FileStorage(Storage):
    """Storage that this process reads itself.

    Args:
        reader: Reader of the source.
        nodes: Number of prefetch lists that the samples are split into.
        read_threads: Number of fetches that are read at once, if the reader allows several.
        timeout: Seconds for which a failing fetch is repeated.
    """

    def __init__(
        self, reader: Reader, nodes: int = 1, read_threads: int = 4, timeout: float = 30.0
    ) -> None:
        super().__init__()
        self.table, self.nodes, self.note = reader.table, nodes, reader.note
        self._reader, self._timeout = reader, timeout
        self._closing = threading.Event()
        self._pending: dict[int, _PendingFetch] = {}
        # Guards `_pending` and `_last_reply`.
        self._lock = threading.Lock()
        self._last_reply = time.monotonic()
        # True if the last read waited for the storage; False if it only copied from memory.
        self.has_waited = True
        # With a reader that is not concurrent, a second thread would wait for the first one's read.
        # Its fetch would count as started, and as hanging.
        self._max_threads = read_threads if reader.is_concurrent else 1
        self._num_threads = 0
        self._queue: SimpleQueue[tuple[int, SampleIds] | None] = SimpleQueue()

    def submit(self, fetch_id: int, node: int, sample_ids: SampleIds) -> None:
        """See `Storage`."""
        with self._lock:
            self._pending[fetch_id] = _PendingFetch(sample_ids, time.monotonic())
        self._queue.put((fetch_id, sample_ids))
        if self._num_threads < self._max_threads:
            self._num_threads += 1
            # Daemon threads and no pool: a read that hangs must not keep the interpreter from
            # ending.
            threading.Thread(target=self._serve, name="dlres-read", daemon=True).start()

    def close(self) -> None:
        """See `Storage`. A thread whose read hangs is abandoned."""
        self._closing.set()
        with self._lock:
            self._pending.clear()
        for _ in range(self._num_threads):
            self._queue.put(None)

    def replies(self) -> list[Reply]:
        """See `Storage`."""
        self._fail_hanging()
        return super().replies()

    def _fail_hanging(self) -> None:
        """Fail fetches whose read hangs. Reads from a dead file server may never end.

        A fetch that no thread has started fails only if all threads hang. This is the case if no
        reply has come for the same time.
        """
        latest = time.monotonic() - self._timeout - GRACE_SECONDS
        with self._lock:
            all_hang = self._last_reply < latest
            hanging = [
                (fetch_id, fetch)
                for fetch_id, fetch in self._pending.items()
                if (
                    fetch.started < latest
                    if fetch.started
                    else all_hang and fetch.submitted < latest
                )
            ]
        for fetch_id, fetch in hanging:
            subject = "reading has hung" if fetch.started else "reading in every thread has hung"
            text = (
                f"{self._first(fetch.sample_ids)}: {subject} for more than "
                f"{format_seconds(self._timeout)}. Check that the storage still answers."
            )
            self._finish(Reply(fetch_id, StorageError(text)))

    def _finish(self, reply: Reply) -> None:
        with self._lock:
            fetch = self._pending.pop(reply.fetch_id, None)
            self._last_reply = time.monotonic()
        # A read that hung may end after its fetch has failed. Each fetch gets only one reply.
        if fetch is not None:
            self._reply(reply)

    def _serve(self) -> None:
        while (request := self._queue.get()) is not None:
            self._run(*request)

    def _run(self, fetch_id: int, sample_ids: SampleIds) -> None:
        with self._lock:
            if fetch_id not in self._pending:
                return
            self._pending[fetch_id].started = time.monotonic()
        try:
            switches = _voluntary_switches()
            data = self._read(sample_ids)
            # Count voluntary switches only. A thread that is pushed off the processor does not
            # wait for the storage.
            switches = _voluntary_switches() - switches
            self.has_waited = switches >= len(sample_ids) / _FILES_PER_WAIT
            self._finish(Reply(fetch_id, data))
        except StorageError as error:
            self._finish(Reply(fetch_id, error))
        except Exception as error:  # a file system of fsspec may raise anything
            text = f"{self._first(sample_ids)}: {error!r}."
            self._finish(Reply(fetch_id, StorageError(text)))

    def _read(self, sample_ids: SampleIds) -> NDArray[np.uint8]:
        return read_in_time(self._reader, sample_ids, self._timeout, self._closing)

    def _first(self, sample_ids: SampleIds) -> str:
        key = self.table.key(int(sample_ids[0]))
        others = len(sample_ids) - 1
        return f"sample {key!r}{f' or one of {others} requested with it' if others else ''}"


def open_files(
    config: SourceConfig, directory: Path, report_progress: ReportProgress | None = None
) -> FileStorage:
    """Return the storage of `storage="files"`; see `registry.open_storage`."""
    reader = open_source_unchecked(config, report_progress)
    return FileStorage(reader, config.nodes, config.read_threads, config.timeout)


def read_in_time(
    reader: Reader, sample_ids: SampleIds, timeout: float, closing: threading.Event
) -> NDArray[np.uint8]:
    """Return samples as `Reader.read_joined` does; repeat reads that fail or give damaged data.

    Samples that are read one by one are read again alone. Otherwise a storage that refuses some
    requests, such as those above a rate, would never serve a large read.

    Args:
        reader: Reader of the source.
        sample_ids: uint32[n].
        timeout: Seconds for which the read is repeated.
        closing: Ends the repetition when it is set.

    Raises:
        StorageError: If the samples cannot be read.
    """
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    data = reader.read_at_once(sample_ids)
    if data is not None and _checksum_error(reader.table, sample_ids, data) is None:
        return data
    samples: list[bytes | None] = [None] * len(sample_ids)
    while True:
        problem = _read_missing(reader, sample_ids, samples)
        if problem is None:
            return joined(sample for sample in samples if sample is not None)
        if time.monotonic() + pause > deadline or closing.wait(pause):
            raise StorageError(
                f"{problem}. The read was repeated for {format_seconds(timeout)}. Check the "
                "storage; `dlres store verify` reads all of it."
            )
        pause = min(2 * pause, _MAX_PAUSE)


def _read_missing(reader: Reader, sample_ids: SampleIds, samples: list[bytes | None]) -> str | None:
    """Read the samples that are None, and put them into the list.

    Returns:
        Why one of them cannot be read; None if all are there.
    """
    missing = [position for position, sample in enumerate(samples) if sample is None]
    if not missing:
        return None
    ids, problem = sample_ids[missing], None
    try:
        results = reader.read_each(ids)
    except OSError as error:
        return str(error)
    for index, (position, result) in enumerate(zip(missing, results, strict=True)):
        if isinstance(result, OSError):
            problem = problem or str(result)
            continue
        damage = checksum_error(reader.table, ids[index : index + 1], [result])
        if damage is None:
            samples[position] = result
        problem = problem or damage
    return problem


def _voluntary_switches() -> int:
    """Return the number of times that this thread has given up the processor to wait.

    Systems without counts for threads give the count of the whole process.
    """
    subject = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(subject).ru_nvcsw


def _checksum_error(
    table: SampleTable, sample_ids: SampleIds, data: NDArray[np.uint8]
) -> str | None:
    if table.checksums is None:
        return None
    ends = np.cumsum(table.sizes[sample_ids]).tolist()
    starts = [0, *ends[:-1]]
    pieces = [data.data[start:end] for start, end in zip(starts, ends, strict=True)]
    return checksum_error(table, sample_ids, pieces)
