"""Meters of the bytes on the device during a step.

They count all memory of torch's allocators, including the temporary workspace of operators.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_dlres.core._compat import profiler_is_on
from lightning_dlres.core.device.gpu import Gpu
from lightning_dlres.core.wire.decoding import from_json

# Function that returns the tensors on the device before a step.
ResidentTensors = Callable[[], Iterable[Tensor]]

# Prefix of the names of marks in the profiler's trace.
_MARK = "lightning_dlres.memory "
# Torch has one profiler per process. Starting a second one in another thread ends the process.
_PROFILER = threading.Lock()


class MemoryTrace:
    """Bytes on the device at numbered points of a step, called marks.

    Args:
        current: Bytes at every mark.
        peaks: Peak of the bytes between the previous mark and this one, for every mark.
        is_own_work: For every mark: whether the package's own work follows, whose memory does not
            count.
    """

    def __init__(self, current: list[int], peaks: list[int], is_own_work: list[bool]) -> None:
        self._current, self._peaks, self._is_own_work = current, peaks, is_own_work

    def at(self, mark: int) -> int:
        """Return the bytes at a mark."""
        return self._current[mark]

    def peak(self, first: int, last: int) -> int:
        """Return the peak of the bytes between two marks."""
        peaks = [self._current[first]]
        peaks += [self._peaks[m + 1] for m in range(first, last) if not self._is_own_work[m]]
        return max(peaks)


class MemoryMeter(Protocol):
    """Meter of the device's memory over one step.

    Attributes:
        counts_restored: Whether the bytes include storages that the engine has restored.
        was_busy: Whether another thread used the profiler, so this step was not measured.
    """

    counts_restored: bool
    was_busy: bool

    @contextmanager
    def running(self, resident_tensors: ResidentTensors) -> Iterator[None]:
        """Context manager that meters a step.

        Args:
            resident_tensors: Returns the tensors on the device before the step. It is called once,
                and its result is not kept: gradients are freed in the step.
        """

    def mark(self, is_own_work: bool) -> int:
        """Set a mark now; return its index.

        Args:
            is_own_work: Whether the package's own work follows.
        """

    def hand_over(self, mark: int, address: int) -> None:
        """Count memory of the package's own work as the user's, from a mark on.

        Args:
            mark: Index of the mark.
            address: Address of the memory.
        """

    def trace(self) -> MemoryTrace:
        """Return the trace, after the step."""


class AllocatorMeter:
    """Meter of a GPU, by the counters of torch's allocator.

    It resets the allocator's peak at every mark, and so changes statistics that the user may read.
    It is therefore used in only a few steps of every batch shape.

    Args:
        gpu: GPU.
    """

    counts_restored = True
    was_busy = False

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._current: list[int] = []
        self._peaks: list[int] = []
        self._is_own_work: list[bool] = []

    @contextmanager
    def running(self, resident_tensors: ResidentTensors) -> Iterator[None]:
        self._gpu.reset_peak()
        yield

    def mark(self, is_own_work: bool) -> int:
        self._peaks.append(self._gpu.peak_allocated())
        self._current.append(self._gpu.allocated())
        self._is_own_work.append(is_own_work)
        self._gpu.reset_peak()
        return len(self._is_own_work) - 1

    def hand_over(self, mark: int, address: int) -> None:
        pass

    def trace(self) -> MemoryTrace:
        return MemoryTrace(self._current, self._peaks, self._is_own_work)


class ProfilerMeter:
    """Meter of the CPU, by torch's profiler: the CPU allocator has no counters.

    If another profiler runs already, only the bytes before the step are known.

    Args:
        is_free: Whether this meter may use the profiler: no other code uses it in the step.
    """

    counts_restored = False

    def __init__(self, is_free: bool = True) -> None:
        self._is_free, self._is_over, self.was_busy = is_free, False, False
        self._is_own_work: list[bool] = []
        self._resident_bytes = 0
        self._events: list[_Event] = []
        # Addresses of resident tensors. The profiler does not always report when they are freed, so
        # `_freed_bytes` records it: bytes that were freed, by mark.
        self._resident_addresses: set[int] = set()
        self._freed_bytes: dict[int, int] = {}
        # Addresses of memory that `hand_over` counts as the user's, by mark.
        self._handed_over: dict[int, int] = {}

    @contextmanager
    def running(self, resident_tensors: ResidentTensors) -> Iterator[None]:
        self._add_resident_tensors(resident_tensors)
        self.was_busy = self._is_free and not _PROFILER.acquire(blocking=False)
        if self.was_busy or not self._is_free:
            yield
            return
        try:
            with self._profiled():
                yield
        finally:
            _PROFILER.release()

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        if profiler_is_on():
            yield
            return
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _quiet():
            profiler.__enter__()
        try:
            yield
        finally:
            self._is_over = True
            # If other code started a profiler in the step, torch has stopped this one.
            is_running = profiler_is_on()
            if is_running:
                profiler.__exit__(None, None, None)
        if is_running:
            self._events = _memory_events(profiler)

    def _add_resident_tensors(self, resident_tensors: ResidentTensors) -> None:
        for tensor in resident_tensors():
            self._add_resident(tensor.untyped_storage())

    def _add_resident(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address not in self._resident_addresses:
            self._resident_addresses.add(address)
            self._resident_bytes += nbytes
            weakref.finalize(storage, self._record_freed, nbytes).atexit = False

    def _record_freed(self, nbytes: int) -> None:
        if self._is_own_work and not self._is_over:
            self._freed_bytes[self.mark(self._is_own_work[-1])] = nbytes

    def mark(self, is_own_work: bool) -> int:
        number = len(self._is_own_work)
        self._is_own_work.append(is_own_work)
        with record_function(_MARK + str(number)):
            return number

    def hand_over(self, mark: int, address: int) -> None:
        self._handed_over[mark] = address

    def trace(self) -> MemoryTrace:
        count = len(self._is_own_work)
        now = peak = self._resident_bytes + self._unlisted_bytes()
        current, peaks = [now] * count, [now] * count
        is_own_work, resident = False, set(self._resident_addresses)
        # Bytes of live memory that the package's own work has allocated, by address.
        own_bytes: dict[int, int] = {}
        for event in self._events:
            if event.mark is not None and event.mark < count:
                current[event.mark], peaks[event.mark] = now, peak
                now -= self._freed_bytes.get(event.mark, 0)
                now += own_bytes.pop(self._handed_over.get(event.mark, 0), 0)
                peak, is_own_work = now, self._is_own_work[event.mark]
            elif event.address in resident:
                # A resident tensor was freed (`_freed_bytes` counts it), or its address was reused.
                resident.discard(event.address)
                if event.change > 0 and is_own_work:
                    own_bytes[event.address] = event.change
                elif event.change > 0:
                    now += event.change
                    peak = max(peak, now)
            elif event.change > 0 and is_own_work:
                own_bytes[event.address] = event.change
            elif event.change < 0 and event.address in own_bytes:
                del own_bytes[event.address]
            else:
                now += event.change
                peak = max(peak, now)
        return MemoryTrace(current, peaks, self._is_own_work)

    def _unlisted_bytes(self) -> int:
        """Return the bytes from before the step that `resident_tensors` did not list.

        Only memory that is freed in the step can be seen.
        """
        nbytes, allocated = 0, set(self._resident_addresses)
        for event in self._events:
            if event.mark is not None:
                continue
            if event.change > 0:
                allocated.add(event.address)
            elif event.address in allocated:
                allocated.remove(event.address)
            else:
                nbytes -= event.change
        return nbytes


class NullMeter:
    """Meter that counts nothing, and takes no time."""

    counts_restored = False
    was_busy = False

    @contextmanager
    def running(self, resident_tensors: ResidentTensors) -> Iterator[None]:
        yield

    def mark(self, is_own_work: bool) -> int:
        return 0

    def hand_over(self, mark: int, address: int) -> None:
        pass

    def trace(self) -> MemoryTrace:
        return MemoryTrace([0], [0], [False])


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that silences the profiler's messages about its start and stop.

    A log level that the user has set stays. The profiler reads it when it is first used.
    """
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]


@dataclass(frozen=True)
class _Event:
    """Event of the profiler's trace: a mark, or a change of memory.

    Attributes:
        when: Time, in the trace's unit.
        mark: Index of the mark; None: a change of memory.
        address: Address of the memory.
        change: Bytes that were allocated, or freed if negative.
    """

    when: float
    mark: int | None = None
    address: int = 0
    change: int = 0


class _Entry(msgspec.Struct, gc=False):
    """Fields of a trace event that the meter reads; decoding skips all others."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Trace(msgspec.Struct):
    """Trace file of the profiler."""

    entries: list[_Entry] = msgspec.field(name="traceEvents")


class _Change(msgspec.Struct):
    """Arguments of a trace event about memory."""

    address: int = msgspec.field(name="Addr")
    nbytes: int = msgspec.field(name="Bytes")
    device_type: int = msgspec.field(name="Device Type", default=0)


def _memory_events(profiler: profile) -> list[_Event]:
    """Return the marks and changes of memory in a trace, in order of time."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        text = path.read_bytes().decode(errors="replace")
    events = []
    for entry in from_json(text, _Trace).entries:
        if entry.name == "[memory]":
            change = from_json(bytes(entry.args), _Change)
            # Type 0 is the CPU.
            if change.device_type == 0:
                events.append(_Event(entry.ts, None, change.address, change.nbytes))
        elif entry.name.startswith(_MARK) and entry.cat == "user_annotation":
            events.append(_Event(entry.ts, int(entry.name.removeprefix(_MARK))))
    return sorted(events, key=lambda event: event.when)
