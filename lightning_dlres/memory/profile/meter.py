"""How many bytes the device holds in the course of a step, whoever has asked for them: as torch's
allocators count them, with the workspace that operators take and give back."""

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
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.memory.execute.gpu import Gpu

Held = Callable[[], Iterable[Tensor]]

_MARK = "lightning_dlres.memory "
# A process has one profiler: a second one, started in another thread, would end the process.
_PROFILER = threading.Lock()


class MemoryTrace:
    """Bytes on the device, from mark to mark.

    Args:
        there: bytes at every mark.
        peaks: most bytes since the mark before.
        ours: whether what follows a mark is this package's own work, which does not count.
    """

    def __init__(self, there: list[int], peaks: list[int], ours: list[bool]) -> None:
        self._there, self._peaks, self._ours = there, peaks, ours

    def at(self, mark: int) -> int:
        """Return the bytes at a mark."""
        return self._there[mark]

    def peak(self, first: int, last: int) -> int:
        """Return the most bytes between two marks."""
        found = [self._there[first]]
        found += [self._peaks[m + 1] for m in range(first, last) if not self._ours[m]]
        return max(found)


class Meter(Protocol):
    """Watches the device's memory.

    Attributes:
        counts_fetched: whether what this package has made counts afterwards, too.
        was_taken: whether another step was counted meanwhile, and this one was not.
    """

    counts_fetched: bool
    was_taken: bool

    @contextmanager
    def running(self, held: Held) -> Iterator[None]:
        """Around a step.

        Args:
            held: returns what is on the device before it; asked once, and not kept: gradients are
                given back in the step.
        """

    def mark(self, ours: bool) -> int:
        """Note this moment; return its number.

        Args:
            ours: whether what follows is this package's own work.
        """

    def hand_over(self, mark: int, address: int) -> None:
        """Note that from a mark on, memory that is this package's own work is others'."""

    def trace(self) -> MemoryTrace:
        """Return what was seen, after the step."""


class AllocatedBytes:
    """On a GPU, as torch's allocator counts them. Its most bytes begin anew at every mark, for the
    user, too: it is used in one step of every shape.

    Args:
        gpu: the GPU.
    """

    counts_fetched = True
    was_taken = False

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._there: list[int] = []
        self._peaks: list[int] = []
        self._ours: list[bool] = []

    @contextmanager
    def running(self, held: Held) -> Iterator[None]:
        self._gpu.forget_most()
        yield

    def mark(self, ours: bool) -> int:
        self._peaks.append(self._gpu.most_allocated())
        self._there.append(self._gpu.allocated())
        self._ours.append(ours)
        self._gpu.forget_most()
        return len(self._ours) - 1

    def hand_over(self, mark: int, address: int) -> None:
        pass

    def trace(self) -> MemoryTrace:
        return MemoryTrace(self._there, self._peaks, self._ours)


class ProfiledBytes:
    """On the CPU, where nobody counts but torch's profiler.

    If that is running already, what is there before the step is all that is known.

    Args:
        is_free: whether nobody else will use the profiler meanwhile.
    """

    counts_fetched = False

    def __init__(self, is_free: bool = True) -> None:
        self._is_free, self._is_over, self.was_taken = is_free, False, False
        self._ours: list[bool] = []
        self._before = 0
        self._events: list[_Event] = []
        # Of memory from before, the profiler does not always say that it is given back.
        self._known: set[int] = set()
        self._deaths: dict[int, int] = {}
        self._handed_over: dict[int, int] = {}

    @contextmanager
    def running(self, held: Held) -> Iterator[None]:
        self._include_all(held)
        self.was_taken = self._is_free and not _PROFILER.acquire(blocking=False)
        if self.was_taken or not self._is_free:
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
            # Another one that was started meanwhile has ended ours.
            is_ours = profiler_is_on()
            if is_ours:
                profiler.__exit__(None, None, None)
        if is_ours:
            self._events = _memory_events(profiler)

    def _include_all(self, held: Held) -> None:
        for tensor in held():
            self._include(tensor.untyped_storage())

    def _include(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address not in self._known:
            self._known.add(address)
            self._before += nbytes
            weakref.finalize(storage, self._gone, nbytes).atexit = False

    def _gone(self, nbytes: int) -> None:
        if self._ours and not self._is_over:
            self._deaths[self.mark(self._ours[-1])] = nbytes

    def mark(self, ours: bool) -> int:
        number = len(self._ours)
        self._ours.append(ours)
        with record_function(_MARK + str(number)):
            return number

    def hand_over(self, mark: int, address: int) -> None:
        self._handed_over[mark] = address

    def trace(self) -> MemoryTrace:
        count = len(self._ours)
        now = most = self._before + self._forgotten()
        there, peaks = [now] * count, [now] * count
        is_ours, known = False, set(self._known)
        made_by_us: dict[int, int] = {}
        for event in self._events:
            if event.mark is not None and event.mark < count:
                there[event.mark], peaks[event.mark] = now, most
                now -= self._deaths.get(event.mark, 0)
                now += made_by_us.pop(self._handed_over.get(event.mark, 0), 0)
                most, is_ours = now, self._ours[event.mark]
            elif event.address in known:
                # Known from before: then its end was noted. Or it is new memory at that place.
                known.discard(event.address)
                if event.change > 0 and is_ours:
                    made_by_us[event.address] = event.change
                elif event.change > 0:
                    now += event.change
                    most = max(most, now)
            elif event.change > 0 and is_ours:
                made_by_us[event.address] = event.change
            elif event.change < 0 and event.address in made_by_us:
                del made_by_us[event.address]
            else:
                now += event.change
                most = max(most, now)
        return MemoryTrace(there, peaks, self._ours)

    def _forgotten(self) -> int:
        """Return the bytes that were there before the step without being named, as far as they
        were given back in it."""
        found, here = 0, set(self._known)
        for event in self._events:
            if event.mark is not None:
                continue
            if event.change > 0:
                here.add(event.address)
            elif event.address in here:
                here.remove(event.address)
            else:
                found -= event.change
        return found


class NoBytes:
    """Counts nothing, and takes no time."""

    counts_fetched = False
    was_taken = False

    @contextmanager
    def running(self, held: Held) -> Iterator[None]:
        yield

    def mark(self, ours: bool) -> int:
        return 0

    def hand_over(self, mark: int, address: int) -> None:
        pass

    def trace(self) -> MemoryTrace:
        return MemoryTrace([0], [0], [False])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler from printing that it starts and stops, unless the user has said what it is
    to print. It looks at this when it is first used."""
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
    """A mark, or memory that is given or taken back."""

    when: float
    mark: int | None = None
    address: int = 0
    change: int = 0


class _Entry(msgspec.Struct, gc=False):
    """The fields of a trace event that the meter reads; decoding skips all others."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Trace(msgspec.Struct):
    """A trace file."""

    entries: list[_Entry] = msgspec.field(name="traceEvents")


class _Change(msgspec.Struct):
    """The arguments of an event about memory."""

    address: int = msgspec.field(name="Addr")
    nbytes: int = msgspec.field(name="Bytes")
    device_type: int = msgspec.field(name="Device Type", default=0)


def _memory_events(profiler: profile) -> list[_Event]:
    """Return what happened, in order."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        text = path.read_bytes().decode(errors="replace")
    found = []
    for entry in from_json(text, _Trace).entries:
        if entry.name == "[memory]":
            change = from_json(bytes(entry.args), _Change)
            if change.device_type == 0:
                found.append(_Event(entry.ts, None, change.address, change.nbytes))
        elif entry.name.startswith(_MARK) and entry.cat == "user_annotation":
            found.append(_Event(entry.ts, int(entry.name.removeprefix(_MARK))))
    return sorted(found, key=lambda event: event.when)
