"""Snapshots: files from which a killed server starts again.

A snapshot is written key by key, while the server goes on: each key is copied between two messages,
and a thread writes the copies. Keys may therefore be of different versions. Workers send again what
a key of a restarted server lacks.

A file has a magic number and records. A record is the length and CRC-32 of its msgpack header, this
header, and raw data, whose CRC-32 the header has. The first record describes the job, one follows
for each key, and the last one has their number. The file of members has a single record. A file
gets its name only when it is complete and on the disk. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import os
import queue
import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from torch import Tensor

from lightning_dlres.core.arrays import byte_array
from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.core.host.locks import locked_if_possible
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.paramserver.execute.server.job_workers import JobWorkerRecord
from lightning_dlres.paramserver.execute.server.key_state import KeyState
from lightning_dlres.paramserver.execute.server.shard import Shard
from lightning_dlres.paramserver.protocol import JobSetup, empty_tensor

_MAGIC = b"DLRESPS1"
# Length and CRC-32 of a header.
_FRAME = struct.Struct("<QI")
# Copies that wait for the disk, in bytes; more would only take memory.
_MAX_WAITING_BYTES = 8 << 20
# Errors of reading a snapshot that is damaged, or that this server cannot use.
_LOAD_ERRORS = (OSError, ValueError, ProtocolError, msgspec.MsgspecError, struct.error)
# Names of a key's tensors, beside those of the optimizer's state.
_PARAMETER, _PREVIOUS = "parameter", "previous"


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """Tensor of a key: its name, whether it is optimizer state, dtype, shape and bytes."""

    name: str
    is_state: bool
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class _KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a key's record; the data of the tensors follows."""

    key: int
    applied: list[int]
    updates: int
    norm: float
    tensors: list[_Tensor]
    numbers: dict[str, Any]
    crc32: int = 0


class _End(msgspec.Struct, frozen=True, kw_only=True):
    """Header of the last record."""

    keys: int


class _WorkerFile(msgspec.Struct, frozen=True, kw_only=True):
    """Header of the only record in the file of members."""

    job: bytes
    members: list[JobWorkerRecord]


@dataclass(frozen=True)
class _Record:
    """Record of a file: its header, and data that follow it."""

    header: msgspec.Struct
    data: Sequence[bytes] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return sum(map(len, self.data))

    def write(self, file: BinaryIO) -> None:
        """Write the record; the header of a key gets the CRC-32 of its data."""
        header = self.header
        if isinstance(header, _KeyRecord):
            # Here, since the server's thread must not be held up.
            crc32 = 0
            for part in self.data:
                crc32 = zlib.crc32(part, crc32)
            header = msgspec.structs.replace(header, crc32=crc32)
        encoded = msgspec.msgpack.encode(header)
        frame = _FRAME.pack(len(encoded), zlib.crc32(encoded))
        for part in (frame, encoded, *self.data):
            file.write(part)


@dataclass(frozen=True)
class SnapshotFiles:
    """Paths of one server's files in a directory.

    Attributes:
        directory: The directory.
        port: Port of the server; it tells the files of several servers apart.
    """

    directory: Path
    port: int

    @property
    def values(self) -> Path:
        """File of the parameters and optimizer states."""
        return self.directory / f"server-{self.port}.snapshot"

    @property
    def members(self) -> Path:
        """File of the workers that were admitted or shut out."""
        return self.directory / f"server-{self.port}.members"

    @classmethod
    def open(
        cls, directory: Path, port: int, now: float, held: contextlib.ExitStack
    ) -> tuple[SnapshotFiles, Shard | None]:
        """Return the files in a directory, which is made if need be, and their shard if any.

        Args:
            directory, port: See the class.
            now: Clock in seconds, for the workers' deadlines.
            held: Stack that holds a lock of the files until it is closed. Servers on several hosts
                may have the same port, and a directory on shared storage.

        Raises:
            ConfigError: If the directory is not writable, the snapshot is damaged, or another
                server uses it.
        """
        files = cls(directory, port)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not held.enter_context(locked_if_possible(directory / f"server-{port}.lock")):
                raise ConfigError(
                    f"snapshot must be a directory of this server's own, got {directory}, which a "
                    "running server with the same port uses. Give each one a directory."
                )
            return files, files.load(now)
        except OSError as error:
            raise ConfigError(
                f"snapshot must be a writable directory, got {directory}: {error.strerror}. Use "
                "another one."
            ) from error

    def remove(self) -> None:
        """Remove all files; one that cannot be removed stays."""
        for path in (self.values, self.members, _partial(self.values), _partial(self.members)):
            # The job has ended: a server must not die of what it leaves behind.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def save_members(self, job: bytes, records: list[JobWorkerRecord]) -> None:
        """Write the file of members; it is on the disk when this returns.

        Raises:
            OSError: If it cannot be written.
        """
        with _partial(self.members).open("wb") as file:
            file.write(_MAGIC)
            _Record(_WorkerFile(job=job, members=records)).write(file)
            _finish(file, self.members)

    def load(self, now: float) -> Shard | None:
        """Return the shard of the files; None without a snapshot.

        Args:
            now: Clock in seconds, for the workers' deadlines.

        Raises:
            ConfigError: If the snapshot is damaged.
        """
        if not self.values.exists():
            return None
        path = self.members
        try:
            members = _read_members(path)
            path = self.values
            with path.open("rb") as file:
                return _read(file, members, now)
        except _LOAD_ERRORS as error:
            raise ConfigError(
                f"snapshot must be a directory of intact snapshots, got {path} ({error}). Remove "
                f"{self.values.name} and {self.members.name} to start anew."
            ) from error


class SnapshotTask:
    """A snapshot that is being made.

    Args:
        files: Files of the server.
        shard: The shard.

    Attributes:
        error: Reason why it failed; "" otherwise.
    """

    def __init__(self, files: SnapshotFiles, shard: Shard) -> None:
        self.error = ""
        self._path, self._shard = files.values, shard
        self._to_copy = list(shard.states.values())[::-1]
        # Versions of the copied keys, by index.
        self._applied: dict[int, list[int]] = {}
        self._queue: queue.SimpleQueue[_Record | None] = queue.SimpleQueue()
        self._written = threading.Condition()
        self._waiting_bytes = 0
        self._thread = threading.Thread(target=self._run, name="dlres-ps-snapshot", daemon=True)
        self._put(_Record(shard.setup))
        self._thread.start()
        # A server may have no key, because there are fewer parameters than servers.
        self._end_if_copied()

    def advance(self) -> bool:
        """Copy another key, unless the disk lags behind; return True if a key was copied."""
        if not self._to_copy or not self._has_room():
            return False
        state = self._to_copy.pop()
        self._applied[state.key.index] = list(state.applied)
        self._put(_key_record(self._shard, state))
        self._end_if_copied()
        return True

    @property
    def is_done(self) -> bool:
        """True once the file is complete, or has failed."""
        return not self._thread.is_alive()

    def note_durable(self) -> None:
        """Note in all keys that their copies are on the disk."""
        for index, applied in self._applied.items():
            self._shard.states[index].durable[:] = applied

    def finish(self) -> None:
        """Copy all keys, and wait until the file is complete or has failed."""
        while self._to_copy and not self.error:
            with self._written:
                self._written.wait_for(lambda: self._has_room() or bool(self.error))
            self.advance()
        self._thread.join()

    def cancel(self, reason: str) -> None:
        """End the snapshot without a file."""
        self.error = self.error or reason
        self._queue.put(None)
        self._thread.join()

    def _end_if_copied(self) -> None:
        if not self._to_copy:
            self._put(_Record(_End(keys=len(self._applied))))
            self._queue.put(None)

    def _has_room(self) -> bool:
        return self._waiting_bytes <= _MAX_WAITING_BYTES and not self.error

    def _put(self, record: _Record) -> None:
        with self._written:
            self._waiting_bytes += record.nbytes
        self._queue.put(record)

    def _run(self) -> None:
        try:
            with _partial(self._path).open("wb") as file:
                file.write(_MAGIC)
                while (record := self._queue.get()) is not None:
                    if self.error:
                        break
                    record.write(file)
                    with self._written:
                        self._waiting_bytes -= record.nbytes
                        self._written.notify_all()
                if self.error:
                    raise OSError(self.error)
                _finish(file, self._path)
        # Any error: a snapshot whose thread has died must not pass for a whole one.
        except Exception as error:
            with self._written:
                self.error = str(error) or type(error).__name__
                self._written.notify_all()
            with contextlib.suppress(OSError):
                _partial(self._path).unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _finish(file: BinaryIO, path: Path) -> None:
    """Bring a partial file to the disk, and give it its name."""
    file.flush()
    os.fsync(file.fileno())
    _partial(path).replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _key_record(shard: Shard, state: KeyState) -> _Record:
    """Return the record of a key, with copies of its tensors."""
    tensors = [(_PARAMETER, False, state.parameter.detach())]
    if state.has_previous:
        # Between two updates this tensor holds the parameter's previous value, see `KeyState`.
        tensors.append((_PREVIOUS, False, state.gradient))
    numbers = {}
    for name, value in shard.optimizer_state(state).items():
        if isinstance(value, Tensor):
            tensors.append((name, True, value.detach().contiguous()))
        else:
            numbers[name] = value
    data = [byte_array(tensor).tobytes() for _, _, tensor in tensors]
    header = _KeyRecord(
        key=state.key.index,
        applied=list(state.applied),
        updates=state.updates,
        norm=state.applied_norm,
        tensors=[
            _Tensor(name, is_state, str(t.dtype).removeprefix("torch."), tuple(t.shape), len(part))
            for (name, is_state, t), part in zip(tensors, data, strict=True)
        ],
        numbers=numbers,
    )
    return _Record(header, data)


def _read_members(path: Path) -> _WorkerFile | None:
    """Return the content of a file of members; None if there is none.

    Raises:
        ValueError: If it is damaged.
    """
    if not path.exists():
        return None
    with path.open("rb") as file:
        _expect_magic(file)
        members = from_msgpack(_header(file), _WorkerFile)
        if file.read(1):
            raise ValueError("more than one record")
        return members


def _expect_magic(file: BinaryIO) -> None:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("not a snapshot of this version")


def _read(file: BinaryIO, members: _WorkerFile | None, now: float) -> Shard:
    """Return the shard of a snapshot.

    Raises:
        ValueError: If the snapshot is damaged.
    """
    _expect_magic(file)
    setup = from_msgpack(_header(file), JobSetup)
    is_same_job = members is not None and members.job == setup.job
    records = members.members if members is not None and is_same_job else None
    shard = Shard(setup, records, is_persistent=True, now=now)
    keys = 0
    while keys < len(shard.states):
        record = from_msgpack(_header(file), _KeyRecord)
        _restore(shard, record, file)
        keys += 1
    if from_msgpack(_header(file), _End).keys != keys or file.read(1):
        raise ValueError("a wrong number of keys")
    shard.start()
    return shard


def _header(file: BinaryIO) -> bytes:
    length, crc32 = _FRAME.unpack(file.read(_FRAME.size))
    # A damaged length must not claim memory.
    if length > os.fstat(file.fileno()).st_size - file.tell():
        raise ValueError("a record is cut off")
    header = file.read(length)
    if zlib.crc32(header) != crc32:
        raise ValueError("a record is damaged")
    return header


def _restore(shard: Shard, record: _KeyRecord, file: BinaryIO) -> None:
    """Read the tensors of a key to where they stay.

    Buffers in between would leave holes among thousands of tensors, which no later one fills.
    """
    state, crc32 = shard.state_of(record.key), 0
    if len(record.applied) != len(state.applied):
        raise ValueError(f"the record of {state.key} is damaged")
    tensors = []
    for part in record.tensors:
        tensor = _target(state, part)
        target = byte_array(tensor)
        if len(target) != part.nbytes or file.readinto(target.data) != part.nbytes:  # type: ignore[attr-defined]
            raise ValueError(f"the data of {state.key} is cut off")
        crc32 = zlib.crc32(target.data, crc32)
        tensors.append((part, tensor))
    if crc32 != record.crc32:
        raise ValueError(f"the data of {state.key} is damaged")
    for part, tensor in tensors:
        if part.is_state:
            shard.set_optimizer_state(state, part.name, tensor)
    for name, value in record.numbers.items():
        shard.set_optimizer_state(state, name, value)
    state.applied[:], state.durable[:] = record.applied, record.applied
    state.updates, state.applied_norm, state.loaded = record.updates, record.norm, True


def _target(state: KeyState, part: _Tensor) -> Tensor:
    """Return the tensor whose memory gets a part of a key."""
    if part.is_state:
        return empty_tensor(part.dtype, part.shape)
    if part.name == _PARAMETER:
        return state.parameter.detach()
    state.has_previous = True
    return state.gradient
