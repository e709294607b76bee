"""Overflows of local gradients, shared between the ranks.

A gradient scaler checks the gradients of its own rank. If it found an overflow on one rank only,
that rank alone would skip the step and lower its scale.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all


class SharedOverflows:
    """Buckets of a backward, all of which become NaN on all ranks if a gradient on any rank is not
    finite.

    All buckets wait for the last one: DistributedDataParallel drops the gradients of those whose
    parameters no rank has used.
    """

    def __init__(self) -> None:
        # For each bucket: its gradients, the future that was returned, and its buffer.
        self._waiting: list[tuple[Future[Tensor], Future[Tensor], Tensor]] = []
        self._flags: list[Tensor] = []

    def check(self, buffer: Tensor) -> None:
        """Note whether a bucket's gradients of this rank are finite; called before `add`."""
        self._flags.append(buffer.isfinite().all().logical_not())

    def add(self, future: Future[Tensor], buffer: Tensor, *, is_last: bool) -> Future[Tensor]:
        """Return the future buffer of a bucket; called for each bucket, in the same order on all
        ranks.

        Args:
            future: Completes when the bucket's gradients are those of this rank, or means.
            buffer: Buffer of the bucket.
            is_last: True for the last bucket of a backward.
        """
        is_host = buffer.device.type == "cpu"
        result: Future[Tensor] = Future() if is_host else Future(devices=[buffer.device])
        self._waiting.append((future, result, buffer))
        if is_last:
            self._share()
        return result

    def _share(self) -> None:
        waiting, self._waiting = self._waiting, []
        overflow = torch.stack(self._flags).any().to(torch.float32)
        self._flags = []
        work = dist.all_reduce(overflow, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None

        def finish(done: Future[list[Future[Tensor]]]) -> None:
            try:
                for one in done.value():
                    one.value()
                buffers = [b.masked_fill_(overflow > 0, math.nan) for _, _, b in waiting]
            except Exception as error:
                for _, result, _ in waiting:
                    result.set_exception(error)  # type: ignore[arg-type]
                return
            for (_, result, _), buffer in zip(waiting, buffers, strict=True):
                result.set_result(buffer)

        collect_all([*(future for future, _, _ in waiting), work.get_future()]).then(finish)
