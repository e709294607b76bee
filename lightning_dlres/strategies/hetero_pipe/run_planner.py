"""Planner of one run: it reads samples, measures layers, makes the plan and runs a trial step."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_dlres.core.error_places import place_of
from lightning_dlres.core.errors import ConfigError, DlresError, UnsupportedStepError
from lightning_dlres.core.units import format_bytes
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.deferred.values import has_deferred
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.plan.planner import (
    adopt_plan,
    measured_plan,
    unmeasured_layers,
    unmeasured_plan,
)
from lightning_dlres.pipeline.profile.config import ProfileSamples
from lightning_dlres.pipeline.profile.profiler import Profiler, ProfilingError
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, RunProfile
from lightning_dlres.pipeline.stage.initialise import fill_deferred
from lightning_dlres.pipeline.stage.layer_errors import is_lack_of_memory
from lightning_dlres.strategies.connection import Connection
from lightning_dlres.strategies.hetero_pipe.calls.needs_cut import NeedsCutStepError
from lightning_dlres.strategies.hetero_pipe.checks.inspection import inspect_step
from lightning_dlres.strategies.hetero_pipe.data.loader_copy import NoCopyError
from lightning_dlres.strategies.hetero_pipe.data.profile_samples import (
    read_samples,
)
from lightning_dlres.strategies.hetero_pipe.evaluation.evaluated_calls import EvaluatedCalls
from lightning_dlres.strategies.hetero_pipe.options import PipeOptions
from lightning_dlres.strategies.hetero_pipe.profiled_model import gradient_copies, profiled_model
from lightning_dlres.strategies.hetero_pipe.replay.untracked_state import untracked_state_warning
from lightning_dlres.strategies.hetero_pipe.step.cutting import (
    SkippedSamplesError,
    bytes_with_whole_batches,
    cut_on_samples,
    with_inputs,
)
from lightning_dlres.strategies.hetero_pipe.step.module_search import (
    UncutError,
    find_pipelined_module,
    require_layers,
)
from lightning_dlres.strategies.hetero_pipe.step.pipelined_step import TRAINING_STEP
from lightning_dlres.strategies.hetero_pipe.step.step_context import Pipelined, StepContext

T = TypeVar("T")
# Errors after which a plan without measurements serves.
_NO_SAMPLES = (NoCopyError, SkippedSamplesError)


# Why a training step is not cut, without samples or values to run it.
_NO_VALUES = (
    "it must run on the first samples, and the weights or the samples are missing. Use "
    "HeteroPipeStrategy(deferred_init=True) in the place of the meta device."
)
# Modules outside of the layers that are named at the start, the largest ones.
_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Result of planning. The plan is the same on all ranks; the parameters are this rank's.

    Attributes:
        plan: Plan of the run.
        written_in_forward: Parameters that a layer's forward writes to, as found by the trial step;
            empty if no trial step ran.
    """

    plan: PipelinePlan
    written_in_forward: set[nn.Parameter] = field(default_factory=set)


class RunPlanner:
    """Planner of one run. Its methods are called by all ranks.

    Args:
        context: Context of the user's steps.
        options: Options of the strategy.
        connection: Connection to the other ranks.
        optimizers: Optimizers of the run; empty outside of `fit`.
        model_is_whole: True if every rank has the whole model. Otherwise it is deferred, or was
            made on the meta device. Layers are then measured on initialised copies. No trial step
            runs for a model on the meta device, which has no values.
        keeps_placement: True if an earlier run has left each rank with its own stage's parameters
            only. This run then needs the same plan.
    """

    def __init__(
        self,
        *,
        context: StepContext,
        options: PipeOptions,
        connection: Connection,
        optimizers: Sequence[Optimizer],
        model_is_whole: bool,
        keeps_placement: bool,
    ) -> None:
        self._context, self._options, self._connection = context, options, connection
        self._optimizers = optimizers
        self._model_is_whole, self._keeps_placement = model_is_whole, keeps_placement
        # Sentences for messages, or empty: why the pipelined module's own code was not cut, how to
        # cut more of a step, and why the step is cut in the place of a module.
        self._uncut_reason = self._hint = self._refused = ""
        # True once another module is tried in the place of the one that was chosen first.
        self._tries_others = False

    @property
    def _pipelined(self) -> Pipelined:
        return self._context.pipelined

    @property
    def _is_cut(self) -> bool:
        return self._pipelined.captured is not None

    @property
    def _layers(self) -> ModelLayers:
        return self._context.pipelined.layers

    @property
    def _module(self) -> LightningModule:
        return self._context.module

    def plan(self, trainer: Trainer, previous: PipelinePlan | None) -> PlannedRun:
        """Return the plan of the run that the Trainer is about to start.

        Args:
            trainer: Trainer of the run.
            previous: Plan of the strategy's previous run. It is used again for the same layers if
                it was measured, if this run is not `fit`, or if `keeps_placement` is set.

        Raises:
            ConfigError: If no plan fits the model, the ranks or their memory.
            UnsupportedStepError: If the step uses a tensor that a layer made, other than the
                module's output.
        """
        path = self._pipelined.path
        try:
            return self._plan(trainer, previous)
        except NeedsCutStepError as error:
            if not self._may_cut_step:
                raise error.refusal or error from None
            reason, failure = error.reason, error.refusal
        owners = _owners(path)
        others = [TRAINING_STEP, *owners] if failure is None else [*owners, TRAINING_STEP]
        cause: DlresError | None = None
        for other in others:
            name = other if other == TRAINING_STEP else repr(other)
            rank_zero_info(f"dlres: tries to cut {name} in the place of {path!r}. {reason}")
            # Reference cycles of the attempts before may hold graphs, which keep parameters from
            # moving.
            gc.collect()
            self._uncut_reason = self._hint = ""
            self._refused = reason if other == TRAINING_STEP else ""
            self._tries_others = True
            try:
                self._context.pipeline(_found(self._module, other))
                return self._plan(trainer, previous)
            except (UncutError, UnsupportedStepError) as error:
                if failure is None and not isinstance(error, (UncutError, NeedsCutStepError)):
                    raise
                # Without the frames of its traceback, which hold tensors with graphs.
                cause = error.with_traceback(None)
                failure = failure or cause
        assert failure is not None
        raise failure from (None if cause is failure else cause)

    @property
    def _may_cut_step(self) -> bool:
        """True if the step may be cut in the place of a module that the user has not named."""
        options = self._options
        is_chosen = options.module is None and options.given_plan is None
        return is_chosen and self._model_is_whole and not self._pipelined.is_step

    def _plan(self, trainer: Trainer, previous: PipelinePlan | None) -> PlannedRun:
        fitting = trainer.state.fn == TrainerFn.FITTING
        world_size = self._connection.world_size
        will_measure = self._options.given_plan is None and world_size > 1
        is_pipelined = not self._options.is_plain_training(world_size)
        # Layers of a deferred model run one at a time, on copies with values.
        has_values = self._model_is_whole or has_deferred(self._module)
        needs_samples = fitting and is_pipelined and (has_values or will_measure)
        for _, module in self._layers.non_pipelined_modules():
            fill_deferred(module, torch.device("cpu"))
        evaluated = EvaluatedCalls.of_uncut(self._pipelined)
        if is_pipelined and not fitting and evaluated is not None:
            self._context.pipeline(evaluated)
        samples = self._read_samples(trainer) if needs_samples else None
        if samples is not None and has_values:
            samples = self._capture(samples)
        if fitting and is_pipelined and self._pipelined.is_step and not self._is_cut:
            self._require_layers(1, self._uncut_reason or _NO_VALUES)
        plan = self._make_plan(trainer, previous, samples)
        if is_pipelined and fitting:
            self._say_what_is_whole()
        if samples is None or not has_values:
            return PlannedRun(plan=plan)
        # The trial step comes last. The user's hooks may have saved tensors while layers were
        # measured. The trial makes the hooks save new tensors, whose later use is detected.
        return PlannedRun(plan=plan, written_in_forward=self._try_step(samples))

    def _capture(self, samples: ProfileSamples) -> ProfileSamples:
        """Cut the pipelined module into layers, unless it has layers of its own; return the samples
        with the inputs of the first layer.

        A module that cannot be cut stays one layer: replicas of one stage can train it.
        """
        pipelined, reason = self._pipelined, ""
        try:
            pipelined = cut_on_samples(self._context, samples)
        except Exception as error:
            # The module's code may raise anything.
            is_ours = isinstance(error, UnsupportedStepError)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}"
            place = place_of(error)
            reason = f"{text.rstrip('.')}." + (f" It is at {place}." if place else "")
            if "microbatches=1" not in reason and bytes_with_whole_batches(self._context, samples):
                reason += " With microbatches=1 it can be cut."
        if pipelined is self._pipelined and not reason:
            return samples
        # A rank may lack memory for what the others can do.
        self._uncut_reason = self._first_of_ranks(reason) or ""
        if self._uncut_reason:
            return samples
        self._hint = self._hint_for(pipelined, samples)
        self._context.pipeline(pipelined)
        return with_inputs(self._context, samples)

    def _require_layers(self, stages: int, uncut_reason: str) -> None:
        require_layers(self._pipelined, stages, uncut_reason, self._hint, self._refused)

    def _hint_for(self, cut: Pipelined, samples: ProfileSamples) -> str:
        """Return a sentence that says how to cut more of a step that is mostly whole."""
        small = sum(cut.layers.parameter_bytes())
        model = sum(p.numel() * p.element_size() for p in cut.module.parameters())
        if not cut.is_step or 2 * small >= model:
            return ""
        whole = bytes_with_whole_batches(self._context, samples)
        if whole <= small:
            return ""
        return (
            f" With microbatches=1, layers of {format_bytes(whole)} in place of "
            f"{format_bytes(small)} can be cut."
        )

    def _first_of_ranks(self, reason: T | None) -> T | None:
        """Return the first rank's reason that is not empty, on all ranks; None without one."""
        connection = self._connection
        reasons = [
            connection.broadcast(reason if rank == connection.rank else None, rank)
            for rank in range(connection.world_size)
        ]
        return next(filter(None, reasons), None)

    def _say_what_is_whole(self) -> None:
        """Say what all ranks hold because it is outside of the layers, or could not be cut."""
        path, layers = self._pipelined.path, self._layers
        # Samples may be missing for a module that has layers of its own, too.
        if self._uncut_reason and len(layers.modules) == 1:
            size = format_bytes(sum(layers.parameter_bytes()))
            rank_zero_info(f"dlres: {path!r} is one layer of {size}, uncut. {self._uncut_reason}")
        whole: dict[str, int] = {}
        seen: set[nn.Parameter] = set()
        for name, module in layers.non_pipelined_modules():
            own = set(module.parameters(recurse=False)) - seen
            seen |= own
            if own:
                whole[name] = sum(p.numel() * p.element_size() for p in own)
        if whole:
            largest = sorted(whole, key=whole.__getitem__, reverse=True)[:_NAMED]
            named = ", ".join(f"{n or 'the root'} {format_bytes(whole[n])}" for n in largest)
            more = f" and {len(whole) - _NAMED} more" if len(whole) > _NAMED else ""
            rank_zero_info(
                f"dlres: all ranks hold {format_bytes(sum(whole.values()))} of parameters outside "
                f"of the layers of {path!r}: {named}{more}.{self._hint}"
            )

    def _make_plan(
        self, trainer: Trainer, previous: PipelinePlan | None, samples: ProfileSamples | None
    ) -> PipelinePlan:
        world_size, options = self._connection.world_size, self._options
        given = options.adjusted_plan
        if given is not None:
            if self._uncut_reason:
                self._require_layers(given.stages, self._uncut_reason)
            return adopt_plan(given, self._unmeasured_layers(), self._pipelined.path, world_size)
        replicas = options.replicas(world_size)
        same_layers = previous is not None and _layer_names(previous) == self._layers.names
        must_keep_plan = trainer.state.fn != TrainerFn.FITTING or self._keeps_placement
        if previous is not None and same_layers and (previous.is_measured or must_keep_plan):
            return previous
        profile = None
        if samples is not None and world_size > 1:
            stages = options.least_stages(world_size)
            self._require_layers(stages, self._uncut_reason)
            profile = self._profile(trainer, samples)
        if profile is None:
            self._require_layers(len(replicas[0]), self._uncut_reason)
            return unmeasured_plan(self._unmeasured_layers(), replicas)
        return self._search(profile)

    def _unmeasured_layers(self) -> tuple[LayerProfile, ...]:
        return unmeasured_layers(self._layers.names, self._layers.parameter_bytes())

    def _search(self, profile: RunProfile) -> PipelinePlan:
        """Search for the fastest plan on rank 0, and return it on all ranks."""
        connection = self._connection
        plan_or_error: Tree = [None, None]
        if connection.rank == 0:
            try:
                plan = measured_plan(profile, self._options.plan_constraints, rank_zero_warn)
                plan_or_error = [plan.to_json(), None]
            except ConfigError as error:
                plan_or_error = [None, str(error)]
        text, reason = connection.broadcast(plan_or_error, 0)
        if reason is not None:
            raise ConfigError(reason)
        return PipelinePlan.from_json(text)

    def _try_step(self, samples: ProfileSamples) -> set[nn.Parameter]:
        """Run a trial step on samples; return the parameters that a layer's forward writes to.

        Raises:
            UnsupportedStepError: If the step uses a tensor that a layer made, other than the
                module's output, on any rank.
        """
        state_before = self._context.untracked_state()
        inspection = inspect_step(self._context, samples.whole_batch)
        state_warning = untracked_state_warning(state_before.changed(self._context.layer_tensors))
        if state_warning is not None:
            rank_zero_info(state_warning)
        refusal = self._first_of_ranks(inspection.refusal)
        if refusal is not None:
            error = UnsupportedStepError(refusal)
            raise NeedsCutStepError.instead_of(error) if self._may_cut_step else error
        needs_cut = self._first_of_ranks(inspection.needs_cut) if self._may_cut_step else None
        if needs_cut is not None:
            raise NeedsCutStepError.from_tree(needs_cut)
        if inspection.failure is not None:
            _log_untried_step(inspection.failure)
        layer_warning = inspection.warning()
        if layer_warning is not None and samples.microbatches > 1:
            rank_zero_info(layer_warning)
        return inspection.written_parameters

    def _profile(self, trainer: Trainer, samples: ProfileSamples) -> RunProfile | None:
        """Measure the layers, the loss and the links; return None if a rank lacks memory for it."""
        options, connection = self._options, self._connection
        rank, world_size = connection.rank, connection.world_size
        count = len(self._layers.modules)
        rank_zero_info(f"dlres: profiling {count} layers on {world_size} ranks ...")
        profiler = Profiler(
            profiled_model(self._context),
            connection,
            rank_zero_info,
            options.slowdown(rank, world_size) if options.emulate_speed is not None else None,
            options.memory_limit_of(rank, world_size),
            self._context.precision,
        )
        try:
            copies = gradient_copies(trainer, self._module)
            return profiler.run(samples, options.profile, self._optimizers, copies)
        except ProfilingError as error:
            _log_split_by_bytes(str(error))
            return None

    def _read_samples(self, trainer: Trainer) -> ProfileSamples | None:
        """Read samples on rank 0 and return them on all ranks; None if they cannot be read."""
        options = self._options
        will_measure = options.given_plan is None and self._connection.world_size > 1
        read_or_error: Tree = None
        if self._connection.rank == 0:
            try:
                count = options.num_microbatches(self._connection.world_size)
                read = read_samples(trainer, self._context, options.profile, count)
                samples = [read.inputs, read.batches, read.microbatches, read.whole_batch]
                read_or_error = [samples, None, None]
            except Exception as error:
                shown: Exception = error
                needs_cut = None
                if isinstance(error, NeedsCutStepError):
                    shown, needs_cut = error.refusal or error, error.to_tree()
                elif isinstance(error, UnsupportedStepError) and self._tries_others:
                    # All ranks must go on to the next attempt.
                    needs_cut = NeedsCutStepError.instead_of(error).to_tree()
                # A plan without measurements may serve after these errors. Any other error comes
                # from user code, and must be shown unless samples serve only the optional trial.
                is_expected = is_lack_of_memory(error) or isinstance(error, _NO_SAMPLES)
                read_or_error = [None, f"{type(shown).__name__}: {shown}", None]
                if needs_cut is not None and self._may_cut_step:
                    read_or_error = [None, None, needs_cut]
                elif will_measure and not is_expected:
                    raise shown from None
        samples, reason, needs_cut = self._connection.broadcast(read_or_error, 0)
        if needs_cut is not None:
            raise NeedsCutStepError.from_tree(needs_cut)
        if reason is None:
            return ProfileSamples(*samples)
        self._uncut_reason = reason
        if will_measure:
            _log_split_by_bytes(reason)
        else:
            _log_untried_step(reason)
        return None


def _found(root: LightningModule, path: str) -> Pipelined:
    try:
        return find_pipelined_module(root, path)
    except ConfigError as error:
        raise UncutError(str(error)) from error


def _owners(path: str) -> list[str]:
    """Return the names of the modules around a module, the innermost one first."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _log_untried_step(reason: str) -> None:
    rank_zero_info(
        f"dlres: training_step could not be run on a trial batch before training ({reason}), so "
        "dlres cannot check if it uses tensors of layers through hooks or attributes."
    )


def _log_split_by_bytes(reason: str) -> None:
    rank_zero_info(
        f"dlres: the layers could not be profiled before training ({reason}); splitting by "
        "parameter bytes instead."
    )


def _layer_names(plan: PipelinePlan) -> tuple[str, ...]:
    return tuple(layer.name for layer in plan.layers)
