"""Streams, events and memory counters of a GPU.

The protocol `Gpu` has only the calls that this package needs. `CudaGpu`
implements it with torch.cuda; tests use an implementation on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class GpuEvent(Protocol):
    """Point in a stream's work."""

    def query(self) -> bool:
        """Return whether the GPU has reached this point."""

    def synchronize(self) -> None:
        """Block the host until the GPU reaches this point."""

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds up to a later event. Both must come from `timed_event`."""


class Stream(Protocol):
    """Queue of work that a GPU does in order."""

    def wait_event(self, event: Any) -> None:
        """Make later work of this stream wait for an event."""

    def wait_stream(self, stream: Any) -> None:
        """Make later work of this stream wait for all work submitted to another stream so far."""

    def record_event(self) -> GpuEvent:
        """Return an event that completes after all work submitted to this stream so far."""


class Gpu(Protocol):
    """One GPU. Its methods do not depend on torch's current device."""

    def new_stream(self) -> Stream:
        """Return a new stream, independent of all others."""

    def current_stream(self) -> Stream:
        """Return the stream in which this thread computes on this GPU."""

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """Context manager that makes a stream the current one."""

    def empty(self, nbytes: int) -> Tensor:
        """Return uint8[nbytes], new memory of the current stream."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy in the current stream, without blocking the host."""

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Delay reuse of a tensor's freed memory until the present work of a stream is done."""

    def read_async(self, number: Tensor | int) -> Callable[[], int]:
        """Return a function that returns a number which the current stream computes.

        The function blocks the host until the number is known, but not for later work.
        """

    def timed_event(self) -> GpuEvent:
        """Return an event with a time, after all work submitted to the current stream so far."""

    def synchronize(self) -> None:
        """Block the host until all streams are done."""

    def allocated(self) -> int:
        """Return the bytes of live tensors, by torch's allocator."""

    def peak_allocated(self) -> int:
        """Return the peak of `allocated` since `reset_peak`."""

    def reset_peak(self) -> None:
        """Restart the peak. This also restarts torch's statistics that the user may read."""


class CudaGpu:
    """GPU of `torch.cuda`.

    Args:
        device: CUDA device; without an index: the current device.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def read_async(self, number: Tensor | int) -> Callable[[], int]:
        if isinstance(number, int):
            return lambda: number
        pinned = torch.empty((), dtype=number.dtype, pin_memory=True)
        pinned.copy_(number, non_blocking=True)
        copied = self.current_stream().record_event()

        def read() -> int:
            copied.synchronize()
            return int(pinned)

        return read

    def timed_event(self) -> GpuEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU of a CUDA device; None for the CPU."""
    return CudaGpu(device) if device.type == "cuda" else None
