"""Buffers of a stage (running statistics and the like) kept alike on all replicas: those of
the first replica count."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.pipeline.comm.mailbox import wait_for


class BufferSync:
    """Sends the first replica's buffers to the same stage of the others, as
    DistributedDataParallel does from its first rank.

    Args:
        tensors: returns the stage's buffers, and the parameters that forward changes, in one order
            on all replicas. A layer may replace a buffer at any time.
        group: the ranks of this stage over all replicas; None if there is only one replica.
        source: global rank of the stage in the first replica.
        timeout, check: deadline in seconds, and what to call while waiting.
    """

    def __init__(
        self,
        tensors: Callable[[], list[Tensor]],
        group: dist.ProcessGroup | None,
        source: int,
        timeout: float,
        check: Callable[[], None],
    ) -> None:
        self.tensors, self._group, self._source = tensors, group, source
        self._timeout, self._check = timeout, check

    def run(self) -> None:
        """Make the buffers alike; called by all ranks of the group."""
        buffers = self.tensors() if self._group is not None else []
        for dtype in sorted({b.dtype for b in buffers}, key=str):
            some = [b for b in buffers if b.dtype == dtype]
            flat = torch.cat([b.detach().reshape(-1) for b in some])
            work = dist.broadcast(flat, self._source, group=self._group, async_op=True)
            wait_for(work, "the buffers of the first replica", self._timeout, self._check)
            with torch.no_grad():
                for buffer, value in zip(some, flat.split([b.numel() for b in some]), strict=True):
                    buffer.copy_(value.view(buffer.shape))
