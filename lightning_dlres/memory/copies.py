"""How bytes get from the device to a tier and back: at once, or beside the computing."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_dlres.kernels.copying import put_away


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


class StreamCopies:
    """On two streams of a GPU, one for each direction; tiers must be pinned.

    Args:
        device: the GPU.
    """

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)

    def out(self, source: Tensor, target: Tensor) -> Ticket:
        # What is copied has been computed, and what was at that place has been read.
        self._out.wait_stream(torch.cuda.current_stream(source.device))
        self._out.wait_stream(self._back)
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)
            done = self._out.record_event()
        # If nobody needs it any more before that is done, its memory must not be used again.
        source.record_stream(self._out)
        return _Event(done)

    def back(self, source: Tensor, device: torch.device) -> tuple[Tensor, Ticket]:
        # Memory of the stream that will use it, which other work of that stream may still use.
        data = torch.empty(source.numel(), dtype=torch.uint8, device=device)
        self._back.wait_stream(torch.cuda.current_stream(device))
        self._back.wait_stream(self._out)
        with torch.cuda.stream(self._back):
            data.copy_(source, non_blocking=True)
            done = self._back.record_event()
        data.record_stream(self._back)
        return data, _Event(done)


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
