"""Policy that measures a step: it offloads every storage, and records the events of the step.

As everything is offloaded, a measured step fits in memory if any plan does.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from lightning_dlres.codecs import decode
from lightning_dlres.core.device.gpu import Gpu
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.byte_counter import ByteCounter
from lightning_dlres.memory.execute.compression import elements_of, storage_codec
from lightning_dlres.memory.execute.policy import Placement
from lightning_dlres.memory.execute.saved_storage import SavedStorage
from lightning_dlres.memory.execute.spans import ByteSpan, dtype_name
from lightning_dlres.memory.execute.transfer.tiers import Tier
from lightning_dlres.memory.profile.layer_record import LayerRecord
from lightning_dlres.memory.profile.meter import MemoryMeter, MemoryTrace, ResidentTensors
from lightning_dlres.memory.profile.step_profile import (
    LayerMemory,
    Region,
    Reuse,
    SavedStorageProfile,
    StepProfile,
    TierLink,
)


@dataclass(eq=False)
class _StorageRecord:
    """Record of one saved storage; for the fields see `SavedStorageProfile`.

    Attributes:
        first_save_mark: Save mark (see `ProfilingPolicy.save_mark`) of its first saving.
        last_save_mark: Save mark of its latest saving.
        is_counted: Whether its original memory still counts as that of a saved storage.
        owned_address: Address of its memory when a backward function took it over.
    """

    tensor_dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    saved: int
    layer: str
    role: str
    packed: int | None
    encode_seconds: float
    decode_seconds: float
    first_save_mark: int
    last_save_mark: int
    shared_until: int | None = None
    is_counted: bool = True
    owned_address: int | None = None
    uses: list[int] = field(default_factory=list)
    end: int | None = None


class ProfilingPolicy:
    """Policy that offloads everything, and measures the step.

    Args:
        tier: Tier for all storages.
        meter: Meter of the device's memory.
        byte_counter: Counter of the bytes of saved storages on the device.
        layers: Record of the modules; None: modules are not recorded.
        gpu: GPU of the device; None: the device is the CPU.
        measures_codec: Whether compression is tried on every storage.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        meter: MemoryMeter,
        byte_counter: ByteCounter,
        layers: LayerRecord | None,
        gpu: Gpu | None,
        measures_codec: bool = True,
    ) -> None:
        self._tier, self._meter, self._byte_counter = tier, meter, byte_counter
        self._layers, self._gpu, self._measures_codec = layers, gpu, measures_codec
        self._records: list[_StorageRecord] = []
        self._record_of: weakref.WeakKeyDictionary[SavedStorage, _StorageRecord] = (
            weakref.WeakKeyDictionary()
        )
        # Seconds of computation in every interval that has ended.
        self._seconds: list[float] = []
        # For every interval: the memory marks of its start and its end, and the bytes at its start
        # that do not count as base.
        self._intervals: list[tuple[int, int, int]] = []
        # Memory mark at the start of the present interval, and its bytes that do not count as base.
        self._start_mark = self._not_base = 0
        self._save_mark = 0
        # Bytes of offloaded storages whose original memory other code still holds.
        self._lingering = 0
        # For every interval: memory mark and bytes of each storage that autograd released in it.
        self._ends: dict[int, list[tuple[int, int]]] = {}
        self._is_in_event = False
        # True in `own_work`.
        self._is_own_work = False
        # Time at which the present interval started, and seconds of all intervals before it.
        self._resumed = self._computed = 0.0
        # True while the step runs.
        self._is_open = False

    @contextmanager
    def recording(self, resident_tensors: ResidentTensors) -> Iterator[None]:
        """Context manager that measures a step.

        Args:
            resident_tensors: Returns the tensors on the device before the step.
        """
        watching = self._layers.watching(self) if self._layers is not None else nullcontext()
        with self._meter.running(resident_tensors), watching:
            self._is_open = True
            self._resume()
            try:
                yield
            finally:
                if self._is_open:
                    self._begin_event()
                self._is_open = False

    @property
    def next_event(self) -> int:
        """Return the number of the next event."""
        return len(self._seconds)

    @property
    def save_mark(self) -> int:
        """Return the save mark: the number of events and of repeated savings so far."""
        return self._save_mark

    @property
    def usual_bytes(self) -> int:
        """Return the size of a typical copy: the byte-weighted median size of the storages."""
        sizes = sorted(record.nbytes for record in self._records)
        half, below = sum(sizes) / 2, 0
        for size in sizes:
            below += size
            if below >= half:
                return size
        return 0

    def clock(self) -> float:
        """Return the seconds of computation so far, without the policy's own work."""
        self._synchronize()
        return self._computed + time.perf_counter() - self._resumed

    def mark_memory(self) -> int:
        """Mark the present time in the meter's trace; return the memory mark."""
        start = time.perf_counter()
        mark = self._meter.mark(is_own_work=False)
        self._resumed += time.perf_counter() - start
        return mark

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Context manager of the package's own work in an interval. Its seconds and memory count
        neither in the interval nor in the layers."""
        self._synchronize()
        start = time.perf_counter()
        self._meter.mark(is_own_work=True)
        self._is_own_work = True
        try:
            yield
        finally:
            self._synchronize()
            self._is_own_work = False
            self._meter.mark(is_own_work=False)
            self._resumed += time.perf_counter() - start

    def profile(self, links: Iterable[TierLink], rate: float = inf) -> StepProfile:
        """Return the profile of the measured step.

        Args:
            links: Links to the tiers.
            rate: Bytes per second that the device copies within its memory.
        """
        last = len(self._seconds) - 1
        storages = tuple(self._storage_profile(record, last) for record in self._records)
        layers: tuple[LayerMemory, ...] = ()
        regions: tuple[Region, ...] = ()
        reuses: tuple[Reuse, ...] = ()
        trace = self._meter.trace()
        base = [max(0, self._base(trace, index)) for index in range(len(self._intervals))]
        if self._layers is not None:
            storages = self._layers.with_roles(storages)
            marks = [(record.first_save_mark, record.last_save_mark) for record in self._records]
            regions = self._layers.regions(storages, marks, trace)
            reuses = self._layers.reuses(storages, rate)
            layers = self._layers.layers(storages, trace)
        return StepProfile(
            seconds=tuple(self._seconds),
            base=tuple(base),
            storages=storages,
            links=tuple(links),
            regions=regions,
            reuses=reuses,
            layers=layers,
        )

    def _storage_profile(self, record: _StorageRecord, last: int) -> SavedStorageProfile:
        shared_until, end = record.shared_until, last if record.end is None else record.end
        return SavedStorageProfile(
            nbytes=record.nbytes,
            dtype=dtype_name(record.tensor_dtype),
            shape=record.shape,
            layer=record.layer,
            role=record.role,
            saved=record.saved,
            shared_until=last if shared_until is None else max(shared_until, record.saved + 1),
            uses=tuple(record.uses),
            end=max([record.saved, *record.uses, end]),
            packed=record.packed,
            encode_seconds=record.encode_seconds,
            decode_seconds=record.decode_seconds,
        )

    def _base(self, trace: MemoryTrace, interval: int) -> int:
        """Return the most bytes beside saved storages in an interval.

        A plan counts a storage up to the end of the interval in which autograd releases it. From
        its release to that end, its bytes are therefore not part of the base.
        """
        start, stop, not_base = self._intervals[interval]
        most, released = 0, 0
        for mark, nbytes in self._ends.get(interval, []):
            most = max(most, trace.peak(start, mark) - not_base - released)
            start = mark
            if not self._meter.counts_restored:
                released += nbytes
        return max(most, trace.peak(start, stop) - not_base - released)

    def start(self) -> None:
        """See `OffloadPolicy`."""

    def begin_save(self, tensor: Tensor, span: ByteSpan, number: int) -> Placement:
        """See `OffloadPolicy`."""
        self._begin_event()
        packed, encode_seconds, decode_seconds = self._try_codec(span.of(tensor), tensor.dtype)
        layer, role = "", "internal"
        if self._layers is not None:
            layer, role = self._layers.record_save(tensor, number)
        record = _StorageRecord(
            tensor_dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            nbytes=span.nbytes,
            saved=len(self._seconds) - 1,
            layer=layer,
            role=role,
            packed=packed,
            encode_seconds=encode_seconds,
            decode_seconds=decode_seconds,
            first_save_mark=self._save_mark,
            last_save_mark=self._save_mark,
        )
        self._records.append(record)
        self._lingering += span.nbytes
        storage = tensor.untyped_storage()
        _call_at_end(storage, self._original_freed, record)
        return Placement(MemoryAction.OFFLOAD, self._tier)

    def end_save(self, saved_storage: SavedStorage, is_placed: bool) -> None:
        """See `OffloadPolicy`."""
        record = self._records[-1]
        self._record_of[saved_storage] = record
        _call_at_end(saved_storage, self._ended, record)
        self._resume()

    def save_again(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """See `OffloadPolicy`."""
        self._save_mark += 1
        record = self._record_of.get(saved_storage)
        if record is not None:
            record.last_save_mark = self._save_mark
        if self._layers is not None:
            self._layers.record_save_again(tensor, saved_storage.number)

    def begin_use(self, saved_storage: SavedStorage) -> None:
        """See `OffloadPolicy`."""
        if self._is_open:
            self._begin_event()
            record = self._record_of.get(saved_storage)
            if record is not None:
                record.uses.append(len(self._seconds) - 1)

    def end_use(self, saved_storage: SavedStorage) -> None:
        """See `OffloadPolicy`."""
        if self._is_open:
            self._resume()

    def take_ownership(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """See `OffloadPolicy`."""
        record = self._record_of.get(saved_storage)
        if record is not None:
            record.owned_address = tensor.data_ptr()

    def _begin_event(self) -> None:
        """Begin an event, which ends the interval before it."""
        self._synchronize()
        seconds = time.perf_counter() - self._resumed
        self._seconds.append(seconds)
        self._computed += seconds
        stop_mark = self._meter.mark(is_own_work=True)
        self._intervals.append((self._start_mark, stop_mark, self._not_base))
        self._is_in_event = True
        self._save_mark += 1

    def _resume(self) -> None:
        """End an event, and start the next interval."""
        self._synchronize()
        self._start_mark = self._meter.mark(is_own_work=False)
        self._is_in_event = False
        restored = self._byte_counter.now if self._meter.counts_restored else 0
        self._not_base = self._lingering + restored
        self._resumed = time.perf_counter()

    def _original_freed(self, record: _StorageRecord) -> None:
        """Record that all other code has released a storage's original memory."""
        if self._is_open:
            record.shared_until = self.next_event
            if record.is_counted:
                self._lingering -= record.nbytes

    def _ended(self, record: _StorageRecord) -> None:
        """Record that autograd has released a storage."""
        if self._is_open:
            record.end = self.next_event - 1
            if record.shared_until is not None and not self._is_in_event:
                # Garbage collection may release a storage at any time.
                mark = self._meter.mark(is_own_work=self._is_own_work)
                self._ends.setdefault(self.next_event, []).append((mark, record.nbytes))
                if record.owned_address is not None:
                    # Up to here a saved storage; from here on the user's own memory.
                    self._meter.hand_over(mark, record.owned_address)
            elif record.shared_until is None:
                # Autograd released it; user code still holds it: stop counting.
                self._lingering -= record.nbytes
                record.is_counted = False

    def _try_codec(self, data: Tensor, dtype: torch.dtype) -> tuple[int | None, float, float]:
        """Return the compressed size in bytes, and the seconds of compression and decompression.

        The size is None if compression is not worthwhile.
        """
        if not self._measures_codec:
            return None, 0.0, 0.0
        codec, elements = storage_codec(), elements_of(data, dtype)
        if elements.dtype != dtype or not codec.is_worthwhile(elements):
            return None, 0.0, 0.0
        start = self._synchronized_time()
        encoded = codec.encode(elements)
        packed, encoded_at = encoded.nbytes, self._synchronized_time()
        if encoded.codec != codec.name:
            return None, 0.0, 0.0
        decode(encoded)
        return packed, encoded_at - start, self._synchronized_time() - encoded_at

    def _synchronized_time(self) -> float:
        self._synchronize()
        return time.perf_counter()

    def _synchronize(self) -> None:
        if self._gpu is not None:
            self._gpu.synchronize()


def _call_at_end(
    watched: object, method: Callable[[_StorageRecord], None], record: _StorageRecord
) -> None:
    """Call a policy's method when an object ends, if the policy still exists then.

    `weakref.finalize` with a bound method would keep the policy, and the model with it, as long as
    the object exists. The object may be the memory of a batch, which a data set never releases.
    """
    weak_method = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := weak_method()) is not None:
            alive(record)

    weakref.finalize(watched, call).atexit = False
