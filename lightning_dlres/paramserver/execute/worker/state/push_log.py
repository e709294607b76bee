"""Log of a worker's pushes: what a restarted server may ask for again.

The log is a ring of bytes. An entry is freed when the server has it on its disk and ZeroMQ reads it
no more. The ring may lie in shared memory of the host, under a name: a process that takes the place
of a killed worker then finds the pushes of its predecessor. It copies them to a file of its own,
since the predecessor may only have been paused, and go on later.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes
from lightning_dlres.core.wire.checksum import checksum_of
from lightning_dlres.core.wire.decoding import from_msgpack

# An entry in the ring: a header of this many bytes, the details of the push, and its payload.
_HEADER_BYTES = 128
_ALIGNMENT = 64
# Factor of a push before its commit. Any other one is NaN, or not negative.
NOT_COMMITTED = -1.0


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """Header of an entry in the ring."""

    order: int
    key: int
    number: int
    scale: float
    details: int
    payload: int
    checksum: int


@dataclass(eq=False)
class LogEntry:
    """A push in the log.

    Attributes:
        key: Index of the key.
        number: Number of the push.
        details: Details of its message.
        payload: Its payload, in the ring.
        scale: Factor of its commit; `NOT_COMMITTED` before the commit.
        order: Number of the entry among all entries.
        position: Bytes of the payloads of all entries before it.
        offset: First byte in the ring.
        nbytes: Bytes in the ring.
        trackers: ZeroMQ's uses of the payload.
        is_durable: True if the server need not get it again.
        replaced: Entry of the same push by a predecessor, until this one is sealed.
    """

    key: int
    number: int
    details: bytes
    payload: memoryview
    scale: float
    order: int
    offset: int
    nbytes: int
    trackers: list[zmq.MessageTracker] = field(default_factory=list)
    is_durable: bool = False
    replaced: LogEntry | None = None
    position: int = 0
    _checksum: int | None = None

    def payload_checksum(self) -> int:
        """Return the checksum of the payload, which must be complete."""
        if self._checksum is None:
            self._checksum = checksum_of(self.payload)
        return self._checksum

    @property
    def array(self) -> NDArray[np.uint8]:
        """Payload as uint8[n], which may be written."""
        return np.frombuffer(self.payload, np.uint8)

    @property
    def is_free(self) -> bool:
        """True if its bytes may be overwritten."""
        return self.is_durable and all(tracker.done for tracker in self.trackers)


class PushLog:
    """Ring of pushes; its caller holds a lock.

    Args:
        capacity: Size in bytes.
        path: File in a file system in memory, such as /dev/shm. None: memory of this process.

    Raises:
        ConfigError: If the file cannot be made.
    """

    def __init__(self, capacity: int, path: Path | None = None) -> None:
        self._capacity = -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        self._path = path
        # Device and inode of the file.
        self._identity: tuple[int, int] | None = None
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._capacity = max(self._capacity, path.stat().st_size)
        self._memory = self._map(path)
        self._view = memoryview(self._memory)
        self._entries: deque[LogEntry] = deque()
        self._by_key: dict[int, dict[int, LogEntry]] = {}
        self._next_order, self._end, self._payload_bytes = 0, 0, 0

    @property
    def capacity(self) -> int:
        """Size in bytes."""
        return self._capacity

    def take_over(self) -> None:
        """Take over the entries of the predecessor, and the name of its file.

        The servers must have shut the predecessor out: what it pushes later would be missing.

        Raises:
            ConfigError: If yet another process does the same.
        """
        if self._path is None:
            return
        with contextlib.suppress(FileNotFoundError):
            old = self._path.read_bytes()[: self._capacity]
            self._view[: len(old)] = old
            self._recover()
        try:
            is_own = _identity(_new(self._path).stat()) == self._identity
        except FileNotFoundError:
            is_own = False
        if not is_own:
            raise ConfigError(
                f"log_directory must have one log of a worker, got {self._path} of two processes. "
                "Start each worker once."
            )
        # A process that is killed before this leaves the old file as it was.
        _new(self._path).replace(self._path)

    def append(self, key: int, number: int, details: bytes, payload_bytes: int) -> LogEntry | None:
        """Return a new entry whose payload the caller fills; None if there is no room now.

        `seal` must follow when the payload is there.
        """
        nbytes = _aligned(_payload_at(0, len(details)) + payload_bytes)
        offset = self._room(nbytes)
        if offset is None:
            return None
        start = offset + _HEADER_BYTES
        self._view[start : start + len(details)] = details
        first = _payload_at(offset, len(details))
        entry = LogEntry(
            key=key,
            number=number,
            details=details,
            payload=self._view[first : first + payload_bytes],
            scale=NOT_COMMITTED,
            order=self._next_order,
            offset=offset,
            nbytes=nbytes,
        )
        # An entry without a header does not exist for a successor.
        self._view[offset : offset + _HEADER_BYTES] = bytes(_HEADER_BYTES)
        self._next_order += 1
        self._end = offset + nbytes
        self._add(entry)
        return entry

    def seal(self, entry: LogEntry) -> None:
        """Make an entry, whose payload is complete, visible to a successor."""
        if entry.replaced is not None:
            entry.replaced.is_durable, entry.replaced = True, None
        if self._path is None:
            return
        header = _Header(
            entry.order,
            entry.key,
            entry.number,
            entry.scale,
            len(entry.details),
            len(entry.payload),
            checksum_of(entry.details, entry.payload_checksum()),
        )
        encoded = msgspec.msgpack.encode(header)
        framed = len(encoded).to_bytes(2, "little") + encoded
        self._view[entry.offset : entry.offset + len(framed)] = framed

    def commit(self, entry: LogEntry, scale: float) -> None:
        """Note the factor of an entry's commit."""
        entry.scale = scale
        self.seal(entry)

    def get(self, key: int, number: int) -> LogEntry | None:
        """Return the entry of a push; None if it was freed or never made."""
        return self._by_key.get(key, {}).get(number)

    def after(self, key: int, number: int) -> list[LogEntry]:
        """Return the entries of a key's pushes after a number, by number."""
        of_key = self._by_key.get(key, {})
        return [of_key[own] for own in sorted(of_key) if own > number]

    def latest(self, key: int) -> int:
        """Return the largest number of a key's entries; 0 without one."""
        return max(self._by_key.get(key, {}), default=0)

    def note_durable(self, key: int, number: int) -> None:
        """Note that a server need not get the pushes of a key up to a number again."""
        of_key = self._by_key.get(key, {})
        for own in [own for own in of_key if own <= number]:
            of_key.pop(own).is_durable = True

    def close(self, remove: bool) -> None:
        """Close the log; `remove` removes its file, too, unless a successor has replaced it."""
        self._entries.clear()
        self._by_key.clear()
        if remove and self._path is not None:
            for path in (self._path, _new(self._path)):
                with contextlib.suppress(FileNotFoundError):
                    if _identity(path.stat()) == self._identity:
                        path.unlink()

    def _map(self, path: Path | None) -> mmap.mmap:
        if path is None:
            return mmap.mmap(-1, self._capacity)
        try:
            _new(path).unlink(missing_ok=True)
            descriptor = os.open(_new(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # Without allocated space, a write could kill the process later (SIGBUS).
                os.posix_fallocate(descriptor, 0, self._capacity)
                self._identity = _identity(os.fstat(descriptor))
                return mmap.mmap(descriptor, self._capacity)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(
                f"log_directory must have {format_bytes(self._capacity)} of free space, got "
                f"{path.parent} ({error.strerror}). Use a smaller log_bytes, or another directory."
            ) from error

    def _room(self, nbytes: int) -> int | None:
        """Return the offset of free bytes; None if there are none."""
        while self._entries and self._entries[0].is_free:
            self._entries.popleft()
        if not self._entries:
            return 0 if nbytes <= self._capacity else None
        first = self._entries[0].offset
        if self._end > first:
            if self._end + nbytes <= self._capacity:
                return self._end
            return 0 if nbytes <= first else None
        return self._end if self._end + nbytes <= first else None

    def _add(self, entry: LogEntry) -> None:
        of_key = self._by_key.setdefault(entry.key, {})
        if entry.number in of_key:
            # A predecessor made this push, too; a successor may need it until this one is whole.
            entry.replaced = of_key[entry.number]
        of_key[entry.number] = entry
        self._entries.append(entry)
        entry.position = self._payload_bytes
        self._payload_bytes += len(entry.payload)

    def _recover(self) -> None:
        """Read the entries of the predecessor; bytes that are no whole entry are skipped."""
        entries = []
        for offset in range(0, self._capacity, _ALIGNMENT):
            entry = self._entry_at(offset)
            if entry is not None:
                entries.append(entry)
        entries.sort(key=lambda entry: entry.order)
        for entry in entries:
            self._add(entry)
            if entry.replaced is not None:
                entry.replaced.is_durable, entry.replaced = True, None
        if self._entries:
            last = self._entries[-1]
            self._next_order, self._end = last.order + 1, last.offset + last.nbytes

    def _entry_at(self, offset: int) -> LogEntry | None:
        size = int.from_bytes(self._view[offset : offset + 2], "little")
        if not 0 < size <= _HEADER_BYTES - 2:
            return None
        try:
            header = from_msgpack(self._view[offset + 2 : offset + 2 + size], _Header)
        except msgspec.MsgspecError:
            return None
        if min(header.details, header.payload, header.order) < 0:
            return None
        start, first = offset + _HEADER_BYTES, _payload_at(offset, header.details)
        end = first + header.payload
        if end > self._capacity:
            return None
        details = bytes(self._view[start : start + header.details])
        payload = self._view[first:end]
        if checksum_of(details, checksum_of(payload)) != header.checksum:
            return None
        return LogEntry(
            key=header.key,
            number=header.number,
            details=details,
            payload=payload,
            scale=header.scale,
            order=header.order,
            offset=offset,
            nbytes=_aligned(end - offset),
        )


def _new(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _payload_at(offset: int, details: int) -> int:
    """Return the offset of the payload of an entry; codecs need it aligned."""
    return _aligned(offset + _HEADER_BYTES + details)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
