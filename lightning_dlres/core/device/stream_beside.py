"""Streams of a device: order between the work of training and that of threads beside it.

A GPU runs the kernels of a stream in order, and those of other streams at the same time. The
threads beside training, such as those of gradient synchronisation, launch their kernels in a stream
of their own, so that these overlap with backward. Events order what both streams use: a gradient is
read after backward has written it, and training goes on after its mean is written. The CPU needs
none of this.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

# One shared object: a thread enters it with every task.
_NO_CONTEXT: AbstractContextManager[None] = nullcontext()


class DeviceStream(Protocol):
    """Stream of threads beside training."""

    def mark(self) -> Any:
        """Return a mark behind all work that the calling thread has launched so far."""

    def working(self) -> AbstractContextManager[Any]:
        """Context manager in which the calling thread launches its work in this stream."""

    def wait(self, mark: Any) -> None:
        """Let the later work of the calling thread begin after the work before a mark."""

    def keep(self, tensor: Tensor) -> None:
        """Keep memory of another stream from being used again before this stream's work is done."""


class HostStream:
    """Stream of a CPU, whose work is done when its call returns."""

    def mark(self) -> None:
        """See `DeviceStream.mark`."""

    def working(self) -> AbstractContextManager[Any]:
        """See `DeviceStream.working`."""
        return _NO_CONTEXT

    def wait(self, mark: Any) -> None:
        """See `DeviceStream.wait`."""

    def keep(self, tensor: Tensor) -> None:
        """See `DeviceStream.keep`."""


class CudaStream:
    """Stream of a GPU beside the one that trains.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """See `DeviceStream.mark`."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def working(self) -> AbstractContextManager[Any]:
        """See `DeviceStream.working`."""
        return torch.cuda.stream(self._stream)

    def wait(self, mark: torch.cuda.Event) -> None:
        """See `DeviceStream.wait`."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def keep(self, tensor: Tensor) -> None:
        """See `DeviceStream.keep`."""
        tensor.record_stream(self._stream)


def stream_beside(device: torch.device) -> DeviceStream:
    """Return a new stream of a device, beside the one that trains."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
