"""A LightningModule deployed over the ranks: planned, partitioned, and made whole at the end."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dlres.core.comm.mailbox import Mailbox
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.execute.optimizers import (
    require_dense,
    require_owned,
    require_separable,
    set_state_device,
)
from lightning_dlres.pipeline.execute.partition import Owners, materialise, partition
from lightning_dlres.pipeline.execute.replica_compression import ReplicaCompression
from lightning_dlres.pipeline.execute.sharded_checkpoint import (
    ShardedCheckpoint,
    by_index,
    optimizer_section,
)
from lightning_dlres.pipeline.execute.states import (
    align_holders,
    distribute_from_rank_zero,
    gather_model_state,
    gather_optimizer_state,
    own_model_entries,
    own_optimizer_entries,
    own_optimizer_state,
    restore_whole_model,
    with_entries,
)
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.plan.planner import with_schedule
from lightning_dlres.strategies.connection import Connection
from lightning_dlres.strategies.few_bits import refuse_one_bit_adam
from lightning_dlres.strategies.hetero_pipe.options import PipeOptions
from lightning_dlres.strategies.hetero_pipe.replay.layer_attributes import LayerAttributes
from lightning_dlres.strategies.hetero_pipe.run_planner import PlannedRun, RunPlanner
from lightning_dlres.strategies.hetero_pipe.step.step_context import StepContext
from lightning_dlres.strategies.parameter_groups import order_groups_alike

# Models that an earlier run has left partitioned, and whether each rank had the whole model before
# it. One that was made on the meta device may be too large for the memory of one rank. After a run
# that has failed, no rank can have the whole model.
_LEFT_PARTITIONED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def is_left_partitioned(module: nn.Module) -> bool:
    """Return whether each rank has the parameters of its stage in an earlier run only."""
    return module in _LEFT_PARTITIONED


class Deployment:
    """One run's model on this rank; made by `Deployment.deploy`.

    The strategy keeps it after the run's end, for a checkpoint that is saved later.

    Args:
        context: Context of the user's steps.
        connection: Connection to the other ranks.
        planned: The plan, and the parameters that a layer's forward writes to.
        owners: Stages that hold each parameter.
        seed: Base seed of the layers' random numbers, the same on all ranks.
        optimizers: Optimizers of the run; empty outside of `fit`.
        is_whole: True if every rank had the whole model when the run began. Otherwise the model was
            made on the meta device.

    Attributes:
        plan: Plan of the run; its schedule may change during the run.
        stage: Stage of this rank.
        layers: All layers of the model; only those of this stage hold values.
        written_in_forward: Parameters that a layer's forward writes to.
        compression: Compression of gradients between replicas; None if there is none. It is closed
            at the run's end, and keeps its residuals for a checkpoint.
        attributes: Attributes of the layers; None on a single rank, and for a model that no rank
            holds whole.
    """

    def __init__(
        self,
        *,
        context: StepContext,
        connection: Connection,
        planned: PlannedRun,
        owners: Owners,
        seed: int,
        optimizers: Sequence[Optimizer],
        is_whole: bool,
    ) -> None:
        self.context, self.connection = context, connection
        self.layers = context.pipelined.layers
        self.plan, self.written_in_forward = planned.plan, planned.written_in_forward
        _, self.stage = planned.plan.position(connection.rank)
        self.owners, self.seed = owners, seed
        self.optimizers, self.is_whole = optimizers, is_whole
        self.compression: ReplicaCompression | None = None
        self.attributes: LayerAttributes | None = None
        if is_whole and connection.world_size > 1:
            self.attributes = LayerAttributes(
                context.module, self.layers, self.plan, connection.mailbox, context.device
            )

    @classmethod
    def deploy(
        cls,
        *,
        context: StepContext,
        options: PipeOptions,
        connection: Connection,
        trainer: Trainer,
        previous: PipelinePlan | None,
        optimizers: Sequence[Optimizer],
        is_whole: bool,
    ) -> Deployment:
        """Plan the run, and keep only this stage's parameters on this rank; called by all ranks.

        Args:
            context: Context of the user's steps.
            options: Options of the strategy.
            connection: Connection to the other ranks.
            trainer: Trainer of the run.
            previous: Plan of the strategy's previous run; None before the first.
            optimizers: Optimizers of the run; empty outside of `fit`.
            is_whole: True if every rank has the whole model.

        Raises:
            ConfigError: If no plan fits, or an earlier run left the model with another split.
            UnsupportedStepError: If the step uses a tensor that a layer made, other than the
                module's output.
        """
        module, device = context.module, context.device
        was_partitioned = is_left_partitioned(module)
        planner = RunPlanner(
            context=context,
            options=options,
            connection=connection,
            optimizers=optimizers,
            model_is_whole=is_whole,
            keeps_placement=was_partitioned,
        )
        planned = planner.plan(trainer, previous)
        plan, mailbox, layers = planned.plan, connection.mailbox, context.pipelined.layers
        if plan != previous and connection.rank == 0:
            rank_zero_info(f"\n{plan.table()}\n{plan.prediction()}")
        connection.rename([plan.rank_name(rank) for rank in range(connection.world_size)])
        _, stage = plan.position(connection.rank)
        owners = layers.owners(plan)
        seed = int(connection.broadcast(torch.initial_seed() % (1 << 62), 0))
        if is_whole:
            distribute_from_rank_zero(layers, owners, plan, mailbox)
        elif was_partitioned:
            _require_own_parameters(module, owners, stage)
            if _LEFT_PARTITIONED[module]:
                rank_zero_warn(
                    f"The last run of {type(module).__name__} has failed. Its weights are used "
                    "again, but what layers keep in attributes stays on their own ranks. Go on "
                    "from the last checkpoint with a new model if they keep any."
                )
        partition(layers, owners, plan, stage, device)
        if is_whole or plan != previous:
            # Reference cycles may still hold other stages' weights and the profiled copies.
            gc.collect()
        if not is_whole:
            materialise(layers, plan, stage, device=device, seed=seed)
            align_holders(layers, owners, plan, mailbox)
        return cls(
            context=context,
            connection=connection,
            planned=planned,
            owners=owners,
            seed=seed,
            optimizers=optimizers,
            is_whole=is_whole,
        )

    @property
    def module(self) -> LightningModule:
        """The LightningModule."""
        return self.context.module

    def prepare_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that the optimizers work with one stage's parameters, and move their state to this
        rank's device.

        Raises:
            ConfigError: If an optimizer is a OneBitAdam, computes something over all parameters,
                has parameters that are not the model's, or gets sparse gradients that must be
                summed over ranks.
        """
        replicas = len(self.plan.replicas)
        summed = {p for p, stages in self.owners.items() if replicas * len(stages) > 1}
        refuse_one_bit_adam(optimizers, "dlres_hetero_pipe")
        for optimizer in optimizers:
            require_owned(optimizer, self.owners, type(self.module).__name__)
            order_groups_alike([optimizer], self.module, self.connection)
            require_dense(optimizer, summed)
            require_separable(optimizer, len(self.plan.split))
            # Adagrad creates state for all parameters when it is made. Remote parameters must have
            # none on this rank.
            for parameter in [p for p in optimizer.state if p.is_meta]:
                del optimizer.state[parameter]
            set_state_device(optimizer, self.context.device)

    def follow_schedule(self, schedule: str) -> None:
        """Put the schedule to which the run has changed into the plan."""
        self.plan = with_schedule(self.plan, schedule)

    def end(self, orderly: bool) -> None:
        """End the run.

        Args:
            orderly: True if no rank has failed. All ranks then call this, and every rank gets the
                whole model back if it had it before the run, or before one that has failed.
        """
        was_whole = self.is_whole or _LEFT_PARTITIONED.get(self.module, False)
        if orderly and was_whole:
            if self.attributes is not None:
                self.attributes.share()
            restore_whole_model(self.layers, self.owners, self.plan, self.connection.mailbox)
            _LEFT_PARTITIONED.pop(self.module, None)
        else:
            _LEFT_PARTITIONED[self.module] = was_whole

    def gather_model_state(self, state: dict[str, Any], mailbox: Mailbox) -> dict[str, Any]:
        """Return the whole model's state dict on rank 0."""
        return gather_model_state(state, self.layers, self.plan, mailbox)

    def gather_optimizer_state(
        self, optimizer: Optimizer, state: dict[str, Any], mailbox: Mailbox
    ) -> dict[str, Any]:
        """Return the whole optimizer's state dict on rank 0."""
        parameters = _parameters_of(optimizer)
        return gather_optimizer_state(state, parameters, self.owners, self.plan, mailbox)

    def checkpoint_entries(
        self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer]
    ) -> dict[str, Any]:
        """Return the sections of a sharded checkpoint that this rank writes."""
        rank, plan = self.connection.rank, self.plan
        entries = own_model_entries(checkpoint["state_dict"], self.layers, plan, rank)
        own: dict[str, Any] = {"state_dict": entries}
        states = checkpoint.get("optimizer_states", [])
        for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
            parameters = _parameters_of(optimizer)
            states_of_stage = own_optimizer_entries(state, parameters, self.owners, plan, rank)
            own[optimizer_section(number)] = states_of_stage
        return own

    @property
    def checkpoint_writers(self) -> set[int]:
        """Ranks that write the shards of a checkpoint."""
        return {0, *self.plan.replicas[0]}

    def load_sharded_optimizer_state(
        self, optimizer: Optimizer, number: int, state: dict[str, Any], shards: ShardedCheckpoint
    ) -> None:
        """Load this stage's part of an optimizer's state from a sharded checkpoint.

        Args:
            optimizer: The optimizer.
            number: Its number.
            state: Its state dict without the states of parameters.
            shards: The checkpoint.
        """
        held = {
            str(index)
            for index, parameter in enumerate(_parameters_of(optimizer))
            if self.stage in self.owners[parameter]
        }
        section = optimizer_section(number)
        states = by_index(shards.read(section, held & shards.shapes(section).keys()))
        self.load_optimizer_state(optimizer, {**state, "state": states})

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this stage's part of a whole optimizer's state dict."""
        parameters = _parameters_of(optimizer)
        optimizer.load_state_dict(own_optimizer_state(state, parameters, self.owners, self.stage))
        set_state_device(optimizer, self.context.device)

    def load_model_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load this stage's part of a whole model's state dict.

        Raises:
            ConfigError: If `strict` is set and keys or shapes are not the model's.
        """
        own = self.module.state_dict()
        common = own.keys() & state.keys()
        if strict:
            shapes = {k: getattr(value, "shape", None) for k, value in state.items()}
            require_fitting(self.module, shapes)
        remote = {k for k, value in own.items() if isinstance(value, Tensor) and value.is_meta}
        own_part = with_entries(state, {k: state[k] for k in common - remote})
        self.module.load_state_dict(own_part, strict=False)


def require_fitting(module: nn.Module, shapes: Mapping[str, Any]) -> None:
    """Check that the entries of a checkpoint are those of a model.

    Args:
        module: The model.
        shapes: Shape of each tensor of the checkpoint; None for other objects.

    Raises:
        ConfigError: If keys or shapes differ.
    """
    own = module.state_dict()
    common = own.keys() & shapes.keys()
    misshaped = [
        key for key in common if isinstance(own[key], Tensor) and own[key].shape != shapes[key]
    ]
    if own.keys() != shapes.keys() or misshaped:
        raise ConfigError(
            f"The checkpoint does not fit {type(module).__name__}: missing keys "
            f"{sorted(own.keys() - common)}, unexpected keys {sorted(shapes.keys() - common)}, "
            f"keys of another shape {misshaped}. Load it into the model that was saved, or set "
            "strict_loading=False."
        )


def load_sharded_model(
    module: nn.Module, empty_state: Mapping[str, Any], shards: ShardedCheckpoint, strict: bool
) -> None:
    """Load the part of a sharded checkpoint that a model holds on this rank.

    Args:
        module: The model.
        empty_state: State dict of the checkpoint, without its entries.
        shards: The entries.
        strict: Whether keys and shapes must be the model's.

    Raises:
        ConfigError: If `strict` is set and keys or shapes are not the model's.
    """
    shapes, own = shards.shapes("state_dict"), module.state_dict()
    if strict:
        require_fitting(module, shapes)
    held = {
        key: value
        for key, value in own.items()
        if not (isinstance(value, Tensor) and value.is_meta) and key in shapes
    }
    tensors = {key: value for key, value in held.items() if isinstance(value, Tensor)}
    loaded = shards.read("state_dict", held, tensors)
    rest = with_entries(empty_state, {})
    rest.update({key: loaded[key] for key in held.keys() - tensors.keys()})
    module.load_state_dict(rest, strict=False)


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _require_own_parameters(module: LightningModule, owners: Owners, stage: int) -> None:
    # A copy of a layer that user code made during the earlier run is no lost parameter.
    own = [(name, p) for name, p in module.named_parameters() if stage in owners.get(p, ())]
    lost = [name for name, parameter in own if parameter.is_meta]
    if lost:
        raise ConfigError(
            f"{type(module).__name__} was left partitioned by an earlier run, which had another "
            f"split or has failed: stage {stage} has no values for {lost[:3]}. Use the same "
            "Trainer, or load a checkpoint into a new model."
        )
