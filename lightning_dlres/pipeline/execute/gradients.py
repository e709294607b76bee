"""Sums of gradients over the ranks that hold the same parameter.

These ranks are the same stage of every replica, and for tied parameters several stages. The loss is
that of the global batch, so the gradient is the sum over replicas, not their mean. The gradients of
a stage's own layers are sent in buckets as soon as backward has passed the layer, while earlier
layers still run backward. The gradients of parameters that several stages hold are sent
when backward is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dlres.core.comm.collectives import wait_for_collective
from lightning_dlres.core.trace import Tracer
from lightning_dlres.pipeline.execute.partition import Owners
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer

# Size in bytes at which a bucket is full. Smaller buckets start earlier and take more messages.
BUCKET_BYTES = 4 << 20
# By stages, ascending: process group of the ranks of these stages in all replicas.
Groups = Mapping[tuple[int, ...], dist.ProcessGroup]


def make_groups(
    plan: PipelinePlan, owners: Owners, timeout: Any
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return the process groups of which this rank is a member, by stages.

    Each single stage has a group, and so has each set of stages that hold the same parameter. Each
    group spans all replicas. There is none for a single rank, which has nothing to sum. Called by
    all ranks: torch needs all of them to make each group.

    Args:
        plan: Plan of the run.
        owners: Stages that hold each parameter.
        timeout: Timeout of the groups, a `timedelta`.
    """
    groups = {}
    for stages in sorted(set(owners.values()) | {(stage,) for stage in range(plan.stages)}):
        ranks = sorted(replica[stage] for replica in plan.replicas for stage in stages)
        if len(ranks) > 1:
            # Gloo takes ranks with devices of different kinds.
            group = dist.new_group(ranks, timeout=timeout, backend="gloo")
            # Ranks outside of the group get a placeholder of another class.
            if isinstance(group, dist.ProcessGroup):
                groups[stages] = group
    return groups


@dataclass
class GradientBucket:
    """Parameters whose gradients are sent together.

    Attributes:
        stages: Stages that hold the parameters.
        position: Position, within the stage, of the first layer that has one of the parameters. The
            bucket is complete when backward has passed this layer.
        parameters: Parameters, all of one dtype.
    """

    stages: tuple[int, ...]
    position: int
    parameters: list[nn.Parameter] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters)


class GradientSync:
    """Sums the gradients of a step over the ranks that hold the parameters.

    Args:
        layer_parameters: Trainable parameters of every layer of this stage, by position.
        non_pipelined: Trainable parameters outside of the layers.
        owners: Stages that hold each parameter.
        groups: Process groups from `make_groups`.
        stage: This stage.
        timeout: Deadline in seconds.
        check: Called while waiting; raises if a rank is known to have failed.
        tracer: Records a span for every bucket.
        bucket_bytes: Size in bytes at which a bucket is full.
    """

    def __init__(
        self,
        layer_parameters: Sequence[Sequence[nn.Parameter]],
        non_pipelined: Sequence[nn.Parameter],
        *,
        owners: Owners,
        groups: Groups,
        stage: int,
        timeout: float,
        check: Callable[[], None],
        tracer: Tracer,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._groups, self._timeout, self._check, self._tracer = groups, timeout, check, tracer
        first_position: dict[nn.Parameter, int] = {}
        for position, parameters in reversed(list(enumerate(layer_parameters))):
            for parameter in parameters:
                first_position[parameter] = position
        # Code outside of the layers may add a gradient after backward of the layers. A parameter
        # that it uses too is therefore sent last, even if a single stage holds it.
        late = set(non_pipelined)
        unshared = {p: None for p in first_position if owners[p] == (stage,) and p not in late}
        self._buckets = (
            fill_buckets(list(unshared), first_position, (stage,), bucket_bytes)
            if (stage,) in groups
            else []
        )
        # All holders must start the all-reduces of shared parameters in the same order, or they
        # deadlock. Use the order of parameters in the whole model, which all ranks know.
        held = set(first_position) | set(non_pipelined)
        shared = [p for p in owners if p in held and p not in unshared and owners[p] in groups]
        self._shared = [
            GradientBucket(
                stages, 0, [p for p in shared if owners[p] == stages and p.dtype == dtype]
            )
            for stages in sorted({owners[p] for p in shared})
            for dtype in sorted({p.dtype for p in shared if owners[p] == stages}, key=str)
        ]
        # All-reduces in flight: bucket, its packed gradients, and the work to wait for.
        self._pending: list[tuple[GradientBucket, Tensor, Any]] = []
        # Number of `_buckets` that were sent in this step.
        self._launched = 0

    def begin(self, *, loss_scale: float, has_data: bool) -> None:
        """Begin a step. Sums need no preparation; `CompressedGradientSync` overrides this method.

        Args:
            loss_scale: Factor of the gradients of the step, such as that of a gradient scaler.
            has_data: False if this replica has no micro-batch in the step.
        """

    def undo_step(self) -> None:
        """Undo the last step, because its gradients are not used and the step runs again.

        Sums keep no state between steps; `CompressedGradientSync` overrides this method.
        """

    def layer_done(self, position: int, buffer: GradientBuffer) -> None:
        """Send the buckets that are complete; called when the last micro-batch's backward has
        passed the layer at `position`."""
        while (
            self._launched < len(self._buckets)
            and self._buckets[self._launched].position >= position
        ):
            self._launch(self._buckets[self._launched], buffer)
            self._launched += 1

    def finish(self, buffer: GradientBuffer) -> None:
        """Send the remaining buckets, wait for all, and put the sums into the buffer."""
        self.layer_done(0, buffer)
        for bucket in self._shared:
            self._launch(bucket, buffer)
        self._wait(buffer)

    def _wait(self, buffer: GradientBuffer) -> None:
        """Wait for the sums of all buckets, and put them into the buffer."""
        for bucket, data, work in self._pending:
            wait_for_collective(
                work,
                f"the gradients of stages {list(bucket.stages)} from all replicas",
                self._timeout,
                self._check,
            )
            _unpack(bucket, data, buffer)
        self._pending.clear()
        self._launched = 0

    def _launch(self, bucket: GradientBucket, buffer: GradientBuffer) -> None:
        # The ranks of a group may have devices of different kinds, but all have host memory.
        data = _pack(bucket, buffer).cpu()
        start = time.perf_counter_ns()
        work = dist.all_reduce(data, group=self._groups[bucket.stages], async_op=True)
        self._pending.append((bucket, data, work))
        stages, nbytes = bucket.stages, bucket.nbytes

        def record_span(_: Any) -> None:
            self._tracer.add(
                "all-reduce",
                "sync",
                start,
                time.perf_counter_ns(),
                stages=str(stages),
                nbytes=nbytes,
            )

        work.get_future().add_done_callback(record_span)


def fill_buckets(
    parameters: Sequence[nn.Parameter],
    first_position: Mapping[nn.Parameter, int],
    stages: tuple[int, ...],
    limit: int,
) -> list[GradientBucket]:
    """Return buckets in the order in which backward completes them.

    Args:
        parameters: Parameters to divide among the buckets.
        first_position: Position of the first layer with each parameter.
        stages: Stages that hold the parameters.
        limit: Size in bytes at which a bucket is full.
    """
    buckets: list[GradientBucket] = []
    for parameter in sorted(parameters, key=lambda p: -first_position[p]):
        bucket = buckets[-1] if buckets else None
        if (
            bucket is None
            or bucket.nbytes >= limit
            or bucket.parameters[0].dtype != parameter.dtype
        ):
            bucket = GradientBucket(stages, first_position[parameter])
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        bucket.position = first_position[parameter]
    return buckets


def _pack(bucket: GradientBucket, buffer: GradientBuffer) -> Tensor:
    """Return the gradients as one vector, followed by one number per parameter: 1 if this rank has
    a gradient, else 0.

    Holders without a gradient (a replica without a micro-batch, an unused parameter) add zeros. If
    no holder has one, the parameter has no gradient afterwards either, as in plain training.
    """
    # Remove the gradients from the buffer, so that they are not in memory twice while being sent.
    gradients = [buffer.pop(p) for p in bucket.parameters]
    flat = [
        torch.zeros_like(p).reshape(-1)
        if g is None
        else (g.to_dense() if g.is_sparse else g).reshape(-1).to(p.dtype)
        for p, g in zip(bucket.parameters, gradients, strict=True)
    ]
    return torch.cat([*flat, flat[0].new_tensor([float(g is not None) for g in gradients])])


def _unpack(bucket: GradientBucket, data: Tensor, buffer: GradientBuffer) -> None:
    """Put the sums of a bucket into the buffer; the inverse of `_pack`."""
    counts = data[-len(bucket.parameters) :].tolist()
    offset = 0
    for parameter, count in zip(bucket.parameters, counts, strict=True):
        if count:
            total = data[offset : offset + parameter.numel()].view(parameter.shape)
            buffer.put(parameter, total.to(parameter.device))
        offset += parameter.numel()
