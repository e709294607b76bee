"""Synchronisation of a stage's buffers, such as running statistics, over all replicas.

The buffers of the first replica replace those of the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.core.comm.collectives import wait_for_collective


class BufferSync:
    """Broadcasts the first replica's buffers to the same stage of the other replicas, as
    DistributedDataParallel does from its first rank.

    Args:
        tensors: Returns the stage's buffers, and the parameters that forward changes, in the same
            order on all replicas. It is called for each run, since a layer may replace a buffer at
            any time.
        group: Ranks of this stage in all replicas; None if there is only one replica.
        source: Global rank of the stage in the first replica.
        timeout: Deadline in seconds.
        check: Called while waiting; raises if a rank is known to have failed.
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
        """Make the buffers equal on all replicas; called by all ranks of the group."""
        buffers = self.tensors() if self._group is not None else []
        # One broadcast per dtype, in an order that is the same on all ranks.
        for dtype in sorted({b.dtype for b in buffers}, key=str):
            of_dtype = [b for b in buffers if b.dtype == dtype]
            flat = torch.cat([b.detach().reshape(-1).cpu() for b in of_dtype])
            work = dist.broadcast(flat, self._source, group=self._group, async_op=True)
            wait_for_collective(
                work, "the buffers of the first replica", self._timeout, self._check
            )
            values = flat.split([b.numel() for b in of_dtype])
            with torch.no_grad():
                for buffer, value in zip(of_dtype, values, strict=True):
                    buffer.copy_(value.view(buffer.shape))
