"""A LightningModule deployed over the ranks of one run: found, planned, partitioned, and made whole
again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.comm.mailbox import Mailbox
from lightning_dlres.pipeline.execute.buffers import BufferSync
from lightning_dlres.pipeline.execute.gradients import GradientSync, make_groups
from lightning_dlres.pipeline.execute.optimizers import (
    require_dense,
    require_owned,
    require_separable,
    set_state_device,
)
from lightning_dlres.pipeline.execute.partition import materialise, partition
from lightning_dlres.pipeline.execute.runtime import Runtime
from lightning_dlres.pipeline.execute.states import (
    align_holders,
    distribute_from_rank_zero,
    gather_model_state,
    gather_optimizer_state,
    own_optimizer_state,
    restore_whole_model,
)
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.plan.planner import (
    adopt_plan,
    measured_plan,
    unmeasured_layers,
    unmeasured_plan,
    with_schedule,
)
from lightning_dlres.pipeline.plan.search.grouping import stage_counts
from lightning_dlres.pipeline.profile.config import ProfileSamples
from lightning_dlres.pipeline.profile.layer_times import is_lack_of_memory
from lightning_dlres.pipeline.profile.profiler import Profiler, ProfilingError
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, RunProfile
from lightning_dlres.pipeline.stage.stage import Stage
from lightning_dlres.strategies.connection import Connection
from lightning_dlres.strategies.hetero_pipe.checks.inspection import inspect_step
from lightning_dlres.strategies.hetero_pipe.data.loader_copy import NoCopyError
from lightning_dlres.strategies.hetero_pipe.data.profile_samples import read_samples
from lightning_dlres.strategies.hetero_pipe.options import PipeOptions
from lightning_dlres.strategies.hetero_pipe.plain_steps import PlainSteps
from lightning_dlres.strategies.hetero_pipe.precision import clipping_over_stages, loss_scale
from lightning_dlres.strategies.hetero_pipe.profiled_model import gradient_copies, profiled_model
from lightning_dlres.strategies.hetero_pipe.replay.metrics import (
    MetricStates,
    metric_sync_disabled,
)
from lightning_dlres.strategies.hetero_pipe.replay.untracked_state import untracked_state_warning
from lightning_dlres.strategies.hetero_pipe.step.gradient_reads import gradient_read_warning
from lightning_dlres.strategies.hetero_pipe.step.pipelined_module import (
    find_pipelined_module,
    require_layers,
)
from lightning_dlres.strategies.hetero_pipe.step.user_step import StepContext
from lightning_dlres.strategies.hetero_pipe.step_runner import StepRunner
from lightning_dlres.strategies.hetero_pipe.zeroing import zeroes_every_step

# Models made on the meta device, whose parameters stay where they were trained.
_LEFT_PARTITIONED: WeakSet[nn.Module] = WeakSet()

ContextFactory = Callable[[], AbstractContextManager[Any]]


class Deployment:
    """One run's model on this rank, from the strategy's setup on. The model's place is kept after
    the run's end, for a checkpoint that is saved later.

    Args:
        options: the strategy's options.
        module: the LightningModule.
        precision: its precision plugin.
        connection: the ranks.
        device: where this rank computes.
        tracer: gets a span for everything that is done.
        whole: whether every rank has the whole model; else it was made on the meta device.
    """

    def __init__(
        self,
        options: PipeOptions,
        module: LightningModule,
        precision: Precision,
        connection: Connection,
        device: torch.device,
        tracer: Tracer,
        whole: bool,
    ) -> None:
        self.module, self.whole = module, whole
        self._options, self._precision, self._connection = options, precision, connection
        self._device, self._tracer = device, tracer
        self._slowdown = options.slowdown(connection.rank, connection.world_size)
        self.step_context: ContextFactory = nullcontext
        self._optimizers: Sequence[Optimizer] = ()
        self.pipelined = find_pipelined_module(module, options.module)
        self._layers = self.pipelined.layers
        self._written_in_forward: set[nn.Parameter] = set()
        self._undo = ExitStack()
        metrics = MetricStates(module)
        self._context = StepContext(
            module, self.pipelined, metrics, device, self._current_context, options.split_batch
        )
        self._undo.enter_context(metric_sync_disabled(self._context.all_metrics))

    def deploy(
        self, trainer: Trainer, previous: PipelinePlan | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Plan, and leave on this rank what its stage holds; called by all ranks."""
        self._optimizers = optimizers
        self.step_context = self._precision.train_step_context
        self.plan = self._make_plan(trainer, previous)
        if self.plan != previous:
            rank_zero_info(f"\n{self.plan.table()}\n{self.plan.prediction()}")
        connection = self._connection
        connection.rename([self.plan.rank_name(rank) for rank in range(connection.world_size)])
        _, self.stage = self.plan.place(self._connection.rank)
        self.owners = self._layers.owners(self.plan)
        self.seed = int(self._connection.broadcast(torch.initial_seed() % (1 << 62), 0))
        mailbox = self._connection.mailbox
        if self.whole:
            distribute_from_rank_zero(self._layers, self.owners, self.plan, mailbox)
        elif self.module in _LEFT_PARTITIONED:
            self._require_own_parameters()
        partition(self._layers, self.owners, self.plan, self.stage, self._device)
        if self.whole or self.plan != previous:
            # Other stages' weights, and the copies that were profiled, may be held by cycles only.
            gc.collect()
        if not self.whole:
            materialise(self._layers, self.plan, self.stage, device=self._device, seed=self.seed)
            align_holders(self._layers, self.owners, self.plan, mailbox)

    def check_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Raise unless the optimizers can work on a stage's parameters alone.

        Raises:
            ConfigError: one computes over all parameters, has others than the model's or takes
                sparse gradients where there are none, or a gradient scaler would find none.
        """
        replicas = len(self.plan.replicas)
        summed = {p for p, stages in self.owners.items() if replicas * len(stages) > 1}
        for optimizer in optimizers:
            require_owned(optimizer, self.owners, type(self.module).__name__)
            require_dense(optimizer, summed)
            require_separable(optimizer)
            # Adagrad makes state for every parameter at once; remote ones have none.
            for parameter in [p for p in optimizer.state if p.is_meta]:
                del optimizer.state[parameter]
            set_state_device(optimizer, self._device)
        trainable = any(p.requires_grad and self.stage in held for p, held in self.owners.items())
        if loss_scale(self._precision) != 1.0 and not trainable:
            raise ConfigError(
                f"Stage {self.stage} has nothing to train, and a gradient scaler needs a gradient "
                "on every rank. Use precision='bf16-mixed', or another split: "
                "HeteroPipeStrategy(plan=...)."
            )

    def make_runner(self, meet: Callable[[], None]) -> StepRunner | PlainSteps:
        """Return what runs this rank's steps; called by all ranks."""
        plan, connection, options = self.plan, self._connection, self._options
        if options.cuts_nothing(connection.world_size):
            return PlainSteps(self.module, self._current_context, self._tracer)
        indices = plan.layers_of(self.stage)
        modules = [self._layers.modules[index] for index in indices]
        trainable, non_pipelined = (
            self._layers.trainable(indices),
            self._layers.non_pipelined_parameters(),
        )
        self._trainable = self._which_train()
        groups = make_groups(plan, self.owners, timedelta(seconds=options.timeout))
        for group in groups.values():
            self._undo.callback(dist.destroy_process_group, group)
        stage = Stage(
            [self.pipelined.bind(i, module) for i, module in zip(indices, modules, strict=True)],
            trainable,
            first_layer=indices.start,
            device=self._device,
            context=self._current_context,
            recomputed={
                p: modules[p] for p, layer in enumerate(indices) if layer in plan.recompute
            },
            by_layer=len(plan.replicas) > 1,
        )

        def make_sync(
            trainable: list[list[nn.Parameter]], non_pipelined: list[nn.Parameter]
        ) -> GradientSync:
            return GradientSync(
                trainable,
                non_pipelined,
                owners=self.owners,
                groups=groups,
                stage=self.stage,
                timeout=options.timeout,
                check=connection.check,
                tracer=self._tracer,
            )

        self._make_sync = make_sync
        written = self._written_in_forward
        replica_group = groups.get((self.stage,)) if len(plan.replicas) > 1 else None

        def changed_in_forward() -> list[Tensor]:
            buffers = [buffer for module in modules for buffer in module.buffers()]
            return buffers + [p for some in modules for p in some.parameters() if p in written]

        buffer_sync = BufferSync(
            changed_in_forward,
            replica_group,
            plan.replicas[0][self.stage],
            options.timeout,
            connection.check,
        )
        runtime = Runtime(
            plan=plan,
            rank=connection.rank,
            stage=stage,
            non_pipelined=non_pipelined,
            sync=make_sync(trainable, non_pipelined),
            buffers=buffer_sync,
            mailbox=connection.mailbox,
            tracer=self._tracer,
            microbatches=options.microbatches or plan.microbatches or 4 * plan.world_size,
            slowdown=self._slowdown,
        )
        self._undo.enter_context(
            clipping_over_stages(self._precision, self.owners, self.stage, self._sum_over_stages)
        )
        self._undo.enter_context(
            gradient_read_warning(self.module, self._optimizers, rank_zero_warn)
        )
        runner = StepRunner(
            self._context,
            runtime,
            options.schedule,
            self.seed,
            meet,
            rank_zero_info,
            self._follow_schedule,
            lambda: zeroes_every_step(self.module.trainer, self.module),
        )
        # Calls outside of steps (a summary, samples at the end of an epoch) come from all ranks.
        self._undo.enter_context(self.pipelined.intercepted(runner.forward))
        return runner

    def follow_freezing(self, runtime: Runtime) -> None:
        """Tell the runtime which parameters the user has frozen or unfrozen since; called before
        every training step.

        Raises:
            ConfigError: An optimizer has got a parameter that the model had not at the start.
        """
        for optimizer in self._optimizers:
            # Hooks may add parameter groups at any time.
            require_owned(optimizer, self.owners, type(self.module).__name__)
        trainable = self._which_train()
        if trainable == self._trainable:
            return
        self._trainable = trainable
        of_layers = self._layers.trainable(self.plan.layers_of(self.stage))
        non_pipelined = self._layers.non_pipelined_parameters()
        runtime.set_trainable(of_layers, non_pipelined, self._make_sync(of_layers, non_pipelined))

    def _which_train(self) -> list[bool]:
        return [p.requires_grad for p, stages in self.owners.items() if self.stage in stages]

    def _follow_schedule(self, schedule: str) -> None:
        self.plan = with_schedule(self.plan, schedule)

    def end(self, orderly: bool) -> None:
        """Take everything back; in an orderly end, called by all ranks, a model that came whole
        leaves whole."""
        if orderly and self.whole:
            restore_whole_model(self._layers, self.owners, self.plan, self._connection.mailbox)
        elif not self.whole:
            _LEFT_PARTITIONED.add(self.module)
        self.take_back()

    def take_back(self) -> None:
        """Undo what the run has changed outside of the model; may be called again."""
        self._undo.close()

    def gather_model_state(self, state: dict[str, Any], mailbox: Mailbox) -> dict[str, Any]:
        """Return the whole model's state dict on rank 0."""
        return gather_model_state(state, self._layers, self.plan, mailbox)

    def gather_optimizer_state(
        self, optimizer: Optimizer, state: dict[str, Any], mailbox: Mailbox
    ) -> dict[str, Any]:
        """Return the whole optimizer's state dict on rank 0."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return gather_optimizer_state(state, parameters, self.owners, self.plan, mailbox)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what this stage holds of a whole optimizer's state dict."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.load_state_dict(own_optimizer_state(state, parameters, self.owners, self.stage))
        set_state_device(optimizer, self._device)

    def load_model_state(self, given: Mapping[str, Any], strict: bool) -> None:
        """Load what this stage holds of a whole model's state dict.

        Raises:
            ConfigError: it is another model's, and `strict` is set.
        """
        mine = self.module.state_dict()
        both = mine.keys() & given.keys()
        wrong = [k for k in both if isinstance(mine[k], Tensor) and mine[k].shape != given[k].shape]
        if strict and (mine.keys() != given.keys() or wrong):
            raise ConfigError(
                f"The checkpoint does not fit {type(self.module).__name__}: missing "
                f"{sorted(mine.keys() - both)}, unexpected {sorted(given.keys() - both)}, of "
                f"another shape {wrong}. Load it into the model that wrote it, or set "
                "strict_loading=False."
            )
        meta = {k for k, value in mine.items() if isinstance(value, Tensor) and value.is_meta}
        self.module.load_state_dict({k: given[k] for k in both - meta}, strict=False)

    def _require_own_parameters(self) -> None:
        lost = [n for n, p in self.module.named_parameters() if p.is_meta and self._holds(p)]
        if lost:
            raise ConfigError(
                f"{type(self.module).__name__} was left partitioned by an earlier run with another "
                f"split; stage {self.stage} would have to invent {lost[:3]}. Use the same Trainer, "
                "or load a checkpoint into a new model."
            )

    def _holds(self, parameter: nn.Parameter) -> bool:
        return self.stage in self.owners[parameter]

    def _make_plan(self, trainer: Trainer, previous: PipelinePlan | None) -> PipelinePlan:
        fitting = trainer.state.fn == TrainerFn.FITTING
        measures = self._options.plan is None and self._connection.world_size > 1
        cuts = not self._options.cuts_nothing(self._connection.world_size)
        reads = fitting and cuts and (self.whole or measures)
        samples = self._read_samples(trainer) if reads else None
        plan = self._planned(trainer, previous, fitting, samples)
        if samples is not None and self.whole:
            # Last, so that what the user's hooks took while layers were measured is replaced.
            self._inspect(samples)
        return plan

    def _planned(
        self,
        trainer: Trainer,
        previous: PipelinePlan | None,
        fitting: bool,
        samples: ProfileSamples | None,
    ) -> PipelinePlan:
        world_size = self._connection.world_size
        options = self._options
        if options.plan is not None:
            return adopt_plan(
                options.plan, self._unmeasured_layers(), self.pipelined.path, world_size
            )
        replicas = options.replicas(world_size)
        fits = previous is not None and _names(previous) == self._layers.names
        stays = not fitting or self.module in _LEFT_PARTITIONED
        if previous is not None and fits and (previous.is_measured or stays):
            return previous
        profile = None
        if samples is not None and world_size > 1:
            stages = len(replicas[0]) if options.fixed_replicas else options.stages
            require_layers(self.pipelined, stages or stage_counts(world_size)[0])
            profile = self._profile(trainer, samples)
        if profile is None:
            require_layers(self.pipelined, len(replicas[0]))
            return unmeasured_plan(self._unmeasured_layers(), replicas)
        return self._decide(profile)

    def _unmeasured_layers(self) -> tuple[LayerProfile, ...]:
        return unmeasured_layers(self._layers.names, self._layers.parameter_bytes())

    def _decide(self, profile: RunProfile) -> PipelinePlan:
        """Plan on rank 0, for all."""
        connection = self._connection
        told: Tree = [None, None]
        if connection.rank == 0:
            try:
                told = [
                    measured_plan(profile, self._options.wishes, rank_zero_warn).to_json(),
                    None,
                ]
            except ConfigError as error:
                told = [None, str(error)]
        text, reason = connection.broadcast(told, 0)
        if reason is not None:
            raise ConfigError(reason)
        return PipelinePlan.from_json(text)

    def _inspect(self, samples: ProfileSamples) -> None:
        """Try one step on real samples; called by all ranks.

        Raises:
            UnsupportedStepError: The step takes from the layers what a stage cannot have.
        """
        connection, before = self._connection, self._context.untracked_state()
        inspection = inspect_step(self._context, samples.together)
        changed = untracked_state_warning(before.changed(self._context.layer_tensors))
        if changed is not None:
            rank_zero_info(changed)
        self._written_in_forward = inspection.written_parameters
        told = [
            connection.broadcast(inspection.refusal if rank == connection.rank else None, rank)
            for rank in range(connection.world_size)
        ]
        refusal = next(filter(None, told), None)
        if refusal is not None:
            raise UnsupportedStepError(refusal)
        if inspection.failure is not None:
            self._say_unchecked(inspection.failure)
        line = inspection.warning()
        if line is not None and samples.microbatches > 1:
            rank_zero_info(line)

    def _profile(self, trainer: Trainer, samples: ProfileSamples) -> RunProfile | None:
        """Measure the layers, the loss and the links; called by all ranks."""
        options, connection = self._options, self._connection
        count = len(self._layers.modules)
        rank_zero_info(f"dlres: profiling {count} layers on {connection.world_size} ranks ...")
        limit = options.memory_limit(connection.rank, connection.world_size)
        slowdown = self._slowdown if options.emulate_speed is not None else None
        model = profiled_model(self._context)
        profiler = Profiler(
            model, connection, rank_zero_info, slowdown, limit, self._current_context
        )
        try:
            copies = gradient_copies(trainer, self.module)
            return profiler.run(samples, options.profile, self._optimizers, copies)
        except ProfilingError as error:
            self._say_why_by_bytes(str(error))
            return None

    def _read_samples(self, trainer: Trainer) -> ProfileSamples | None:
        found: Tree = [None, None, None, None, None]
        options = self._options
        plans = options.plan is None and self._connection.world_size > 1
        if self._connection.rank == 0:
            try:
                count = options.microbatches or 4 * self._connection.world_size
                read = read_samples(trainer, self._context, options.profile, count)
                found = [read.inputs, read.batches, read.microbatches, read.together, None]
            except Exception as error:
                expected = is_lack_of_memory(error) or isinstance(error, NoCopyError)
                if plans and not expected:
                    raise
                found = [None, None, None, None, f"{type(error).__name__}: {error}"]
        *read_by_zero, reason = self._connection.broadcast(found, 0)
        if reason is None:
            return ProfileSamples(*read_by_zero)
        if plans:
            self._say_why_by_bytes(reason)
        else:
            self._say_unchecked(reason)
        return None

    def _say_unchecked(self, reason: str) -> None:
        rank_zero_info(
            f"dlres: training_step could not be tried before training ({reason}): tensors that it "
            "takes from layers by hooks or attributes are not checked."
        )

    def _say_why_by_bytes(self, reason: str) -> None:
        rank_zero_info(
            f"dlres: the layers could not be profiled before training ({reason}); splitting by "
            "parameter bytes instead."
        )

    def _current_context(self) -> AbstractContextManager[Any]:
        return self.step_context()

    def _sum_over_stages(self, value: float) -> float:
        # Added up in one order everywhere, so that all replicas clip by the same bits.
        found = self._connection.gather([value])
        return sum(found[rank][0] for rank in self.plan.replicas[0])


def _names(plan: PipelinePlan) -> tuple[str, ...]:
    return tuple(layer.name for layer in plan.layers)
