"""How bytes get from the device to a tier and back: at once, or beside the computing."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from lightning_dlres.kernels.copying import put_away
from lightning_dlres.memory.execute.gpu import Gpu, GpuEvent, Stream


class Ticket(Protocol):
    """A copy that has begun."""

    def wait(self) -> None:
        """Make what is computed from now on wait until the copy is done."""


class Copies(Protocol):
    """A way to copy."""

    overlaps: bool

    def out(self, source: Tensor, target: Tensor) -> Ticket:
        """Copy uint8[n] of the device to a place in a tier."""

    def back(self, source: Tensor, device: torch.device) -> tuple[Tensor, Ticket]:
        """Copy uint8[n] of a tier to new memory on the device."""

    def finish(self) -> None:
        """Let the host wait for all copies."""


class _Done:
    def wait(self) -> None:
        pass


_DONE = _Done()


class DirectCopies:
    """Everything waits for every copy."""

    overlaps = False

    def out(self, source: Tensor, target: Tensor) -> Ticket:
        put_away(target, source)
        return _DONE

    def back(self, source: Tensor, device: torch.device) -> tuple[Tensor, Ticket]:
        data = torch.empty(source.numel(), dtype=torch.uint8, device=device)
        # Not past the cache: it is read at once.
        data.copy_(source)
        return data, _DONE

    def finish(self) -> None:
        pass


class StreamCopies:
    """On two streams of a GPU, one for each direction; tiers must be pinned.

    Copies wait only for copies of the same bytes of a tier. What has not been copied yet stays,
    whoever else lets go of it: memory on the GPU until the stream that gave it out waits for the
    copy, memory in the tier until the copy is done.

    Args:
        gpu: the GPU.
    """

    overlaps = True

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._out, self._back = _Lane(gpu.new_stream()), _Lane(gpu.new_stream())
        weakref.finalize(self, _finish, self._out, self._back).atexit = False

    def out(self, source: Tensor, target: Tensor) -> Ticket:
        lane, home = self._out, self._gpu.current_stream()
        # What is copied has been computed, and what was at that place has been read.
        lane.stream.wait_stream(home)
        for copy in self._back.over(target):
            lane.stream.wait_event(copy.done)
        with self._gpu.using(lane.stream):
            self._gpu.copy(target, source)
        return lane.begun(_Leaving(self._gpu, home, source, target, lane.stream.record_event()))

    def back(self, source: Tensor, device: torch.device) -> tuple[Tensor, Ticket]:
        lane, home = self._back, self._gpu.current_stream()
        # Memory of the stream that will use it, which other work of that stream may still use.
        data = self._gpu.empty(source.numel())
        lane.stream.wait_stream(home)
        for copy in self._out.over(source):
            lane.stream.wait_event(copy.done)
        with self._gpu.using(lane.stream):
            self._gpu.copy(data, source)
        copy = _Arriving(self._gpu, home, data, source, lane.stream.record_event())
        return data, lane.begun(copy)

    def finish(self) -> None:
        _finish(self._out, self._back)


class _Copy:
    """A copy under way.

    Args:
        home: the stream that was current when it began: memory of the GPU that is given back is
            given out again in its order.
        on_gpu, in_tier: what is copied, and to where.
        done: the point behind the copy.
    """

    def __init__(self, gpu: Gpu, home: Stream, on_gpu: Tensor, in_tier: Tensor, done: GpuEvent):
        self._gpu, self._home, self.done = gpu, home, done
        self._on_gpu: Tensor | None = on_gpu
        self._in_tier = in_tier
        self.start = in_tier.data_ptr()
        self.stop = self.start + in_tier.numel()

    def wait(self) -> None:
        current, memory = self._gpu.current_stream(), self._on_gpu
        current.wait_event(self.done)
        if memory is not None and current != self._home:
            self._arrange(memory, current)
        self._on_gpu = None

    def _arrange(self, memory: Tensor, current: Stream) -> None:
        """Let no other work get the memory too early, though it was waited for elsewhere."""
        raise NotImplementedError


class _Leaving(_Copy):
    def _arrange(self, memory: Tensor, current: Stream) -> None:
        self._home.wait_event(self.done)


class _Arriving(_Copy):
    def _arrange(self, memory: Tensor, current: Stream) -> None:
        self._gpu.record_stream(memory, current)


class _Lane:
    """The copies of one direction, in the order in which they are done."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.copies: deque[_Copy] = deque()

    def begun(self, copy: _Copy) -> _Copy:
        """Keep a copy's memory until it is done, and let go of what is done."""
        while self.copies and self.copies[0].done.query():
            self.copies.popleft()
        self.copies.append(copy)
        return copy

    def over(self, place: Tensor) -> Iterator[_Copy]:
        """Yield the copies under way of bytes that are also of this place in a tier."""
        start = place.data_ptr()
        stop = start + place.numel()
        return (copy for copy in self.copies if copy.start < stop and start < copy.stop)


def _finish(*lanes: _Lane) -> None:
    """Let the host wait for the copies, and then let go of their memory."""
    for lane in lanes:
        while lane.copies:
            lane.copies[0].done.synchronize()
            lane.copies.popleft()
