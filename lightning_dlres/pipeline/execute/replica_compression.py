"""Compression of gradients between the replicas of a stage, during a run.

The ranks of one stage run the task graphs of `gradsync`: each rank is the parameter server of a
part of the gradients. What compression leaves out is kept as a residual, and sent in later steps.

A window is the steps whose gradients one optimizer step uses: several with gradient accumulation.
Each bucket has flags, one for each of its parameters: 1 if this rank has a gradient for it, else 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.comm.channel_ends import LONGER_THAN_ANY_RUN
from lightning_dlres.core.comm.mailbox import Mailbox
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.saved_states import save_states
from lightning_dlres.gradsync.execute.session import all_ranks_agree
from lightning_dlres.gradsync.execute.states import CodecStates, StateCopies
from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.plan.plan import (
    RAW,
    CodecChoice,
    SyncPlan,
    choices_by_size,
    make_plan,
)
from lightning_dlres.gradsync.plan.units import GradientSpec
from lightning_dlres.kernels.gradients.layout import BLOCK
from lightning_dlres.pipeline.execute.gradients import (
    BUCKET_BYTES,
    GradientBucket,
    fill_buckets,
)
from lightning_dlres.pipeline.execute.partition import ModelLayers, Owners
from lightning_dlres.pipeline.execute.replica_residuals import (
    load_replica_states,
    merge_states,
)
from lightning_dlres.pipeline.plan.plan import PipelinePlan

# Gradients with fewer bytes in float32 are not compressed: a codec call costs more than it saves.
MIN_BYTES = 16 << 10
# Codecs work in float32. Gradients of more precision would lose it without a residual.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def compressible_parameters(
    layers: ModelLayers, owners: Owners, min_bytes: int = MIN_BYTES
) -> dict[nn.Parameter, str]:
    """Return the names of the parameters of all stages whose gradients may be compressed.

    Args:
        layers: Layers of the model.
        owners: Stages that hold each parameter.
        min_bytes: Bytes in float32 of the smallest gradient that is compressed.
    """
    return {
        parameter: name
        for name, parameter in layers.root.named_parameters()
        if parameter in layers.layer_only_parameters
        and len(owners[parameter]) == 1
        and parameter.dtype in _DTYPES
        and 4 * parameter.numel() >= min_bytes
    }


class ReplicaCompression:
    """Compression of gradients between the replicas of this rank's stage, during a run.

    Made by all ranks together. With a single replica, there is nothing to compress; do not make it.

    Args:
        codec: Codec of the gradients.
        layers: Layers of the model.
        owners: Stages that hold each parameter.
        plan: Plan of the run, with several replicas.
        rank: This rank.
        timeout: Deadline in seconds.
        check: Called while waiting; raises if a rank is known to have failed.
        undoes_windows: True makes `end_window(is_skipped=True)` possible, with a copy of the
            states at the beginning of the window. Needed with a gradient scaler.
        min_bytes: Bytes in float32 of the smallest gradient that is compressed.
        bucket_bytes: Size in bytes at which a bucket is full.

    Attributes:
        names: Names of the parameters whose gradients are compressed, in this stage.
        buckets: Buckets of these parameters, in the order in which backward completes them.
        replicas: Number of replicas.
        stage: This stage.
        sync_plan: Codecs, partitions and owners of the gradients.
        states: States of this rank's codecs.
    """

    def __init__(
        self,
        codec: GradientCodec,
        *,
        layers: ModelLayers,
        owners: Owners,
        plan: PipelinePlan,
        rank: int,
        timeout: float,
        check: Callable[[], None],
        undoes_windows: bool = False,
        min_bytes: int = MIN_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._codec, self._pipeline_plan = codec, plan
        _, self.stage = plan.position(rank)
        self.replicas = len(plan.replicas)
        self._all_names = compressible_parameters(layers, owners, min_bytes)
        self.names = {p: name for p, name in self._all_names.items() if owners[p] == (self.stage,)}
        first_position: dict[nn.Parameter, int] = {}
        for position, layer in reversed(list(enumerate(plan.layers_of(self.stage)))):
            first_position.update(dict.fromkeys(layers.modules[layer].parameters(), position))
        self.buckets = fill_buckets(list(self.names), first_position, (self.stage,), bucket_bytes)
        self.sync_plan = _sync_plan(codec, self.names, self.buckets, self.replicas)
        self._units = {name: self.sync_plan.units_of(name) for name in self.names.values()}
        self.states = CodecStates()
        # Number of the last step, and of the last one before the window.
        self._step, self._window_start, self._has_begun = 0, 0, False
        # A step runs again if its records show that the schedule must change. `training_step` may
        # return None after backward, too.
        self._before_step = StateCopies(self.states)
        self._before_window = StateCopies(self.states) if undoes_windows else None
        self._loss_scale, self._has_data = 1.0, True
        # Ranks of this stage by their rank in its process group. Torch sorts them.
        self._ranks = sorted(replica[self.stage] for replica in plan.replicas)
        self._group = _stage_group(plan, self.stage)
        self._own_rank, self._timeout, self._check = self._ranks.index(rank), timeout, check
        self._connect()

    def _connect(self) -> None:
        # The pipeline's timeline shows only the pipeline's own messages, so trace none here.
        tracer = Tracer(enabled=False)
        self._mailbox = Mailbox(
            self._group,
            self._own_rank,
            [self._pipeline_plan.rank_name(peer) for peer in self._ranks],
            timeout=self._timeout,
            check=self._check,
            tracer=tracer,
        )
        codecs = {self._codec.name: self._codec}
        self._synchroniser = GradientSynchroniser(
            self.sync_plan, codecs, self._mailbox, tracer, states=self.states
        )

    def begin(self, *, loss_scale: float, has_data: bool) -> None:
        """Begin a step; for the arguments see `GradientSync.begin`."""
        self._loss_scale, self._has_data = loss_scale, has_data
        self._step, self._has_begun = self._step + 1, True
        self._before_step.forget()

    def start(
        self,
        gradients: Mapping[str, Tensor],
        on_done: Callable[[BaseException | None], None],
    ) -> None:
        """Start to replace gradients by their means over the replicas, without waiting.

        Args:
            gradients: float32, flat and contiguous, by name. They must not be used until `on_done`.
            on_done: Called once, from another thread: with None, or with the error.
        """
        units = [unit for name in gradients for unit in self._units.get(name, [])]
        for copies in {self._before_window, self._copies_before_step()}:
            if copies is not None:
                copies.save(units)
        self._synchroniser.start(
            self._step,
            gradients,
            on_done,
            loss_scale=self._loss_scale,
            has_data=self._has_data,
        )

    def mark(self) -> Any:
        """See `GradientSynchroniser.mark`."""
        return self._synchroniser.mark()

    def wait_for(self, mark: Any) -> None:
        """See `GradientSynchroniser.wait_for`."""
        self._synchroniser.wait_for(mark)

    def undo_step(self) -> None:
        """Restore the states from before the last step, which runs again.

        The rerun is a new step for the codecs: its number, a part of random seeds, is another one.
        """
        self._copies_before_step().restore()

    def end_window(self, *, is_skipped: bool) -> None:
        """End the window.

        Args:
            is_skipped: True if the optimizer skipped its step because of an overflow. The states
                from before the window are then restored.
        """
        self._window_start = self._step
        if self._before_window is not None:
            if is_skipped:
                self._before_window.restore()
            self._before_window.forget()

    def _copies_before_step(self) -> StateCopies:
        """Return the copies from before this step: those of the window in its first step."""
        if self._before_window is not None and self._step == self._window_start + 1:
            return self._before_window
        return self._before_step

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the states of this rank: numbers, strings and tensors on the CPU.

        The tensors are copies, since training may go on while a file is written.
        """
        units = save_states(self.states, self.sync_plan)["units"]
        return {"step": self._step, "units": [_on_cpu(unit) for unit in units]}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the states of all ranks, from `state_dict`, for a checkpoint."""
        return merge_states(states, self._pipeline_plan)

    def load_states(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Continue from the states of an earlier run, or of an earlier step of this one.

        With the same plan, this rank continues exactly. Otherwise residuals are shared out again,
        and a warning says so. After the first step, all ranks call it together.

        Args:
            saved: Result of `merge` in the earlier run.
            device: Device of this rank's gradients.

        Raises:
            PeerError: If a rank is lost or late.
        """
        if self._has_begun:
            self._begin_anew()
        self._step = self._window_start = saved["step"]
        replicas = [self._pipeline_plan.position(rank)[0] for rank in self._ranks]
        load_replica_states(
            saved["replicas"],
            self.sync_plan,
            {self._codec.name: self._codec},
            self.states,
            # The order of the process group, which may be another one than that of the replicas.
            order=replicas,
            rank=self._mailbox.rank,
            device=device,
            all_names=set(self._all_names.values()),
        )

    def _begin_anew(self) -> None:
        """Drop all states and connect again, since steps will have the numbers of earlier ones."""
        all_ranks_agree(True, self._group, self._timeout, self._check)
        self._synchroniser.close()
        self._mailbox.close(True)
        self.states.by_key.clear()
        for copies in (self._before_step, self._before_window):
            if copies is not None:
                copies.forget()
        self._connect()

    def close(self, *, orderly: bool) -> None:
        """End the threads; the states stay.

        Args:
            orderly: True if no rank has failed. All ranks then call this.
        """
        orderly = orderly and self._synchroniser.failure is None
        self._synchroniser.close()
        self._mailbox.close(orderly)
        if orderly:
            dist.destroy_process_group(self._group)


def flags_name(bucket: int) -> str:
    """Return the name of the flags of a bucket in the plan; no parameter's name has a space."""
    return f"flags of bucket {bucket}"


def _sync_plan(
    codec: GradientCodec,
    names: Mapping[nn.Parameter, str],
    buckets: Sequence[GradientBucket],
    replicas: int,
) -> SyncPlan:
    """Return the plan of the compressed gradients of a stage, and of the flags of each bucket."""
    specs = [GradientSpec(name=name, count=p.numel()) for p, name in names.items()]
    choices = choices_by_size(specs, codec, least_elements=0, world_size=replicas)
    for index, bucket in enumerate(buckets):
        specs.append(GradientSpec(name=flags_name(index), count=len(bucket.parameters)))
        choices.append(CodecChoice(codec=RAW, partitions=1))
    return make_plan(specs, choices, world_size=replicas, topology="ps", alignment=BLOCK)


def _on_cpu(unit: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state with copies of its tensors on the CPU."""
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in unit["tensors"].items()}
    return {**unit, "tensors": tensors}


def _stage_group(plan: PipelinePlan, stage: int) -> dist.ProcessGroup:
    """Return the gloo group of a stage's ranks; called by all ranks, which torch needs for all
    groups."""
    groups = [
        dist.new_group(
            sorted(replica[other] for replica in plan.replicas),
            backend="gloo",
            timeout=LONGER_THAN_ANY_RUN,
        )
        for other in range(plan.stages)
    ]
    group = groups[stage]
    assert isinstance(group, dist.ProcessGroup)
    return group
