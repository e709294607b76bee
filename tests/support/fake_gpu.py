"""Model of one GPU's streams, events and memory, on the CPU.

A stream is a queue. Its work runs later, in any order that CUDA allows: in order within a stream,
and after the events that the stream waits for. `choose` selects among the allowed orders. Freed
memory is overwritten with poison as soon as its next owner could write to it. A missing wait, or
memory that is freed too early, therefore shows as wrong bytes.

Two ways to compute:
- `FakeGpu(choose)`: `launch` puts kernels into the current stream. They use `FakeGpu.empty`'s
  memory, and run late, too.
- `FakeGpu(choose, in_step=True)`: the first stream is the host itself, so that torch's own CPU
  tensors stand for those of the GPU. All other streams run late.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

POISON = 0xDB


def latest(count: int) -> int:
    """Choose to run nothing before it must."""
    return 0


def soonest(count: int) -> int:
    """Choose to run everything as soon as it may."""
    return count


_CHANCE = random.Random(5)
# Orders in which a test lets the model run its work.
ORDERS: dict[str, Callable[[int], int]] = {
    "latest": latest,
    "random": lambda count: _CHANCE.randint(0, count),
}


@contextmanager
def in_place_of_cuda(order: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Context manager with a model in step that pins slabs; it must be used as CUDA allows.

    Args:
        order: Key of `ORDERS`.
        monkeypatch: Fixture of the test.
    """
    model = FakeGpu(ORDERS[order], in_step=True)
    monkeypatch.setattr("lightning_dlres.core.host.slab._pin", model.pin)
    yield model
    assert model.faults == []


class FakeEvent:
    """Event behind the first `position` pieces of a stream's work."""

    def __init__(self, stream: FakeStream, position: int, milliseconds: float) -> None:
        self.stream, self.position, self._milliseconds = stream, position, milliseconds

    @property
    def is_reached(self) -> bool:
        return self.stream.finished >= self.position

    def query(self) -> bool:
        self.stream.gpu.run_some()
        return self.is_reached

    def synchronize(self) -> None:
        self.stream.gpu.reach(self)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.is_reached, "elapsed_time needs an event that the GPU has reached"
        assert later.is_reached, "elapsed_time needs an event that the GPU has reached"
        return later._milliseconds - self._milliseconds


class FakeStream:
    """Queue of work: functions, and events to wait for.

    Attributes:
        finished: Number of pieces of work that were done.
        issued: Number of pieces of work that were ever queued.
    """

    def __init__(self, gpu: FakeGpu, in_step: bool = False) -> None:
        self.gpu, self.in_step = gpu, in_step
        self.finished = self.issued = 0
        self.queue: deque[Callable[[], None] | FakeEvent] = deque()

    def put(self, work: Callable[[], None] | FakeEvent) -> None:
        with self.gpu.lock:
            self.queue.append(work)
            self.issued += 1
        if self.in_step:
            self.gpu.reach(self.record_event())
        else:
            self.gpu.run_some()

    def wait_event(self, event: FakeEvent) -> None:
        self.put(event)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> FakeEvent:
        return FakeEvent(self, self.issued, self.gpu.milliseconds())

    @property
    def can_run(self) -> bool:
        if not self.queue:
            return False
        return not isinstance(self.queue[0], FakeEvent) or self.queue[0].is_reached

    def run_one(self) -> None:
        work = self.queue.popleft()
        if not isinstance(work, FakeEvent):
            work()
        self.finished += 1


class FakeGpu:
    """Model of a GPU with the protocol `Gpu`; see the module's docstring.

    Args:
        choose: Gets a count and returns a number from 0 to it. It is asked how many of the queued
            pieces of work run now, and, before each of them, for the index of the stream that
            runs one; its `count` is then the last index.
        in_step: Whether the first stream is the host.

    Attributes:
        faults: Messages about uses that would be errors or data races on CUDA.
        waits: Number of times that the host waited for all streams.
        reads: Number of times that the host waited for a number.
        resets: Number of times that the peak was reset.
        peak_bytes: Peak of the allocator's bytes, which a test sets.
        pinned: Bytes of pinned host memory.
        unready: Freed bytes that cannot be allocated yet.
    """

    def __init__(self, choose: Callable[[int], int] = latest, in_step: bool = False) -> None:
        self._choose = choose
        self.streams: list[FakeStream] = []
        # Other threads may wait for events.
        self.lock = threading.RLock()
        self._current = self.new_stream()
        self._current.in_step = in_step
        self.in_step = in_step
        self.faults: list[str] = []
        self.waits = self.reads = self.resets = self.unready = self.peak_bytes = 0
        self._time = 0
        self._is_running = False
        # Bytes of every pinned region, by address.
        self._pinned: dict[int, int] = {}
        self._recorded: weakref.WeakKeyDictionary[Any, list[FakeStream]] = (
            weakref.WeakKeyDictionary()
        )
        # Free blocks, by the stream and the size for which they can be allocated at once.
        self._free: dict[tuple[FakeStream, int], list[np.ndarray[Any, Any]]] = {}

    # Methods of the protocol `Gpu`.

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def empty(self, nbytes: int) -> Tensor:
        if self.in_step:
            return torch.full((nbytes,), POISON, dtype=torch.uint8)
        home = self._current
        blocks = self._free.setdefault((home, nbytes), [])
        block = blocks.pop() if blocks else np.full(nbytes, POISON, np.uint8)
        tensor = torch.frombuffer(block.data, dtype=torch.uint8)
        storage = tensor.untyped_storage()
        recorded = self._recorded.setdefault(storage, [])
        weakref.finalize(storage, self._on_free, home, block, recorded).atexit = False
        return tensor

    def copy(self, target: Tensor, source: Tensor) -> None:
        count = source.numel()
        assert target.numel() == count
        if count and self._is_pinned(target) == self._is_pinned(source):
            self.faults.append("a copy beside the computing needs pinned memory on one side")
        read, write = _CopyEnd(self, source), _CopyEnd(self, target)
        stream = self._current

        def work() -> None:
            data = read.bytes(count)
            if not write.is_gone:
                ctypes.memmove(write.address, data, count)
            read.close()
            write.close()

        read.stream = write.stream = stream
        stream.put(work)

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        self._recorded.setdefault(tensor.untyped_storage(), []).append(stream)

    def read_async(self, number: Tensor | int) -> Callable[[], int]:
        event = self._current.record_event()

        def read() -> int:
            self.reads += 1
            event.synchronize()
            return int(number)

        return read

    def timed_event(self) -> FakeEvent:
        return self._current.record_event()

    def synchronize(self) -> None:
        self.waits += 1
        self.drain()

    def allocated(self) -> int:
        return 0

    def peak_allocated(self) -> int:
        return self.peak_bytes

    def reset_peak(self) -> None:
        self.resets += 1

    # Methods for tests.

    def launch(self, kernel: Callable[[], None]) -> None:
        """Put a kernel into the current stream. It must hold addresses, and no tensors."""
        self._current.put(kernel)

    def pin(self, data: Tensor) -> None:
        """Treat memory as pinned until it is freed."""
        self._pinned[data.data_ptr()] = data.numel()
        end = weakref.finalize(data.untyped_storage(), self._pinned.pop, data.data_ptr())
        end.atexit = False

    @property
    def pinned(self) -> int:
        return sum(self._pinned.values())

    def drain(self) -> None:
        """Run everything."""
        for stream in list(self.streams):
            self.reach(stream.record_event())

    def reach(self, event: FakeEvent) -> None:
        """Run what must run until an event."""
        with self.lock:
            while not event.is_reached:
                first = event.stream.queue[0]
                if isinstance(first, FakeEvent):
                    self.reach(first)
                event.stream.run_one()

    def run_some(self) -> None:
        """Run what `choose` says."""
        with self.lock:
            if self._is_running:
                return
            self._is_running = True
            try:
                waiting = sum(len(stream.queue) for stream in self.streams if not stream.in_step)
                for _ in range(self._choose(waiting)):
                    ready = [stream for stream in self.streams if stream.can_run]
                    if not ready:
                        break
                    ready[min(self._choose(len(ready) - 1), len(ready) - 1)].run_one()
            finally:
                self._is_running = False

    def milliseconds(self) -> float:
        self._time += 1
        return float(self._time)

    def _is_pinned(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        return any(at <= start < at + size for at, size in self._pinned.items())

    def _on_free(
        self, home: FakeStream, block: np.ndarray[Any, Any], recorded: list[FakeStream]
    ) -> None:
        """Free memory: its next owner may write to it after the work queued so far.

        That is the work of the stream that allocated it, and of the recorded streams.
        """

        def poison() -> None:
            block.fill(POISON)

        def ready() -> None:
            poison()
            self.unready -= block.nbytes
            self._free[home, block.nbytes].append(block)

        if not recorded:
            home.put(poison)
            self._free[home, block.nbytes].append(block)
            return
        self.unready += block.nbytes
        other = self.new_stream()
        for stream in (home, *recorded):
            other.wait_stream(stream)
        other.put(ready)


class _CopyEnd:
    """Memory that a copy reads or writes later, and that it does not keep alive, as in CUDA."""

    def __init__(self, gpu: FakeGpu, tensor: Tensor) -> None:
        self._gpu, self.address, self._count = gpu, tensor.data_ptr(), tensor.numel()
        self._is_pinned = gpu._is_pinned(tensor)
        # Stream that runs the copy.
        self.stream: FakeStream | None = None
        storage = tensor.untyped_storage()
        self._recorded = gpu._recorded.setdefault(storage, [])
        # The model's own blocks outlive their tensors: `_on_free` overwrites them with poison.
        self._is_block = not gpu.in_step and not self._is_pinned
        self.is_gone = False
        # The bytes that the copy reads once the tensor is gone.
        self._last_bytes: bytes | None = None
        self._watch = weakref.finalize(storage, self._gone)
        self._watch.atexit = False

    def _gone(self) -> None:
        if self._is_block:
            return
        if self._is_pinned:
            self._gpu.faults.append("memory of a tier was freed during a copy")
        self.is_gone = True
        self._last_bytes = bytes([POISON]) * self._count
        if not self._is_pinned and self.stream in self._recorded:
            self._last_bytes = ctypes.string_at(self.address, self._count)

    def bytes(self, count: int) -> bytes:
        if self._last_bytes is not None:
            return self._last_bytes
        return ctypes.string_at(self.address, count)

    def close(self) -> None:
        self._watch.detach()
