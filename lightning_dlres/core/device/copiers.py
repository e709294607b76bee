"""Copies of bytes between the device and host memory or a disk, on GPU streams of their own."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from lightning_dlres.core.device.gpu import Gpu, GpuEvent, Stream


class PendingCopy(Protocol):
    """Copy that was started."""

    def wait(self) -> None:
        """Make the work that is issued from now on wait until the copy is done."""


class StreamCopy(PendingCopy, Protocol):
    """Copy on a stream of a GPU."""

    def synchronize(self) -> None:
        """Block the host until the copy is done."""

    def seconds(self) -> float:
        """Return the time that the copy took. The copier must be `timed`."""


class Copier(Protocol):
    """Copier between the device and a tier.

    Attributes:
        overlaps: Whether the device computes during copies.
    """

    overlaps: bool

    def to_tier(self, source: Tensor, target: Tensor) -> PendingCopy:
        """Copy uint8[n] on the device to uint8[n] in a tier."""

    def to_device(self, source: Tensor, device: torch.device) -> tuple[Tensor, PendingCopy]:
        """Copy uint8[n] in a tier to new memory on the device."""

    def synchronize(self) -> None:
        """Block the host until all copies are done."""


class StreamCopier:
    """Copier with one GPU stream per direction. Tiers must be pinned.

    A copy waits only for copies of the opposite direction over the same bytes of a tier.

    The copier keeps the memory of unfinished copies alive, even if all other holders release it.
    Memory on the GPU is kept until the stream that allocated it waits for the copy. Memory in a
    tier is kept until the copy is done.

    Args:
        gpu: GPU that copies.
        timed: True measures the time of each copy.
    """

    overlaps = True

    def __init__(self, gpu: Gpu, *, timed: bool = False) -> None:
        self._gpu, self._timed = gpu, timed
        self._to_tier, self._to_device = _CopyQueue(gpu.new_stream()), _CopyQueue(gpu.new_stream())
        weakref.finalize(self, _drain, self._to_tier, self._to_device).atexit = False

    def to_tier(self, source: Tensor, target: Tensor) -> StreamCopy:
        # The source must have been computed, and the target's old bytes must have been read.
        home = self._gpu.current_stream()
        events = self._run(self._to_tier, self._to_device.overlapping(target), target, source)
        return self._to_tier.add(_CopyToTier(self._gpu, home, source, target, *events))

    def to_device(self, source: Tensor, device: torch.device) -> tuple[Tensor, StreamCopy]:
        # Allocated on the home stream, which will use the data.
        data = self._gpu.empty(source.numel())
        return data, self.fill(data, source)

    def fill(self, target: Tensor, source: Tensor) -> StreamCopy:
        """Copy uint8[n] in a tier to uint8[n] on the device, in memory of the current stream."""
        # Earlier work of that stream may still use this memory, so the copy waits for it.
        home = self._gpu.current_stream()
        events = self._run(self._to_device, self._to_tier.overlapping(source), target, source)
        return self._to_device.add(_CopyToDevice(self._gpu, home, target, source, *events))

    def synchronize(self) -> None:
        _drain(self._to_tier, self._to_device)

    def _run(
        self, queue: _CopyQueue, earlier: Iterator[_Copy], target: Tensor, source: Tensor
    ) -> tuple[GpuEvent | None, GpuEvent]:
        """Copy in a queue's stream, after the work of the current stream and earlier copies.

        Returns:
            The events before, if the copy is timed, and after it.
        """
        queue.stream.wait_stream(self._gpu.current_stream())
        for copy in earlier:
            queue.stream.wait_event(copy.done)
        with self._gpu.using(queue.stream):
            began = self._gpu.timed_event() if self._timed else None
            self._gpu.copy(target, source)
            done = self._gpu.timed_event() if self._timed else queue.stream.record_event()
        return began, done


class _Copy:
    """Copy in flight.

    Args:
        gpu: GPU that copies.
        home: Stream that was current when the copy was started. The allocator lets this stream
            reuse freed memory without waiting for others.
        on_gpu: Memory on the GPU.
        in_tier: Memory in the tier.
        began: Event that completes before the copy; None without a time.
        done: Event that completes after the copy.
    """

    def __init__(
        self,
        gpu: Gpu,
        home: Stream,
        on_gpu: Tensor,
        in_tier: Tensor,
        began: GpuEvent | None,
        done: GpuEvent,
    ) -> None:
        self._gpu, self._home, self._began, self.done = gpu, home, began, done
        self._on_gpu: Tensor | None = on_gpu
        self._in_tier = in_tier
        self.start = in_tier.data_ptr()
        self.stop = self.start + in_tier.numel()

    def wait(self) -> None:
        current, memory = self._gpu.current_stream(), self._on_gpu
        current.wait_event(self.done)
        if memory is not None and current != self._home:
            self._protect(memory, current)
        self._on_gpu = None

    def synchronize(self) -> None:
        self.done.synchronize()

    def seconds(self) -> float:
        assert self._began is not None
        return self._began.elapsed_time(self.done) / 1e3

    def _protect(self, memory: Tensor, current: Stream) -> None:
        """Keep the allocator from reusing memory too early; `current` is not the home stream."""
        raise NotImplementedError


class _CopyToTier(_Copy):
    def _protect(self, memory: Tensor, current: Stream) -> None:
        self._home.wait_event(self.done)


class _CopyToDevice(_Copy):
    def _protect(self, memory: Tensor, current: Stream) -> None:
        self._gpu.record_stream(memory, current)


class _CopyQueue:
    """Unfinished copies of one direction, in the order in which they finish."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.copies: deque[_Copy] = deque()

    def add(self, copy: _Copy) -> _Copy:
        """Hold a copy's memory until it is done, and release the copies that are done."""
        while self.copies and self.copies[0].done.query():
            self.copies.popleft()
        self.copies.append(copy)
        return copy

    def overlapping(self, data: Tensor) -> Iterator[_Copy]:
        """Yield the unfinished copies that share bytes of a tier with `data`."""
        start = data.data_ptr()
        stop = start + data.numel()
        return (copy for copy in self.copies if copy.start < stop and start < copy.stop)


def _drain(*queues: _CopyQueue) -> None:
    """Block the host until all copies are done, and release their memory."""
    for queue in queues:
        while queue.copies:
            queue.copies[0].done.synchronize()
            queue.copies.popleft()
