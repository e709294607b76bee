"""Memory for copies of tensors, which is used again.

A server copies each parameter in each step. When it freed the memory of former copies, it grew by
up to three quarters of its tensors: the holes among thousands of tensors were not used again.
Probably glibc 2.36 cannot give aligned memory of a size from a hole of that size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import zmq
from torch import Tensor

# Bytes that are kept at least, and the part of a server's parameters that is kept at most.
_LEAST_BYTES, _DIVISOR = 16 << 20, 16


class SpareTensors:
    """Tensors whose memory may be used again; only for the server's thread.

    Args:
        nbytes: Bytes of the parameters.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self._most_bytes = max(_LEAST_BYTES, nbytes // _DIVISOR)
        self._nbytes = 0
        # The tensors of each dtype and shape, those of late last.
        self._kept: dict[object, deque[tuple[Tensor, list[zmq.MessageTracker]]]] = {}

    def copy(self, value: Tensor) -> Tensor:
        """Return a copy of a tensor, in spare memory where some is free."""
        kept = self._kept.get((value.dtype, value.shape))
        if not kept or not all(tracker.done for tracker in kept[0][1]):
            return torch.empty_like(value).copy_(value)
        self._nbytes -= value.nbytes
        return kept.popleft()[0].copy_(value)

    def keep(self, value: Tensor, trackers: Sequence[zmq.MessageTracker] = ()) -> None:
        """Keep a tensor's memory for a later copy.

        Args:
            value: The tensor.
            trackers: ZeroMQ's uses of its memory, which is free once all are done.
        """
        # Shapes of late are the last ones.
        kept = self._kept.pop((value.dtype, value.shape), None) or deque()
        self._kept[value.dtype, value.shape] = kept
        (kept.append if trackers else kept.appendleft)((value, list(trackers)))
        self._nbytes += value.nbytes
        while self._nbytes > self._most_bytes:
            self._drop_one()

    def _drop_one(self) -> None:
        shape, kept = next(iter(self._kept.items()))
        if kept:
            self._nbytes -= kept.popleft()[0].nbytes
        else:
            del self._kept[shape]
