"""Gradients summed over the ranks that hold the same parameter (E3, E7): the same stage of every
replica, and tied parameters.

The loss is that of the global batch, so the sum over replicas is the gradient, undivided.
The gradients of a stage's own layers go out in buckets as soon as backward has passed the layer,
while the layers below still compute; parameters with several holders follow when the stage is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dlres.core.trace import Tracer
from lightning_dlres.pipeline.comm.mailbox import wait_for
from lightning_dlres.pipeline.execute.partition import Owners
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.stage.stage import GradientBuffer

BUCKET_BYTES = 4 << 20
Groups = Mapping[tuple[int, ...], dist.ProcessGroup]


def make_groups(
    plan: PipelinePlan, owners: Owners, timeout: Any
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return a process group for every set of stages that holds a parameter on more than one rank.

    Called by all ranks; each takes part in the making of every group.
    """
    groups = {}
    for stages in sorted(set(owners.values()) | {(stage,) for stage in range(plan.stages)}):
        ranks = sorted(replica[stage] for replica in plan.replicas for stage in stages)
        if len(ranks) > 1:
            group = dist.new_group(ranks, timeout=timeout)
            if isinstance(group, dist.ProcessGroup):
                groups[stages] = group
    return groups


@dataclass
class _Bucket:
    """Parameters whose gradients travel together; ready when backward has passed `position`."""

    stages: tuple[int, ...]
    position: int
    parameters: list[nn.Parameter] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters)


class GradientSync:
    """Sums a step's gradients over their holders.

    Args:
        layer_parameters: trainable parameters of every layer of this stage, by position.
        non_pipelined: trainable parameters outside of the layers.
        owners: the stages that hold each parameter.
        groups: see `make_groups`.
        stage: this stage.
        timeout, check: deadline in seconds, and what to call while waiting.
        tracer: gets a span for every bucket.
    """

    def __init__(
        self,
        layer_parameters: Sequence[Sequence[nn.Parameter]],
        non_pipelined: Sequence[nn.Parameter],
        owners: Owners,
        groups: Groups,
        stage: int,
        timeout: float,
        check: Callable[[], None],
        tracer: Tracer,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._groups, self._timeout, self._check, self._tracer = groups, timeout, check, tracer
        lowest: dict[nn.Parameter, int] = {}
        for position, parameters in reversed(list(enumerate(layer_parameters))):
            for parameter in parameters:
                lowest[parameter] = position
        own = {p: None for p in lowest if owners[p] == (stage,)}
        self._buckets = (
            _fill_buckets(list(own), lowest, (stage,), bucket_bytes) if (stage,) in groups else []
        )
        # Every holder must meet the others in one order: that of the parameters in the whole model,
        # which all ranks know.
        mine = set(lowest) | set(non_pipelined)
        shared = [p for p in owners if p in mine and p not in own and owners[p] in groups]
        self._shared = [
            _Bucket(key, 0, [p for p in shared if owners[p] == key and p.dtype == dtype])
            for key in sorted({owners[p] for p in shared})
            for dtype in sorted({p.dtype for p in shared if owners[p] == key}, key=str)
        ]
        self._pending: list[tuple[_Bucket, Tensor, Any]] = []
        self._launched = 0

    def layer_done(self, position: int, buffer: GradientBuffer) -> None:
        """Send what is final now that the last micro-batch's backward has passed the layer at
        `position`."""
        while (
            self._launched < len(self._buckets)
            and self._buckets[self._launched].position >= position
        ):
            self._launch(self._buckets[self._launched], buffer)
            self._launched += 1

    def finish(self, buffer: GradientBuffer) -> None:
        """Send the rest, wait for all, and leave the sums in the buffer."""
        self.layer_done(0, buffer)
        for bucket in self._shared:
            self._launch(bucket, buffer)
        for bucket, data, work in self._pending:
            wait_for(
                work,
                f"the gradients of stages {list(bucket.stages)} from all replicas",
                self._timeout,
                self._check,
            )
            _unpack(bucket, data, buffer)
        self._pending.clear()
        self._launched = 0

    def _launch(self, bucket: _Bucket, buffer: GradientBuffer) -> None:
        data = _pack(bucket, buffer)
        start = time.perf_counter_ns()
        work = dist.all_reduce(data, group=self._groups[bucket.stages], async_op=True)
        self._pending.append((bucket, data, work))
        stages, nbytes = bucket.stages, bucket.nbytes

        def done(_: Any) -> None:
            self._tracer.add(
                "all-reduce",
                "sync",
                start,
                time.perf_counter_ns(),
                stages=str(stages),
                nbytes=nbytes,
            )

        work.get_future().add_done_callback(done)


def _fill_buckets(
    parameters: Sequence[nn.Parameter],
    lowest: Mapping[nn.Parameter, int],
    stages: tuple[int, ...],
    limit: int,
) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    for parameter in sorted(parameters, key=lambda p: -lowest[p]):
        bucket = buckets[-1] if buckets else None
        if (
            bucket is None
            or bucket.nbytes >= limit
            or bucket.parameters[0].dtype != parameter.dtype
        ):
            bucket = _Bucket(stages, lowest[parameter])
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        bucket.position = lowest[parameter]
    return buckets


def _pack(bucket: _Bucket, buffer: GradientBuffer) -> Tensor:
    """Return the gradients in one vector, followed by one number per parameter: 1 where there is a
    gradient here.

    Holders without a gradient (a replica without a micro-batch, an unused parameter) add zero. If
    no holder has one, there is none afterwards either, as in plain training.
    """
    # Taken out of the buffer: what is on its way shall not be held twice.
    found = [buffer.pop(p) for p in bucket.parameters]
    flat = [
        torch.zeros_like(p).reshape(-1)
        if g is None
        else (g.to_dense() if g.is_sparse else g).reshape(-1).to(p.dtype)
        for p, g in zip(bucket.parameters, found, strict=True)
    ]
    return torch.cat([*flat, flat[0].new_tensor([float(g is not None) for g in found])])


def _unpack(bucket: _Bucket, data: Tensor, buffer: GradientBuffer) -> None:
    present = data[-len(bucket.parameters) :].tolist()
    offset = 0
    for parameter, count in zip(bucket.parameters, present, strict=True):
        if count:
            total = data[offset : offset + parameter.numel()].view(parameter.shape)
            buffer.put(parameter, total)
        offset += parameter.numel()
