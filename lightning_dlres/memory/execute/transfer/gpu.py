"""A GPU's streams, events and counters, as far as this room needs them: torch's own, or, in tests,
a model of them that runs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class GpuEvent(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Return whether the GPU has come so far."""

    def synchronize(self) -> None:
        """Let the host wait until the GPU has come so far."""

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds from this event to a later one; both were made by `instant`."""


class Stream(Protocol):
    """Work that a GPU does in order."""

    def wait_event(self, event: Any) -> None:
        """Let what comes next in this stream wait for an event."""

    def wait_stream(self, stream: Any) -> None:
        """Let what comes next in this stream wait for what another one has by now."""

    def record_event(self) -> GpuEvent:
        """Return the point behind what this stream has by now."""


class Gpu(Protocol):
    """One GPU. Whatever the current device is, this one is meant."""

    def new_stream(self) -> Stream:
        """Return a stream beside all others."""

    def current_stream(self) -> Stream:
        """Return the stream in which this thread computes on this GPU."""

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """Context manager that makes a stream the current one."""

    def empty(self, nbytes: int) -> Tensor:
        """Return uint8[nbytes], new memory of the current stream."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy in the current stream; the host does not wait."""

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Keep a tensor's memory, once it is given back, until a stream has done what it then
        has."""

    def read_later(self, number: Tensor | int) -> Callable[[], int]:
        """Return a function that returns a number which this GPU computes in the current stream.
        The host waits for this number only, not for what comes after it."""

    def instant(self) -> GpuEvent:
        """Return the point behind what the current stream has by now, with its time."""

    def synchronize(self) -> None:
        """Let the host wait for all streams."""

    def allocated(self) -> int:
        """Return the bytes that torch's allocator has given out."""

    def most_allocated(self) -> int:
        """Return the most bytes that it had given out since `forget_most`."""

    def forget_most(self) -> None:
        """Begin anew to look for the most bytes. The user's own readings begin anew, too."""


class CudaGpu:
    """A GPU as `torch.cuda` has it.

    Args:
        device: which one; without an index, the one that is current now.
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

    def read_later(self, number: Tensor | int) -> Callable[[], int]:
        if isinstance(number, int):
            return lambda: number
        found = torch.empty((), dtype=number.dtype, pin_memory=True)
        found.copy_(number, non_blocking=True)
        done = self.current_stream().record_event()

        def read() -> int:
            done.synchronize()
            return int(found)

        return read

    def instant(self) -> GpuEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def most_allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def forget_most(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU that a device is; None for the CPU."""
    return CudaGpu(device) if device.type == "cuda" else None
