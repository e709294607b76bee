"""Buffers of a stage (running statistics and the like) kept alike on all virtual machines: those of
the first VM count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.pipeline.mailbox import wait_for


class BufferSync:
    """Sends the first VM's buffers to the same stage of the others, as DistributedDataParallel does
    from its first rank.

    Args:
        buffers: the stage's buffers, in one order on all VMs.
        group: the ranks of this stage over all VMs; None if there is only one VM.
        source: global rank of the stage in the first VM.
        timeout, check: deadline in seconds, and what to call while waiting.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        source: int,
        timeout: float,
        check: Callable[[], None],
    ) -> None:
        self._buffers, self._group, self._source, self._timeout, self._check = (
            buffers,
            group,
            source,
            timeout,
            check,
        )

    def run(self) -> None:
        """Make the buffers alike; called by all ranks of the group."""
        if self._group is None or not self._buffers:
            return
        for dtype in sorted({b.dtype for b in self._buffers}, key=str):
            some = [b for b in self._buffers if b.dtype == dtype]
            flat = torch.cat([b.detach().reshape(-1) for b in some])
            work = dist.broadcast(flat, self._source, group=self._group, async_op=True)
            wait_for(work, "the buffers of the first virtual machine", self._timeout, self._check)
            with torch.no_grad():
                for buffer, value in zip(some, flat.split([b.numel() for b in some]), strict=True):
                    buffer.copy_(value.view(buffer.shape))
