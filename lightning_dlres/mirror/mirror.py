"""Mirror of a model: host memory for all that training keeps, and a window of it on the device."""

from __future__ import annotations

import operator
import os
import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dlres.core._compat import storage_owner_count
from lightning_dlres.core.device.clock import clock_of
from lightning_dlres.core.device.copiers import StreamCopier
from lightning_dlres.core.device.gpu import Gpu, gpu_of
from lightning_dlres.core.device.link_use import LinkUse
from lightning_dlres.core.saved_tensors import claiming
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.mirror.config import AUTO, LAYERWISE, MirrorConfig
from lightning_dlres.mirror.execute.fetching import Fetcher, StreamFetcher, ThreadFetcher
from lightning_dlres.mirror.execute.gpu_gradients import GpuGradientHooks
from lightning_dlres.mirror.execute.gradients import GradientHooks, MovedGradients, free_alias
from lightning_dlres.mirror.execute.module_hooks import hook_modules
from lightning_dlres.mirror.execute.optimizer_history import HistoryInMirror
from lightning_dlres.mirror.execute.parameter_reads import data_reads, parameter_reads
from lightning_dlres.mirror.execute.places import MirrorPlaces
from lightning_dlres.mirror.execute.policies import PlannedWindow, ProfiledWindow
from lightning_dlres.mirror.execute.region import new_tensor
from lightning_dlres.mirror.execute.saved_tensors import ParameterHooks
from lightning_dlres.mirror.execute.streaming import ParameterStreaming
from lightning_dlres.mirror.execute.update_thread import UpdateThread
from lightning_dlres.mirror.execute.window import Window
from lightning_dlres.mirror.plan.window_plan import WindowPlan, choose_window, plan_window
from lightning_dlres.mirror.profile.history import (
    is_per_parameter,
    planned_history,
    refuse_wrong_kernels,
)
from lightning_dlres.mirror.profile.step_profile import FetchCost, MirrorProfile
from lightning_dlres.mirror.profile.units import find_units, units_by_module

# Speed of copies if none was measured, in bytes per second.
_UNMEASURED_SPEED = 1e9


class Mirror:
    """Mirror of one model.

    All parameters, gradients and optimizer histories move to one region of host memory. The
    parameters of a layer are on the device only around its use.

    Args:
        model: The model.
        optimizers: Optimizers of its parameters; none for evaluation.
        config: Options.
        device: Device that computes.
        gpu: GPU of the device; None: torch's GPU, if the device is one.
        has_gradients: False leaves out the places of gradients, for evaluation.

    Attributes:
        units: Units of the model.
        table: Table of the region.
        aliased: Names of the parameters whose former memory other tensors use, too. Those tensors
            do not see updates any more.
        window: Copies on the device.
        is_open: False once it was closed.
        profile: Profile of the latest measured training step; None before it.
        plan: Latest plan of a training step; None before it.
        step_seconds: Measured forward and backward of each training step that followed a plan.

    Raises:
        ConfigError: If a parameter cannot be moved, the disk has too little space, or an optimizer
            has a fused kernel that is wrong on the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        config: MirrorConfig,
        device: torch.device,
        gpu: Gpu | None = None,
        *,
        has_gradients: bool = True,
    ) -> None:
        for optimizer in optimizers:
            refuse_wrong_kernels(optimizer)
        self._model, self._config, self._optimizers = model, config, tuple(optimizers)
        gpu = gpu_of(device) if gpu is None else gpu
        self.units = find_units(model)
        histories = [planned_history(optimizer) for optimizer in optimizers]
        directory = config.directory()
        places = MirrorPlaces(
            self.units,
            histories,
            directory=directory,
            pinned=gpu is not None and directory is None,
            has_gradients=has_gradients,
        )
        self.table = places.table
        self.aliased: list[str] = []
        self._move_parameters(places)
        copier = None if gpu is None else StreamCopier(gpu, timed=True)
        fetcher: Fetcher = ThreadFetcher() if copier is None else StreamFetcher(copier)
        self.window = Window(
            self.units,
            places.unit_memories,
            fetcher,
            device,
            limit=config.limit(),
            clock=clock_of(gpu),
            next_use=lambda unit: self._policy.next_use(unit),
        )
        self._policy: ProfiledWindow | PlannedWindow = ProfiledWindow(self.window)
        self._on_gpu = gpu is not None
        self._streaming = ParameterStreaming(
            self.units, places.values, self.window, self._policy, changes_device=self._on_gpu
        )
        needed = units_by_module(model, self.units)
        self._handles = hook_modules(needed, self._streaming)
        # Of layers that are unfrozen later, only files are worth an allocation of their own.
        makes_places = has_gradients and directory is not None
        make_place = partial(new_tensor, directory=directory) if makes_places else None
        self._gradients = self._gradient_hooks(places.gradients, make_place, copier)
        # Before the hooks of others, which then see the gradients in their places.
        self._gradients.attach(model.parameters())
        self._updates = UpdateThread(self._update)
        self._histories = [
            HistoryInMirror(
                optimizer,
                self.units,
                history,
                wants_fused=config.fused,
                before_step=self._prepare_update,
                directory=directory,
            )
            for optimizer, history in zip(optimizers, places.histories, strict=True)
        ]
        self._saved_tensors = ParameterHooks()
        # Plans by the key of a step, and the number of steps that were measured.
        self._plans: dict[Hashable, WindowPlan] = {}
        self._measured: dict[Hashable, int] = {}
        self.is_open = True
        self._has_idle_processor = False
        self.profile: MirrorProfile | None = None
        self.plan: WindowPlan | None = None
        self.step_seconds: list[float] = []

    @contextmanager
    def step(
        self, key: Hashable, *, is_training: bool = True, is_free: bool = False
    ) -> Iterator[None]:
        """Context manager for one step: forward, and backward where there is one.

        Hooks on saved tensors of other engines may be inside, if they ask `claimed` first.

        Args:
            key: Steps with equal keys should use the units in the same order.
            is_training: True if `plan` and `profile` should be those of this step.
            is_free: True if no other code needs the gradients of this step between backward and
                the update, and the update follows. Units are then updated in backward.
        """
        self._streaming.start()
        plan = self._plans.get(key)
        self.window.limit = self._config.limit() if plan is None else self._limit_of(plan)
        self._policy = (
            ProfiledWindow(self.window) if plan is None else PlannedWindow(self.window, plan)
        )
        self._streaming.observer = self._policy
        self.window.forget_times()
        is_layerwise = is_free and plan is not None and self.may_be_layerwise
        self._gradients.is_layerwise = self._streaming.forbids_late_uses = is_layerwise
        num_processors = len(os.sched_getaffinity(0))
        self._has_idle_processor = self._on_gpu or torch.get_num_threads() < num_processors
        self._gradients.attach(self._model.parameters())
        for history in self._histories:
            history.come_last()
        with ExitStack() as stack:
            stack.enter_context(claiming(self._streaming))
            stack.enter_context(data_reads(self._streaming.expose))
            if self._on_gpu:
                stack.enter_context(parameter_reads(self._streaming.borrow))
            elif self._config.update == LAYERWISE:
                stack.enter_context(parameter_reads(self._streaming.note_read))
            stack.enter_context(self._saved_tensors.hooks(self._model.parameters()))
            try:
                yield
            finally:
                try:
                    self._prepare_update()
                finally:
                    self._streaming.end_calls()
        self._learn(key, plan, is_training)

    def is_of(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
        """Return True if this mirror is open, and that of a model with these optimizers.

        Other code may have given the model other parameters.
        """
        if not all(parameter in self._streaming.unit_of for parameter in model.parameters()):
            return False
        is_same = len(optimizers) == len(self._optimizers) and all(
            map(operator.is_, optimizers, self._optimizers)
        )
        return self.is_open and model is self._model and is_same

    @property
    def may_be_layerwise(self) -> bool:
        """True if the optimizer and the model allow an update amid backward."""
        return (
            len(self._optimizers) == 1
            and is_per_parameter(self._optimizers[0])
            and not self._streaming.late_uses
        )

    def close(self) -> None:
        """Remove all hooks. Parameters, gradients and history stay in the mirror."""
        if not self.is_open:
            return
        self.is_open = False
        for handle in self._handles:
            handle.remove()
        self._streaming.return_borrowed()
        self._gradients.close()
        for history in self._histories:
            history.close()
        # The report of a closed mirror may be kept for long, but its optimizers need not.
        self._histories, self._optimizers = [], ()
        self.window.close()
        self._updates.close()

    def link_use(self) -> LinkUse:
        """Return the copies of a training step: its planned fetches, and all gradients.

        Before the first plan, the fetches are those of the latest step.
        """
        plan = self.plan
        fetched = sum(n for n, _ in self.window.fetches) if plan is None else plan.fetched_bytes
        return LinkUse(to_device=fetched, from_device=self.table.bytes_of("gradient"))

    def summary(self) -> str:
        """Return one line with the plan and the measurements."""
        line = (
            f"dlres mirror: {format_bytes(self.table.nbytes)} in host memory; parameters on the "
            f"device at most {format_bytes(self.window.peak_bytes)} of "
            f"{format_bytes(self.table.bytes_of('parameter'))}"
        )
        if self.plan is None or not self.step_seconds:
            return line + "; no step followed a plan."
        return (
            f"{line}, {format_bytes(self.plan.peak_bytes)} planned; forward and backward "
            f"{format_seconds(statistics.median(self.step_seconds))}, "
            f"{format_seconds(self.plan.seconds)} planned."
        )

    def report(self) -> str:
        """Return the summary, and the tables of the region and of the plan, as Markdown."""
        tables = [self.table.table()]
        if self.plan is not None:
            tables.append(self.plan.table())
        blocks = "\n\n".join(f"```\n{table}\n```" for table in tables)
        return f"{self.summary()}\n\n{blocks}"

    def _learn(self, key: Hashable, plan: WindowPlan | None, is_training: bool) -> None:
        """Make a plan from the step that has ended, if there is none that fits it."""
        record = self._policy.record
        self.window.drop_all()
        if isinstance(self._policy, PlannedWindow):
            assert plan is not None
            if len(record.events) == len(plan.events) and self._policy.is_followed:
                if is_training:
                    self.step_seconds.append(record.seconds())
            else:
                # The order has changed: measure again.
                del self._plans[key]
                self._measured[key] = 0
            return
        self._measured[key] = self._measured.get(key, 0) + 1
        if self._measured[key] < self._config.profile_steps or not record.events:
            return
        profile = MirrorProfile(
            nbytes=tuple(unit.nbytes for unit in self.units),
            events=tuple(record.events),
            gaps=record.gaps(),
            fetch=fetch_cost([(n, copy.seconds()) for n, copy in self.window.fetches]),
        )
        is_auto = self._config.window == AUTO
        plan = choose_window(profile) if is_auto else plan_window(profile, self._config.limit())
        self._plans[key] = plan
        if is_training:
            self.profile, self.plan = profile, plan

    def _gradient_hooks(
        self,
        places: dict[nn.Parameter, Tensor],
        make_place: Callable[[nn.Parameter], Tensor] | None,
        copier: StreamCopier | None,
    ) -> MovedGradients:
        arrived = self._streaming.gradient_arrived
        if copier is None:
            return GradientHooks(places, make_place, arrived, self._start_update)
        return GpuGradientHooks(
            places,
            make_place,
            copier,
            device=self.window.device,
            limit=max((unit.nbytes for unit in self.units), default=0),
            arrived=arrived,
            update=self._start_update,
            ended=self._streaming.return_borrowed,
        )

    def _prepare_update(self) -> None:
        """Wait for updates and gradients on their way; all parameters are in the mirror then."""
        try:
            self._updates.wait()
        finally:
            self._gradients.settle()
            self._streaming.return_borrowed()

    def _start_update(self, unit: int) -> None:
        """Update a unit whose gradients are complete, beside backward if a processor is idle."""
        if self._has_idle_processor:
            self._updates.start(unit)
        else:
            self._update(unit)

    def _update(self, unit: int) -> None:
        self._gradients.settle(self.units[unit].parameters)
        for history in self._histories:
            history.update(self.units[unit].parameters)

    def _limit_of(self, plan: WindowPlan) -> float:
        """Return the limit under which a plan is followed."""
        return plan.peak_bytes if self._config.window == AUTO else self._config.limit()

    def _move_parameters(self, places: MirrorPlaces) -> None:
        """Move the parameters, and gradients that exist, to their places."""
        for unit, values in zip(self.units, places.values, strict=True):
            for name, parameter, value in zip(unit.names, unit.parameters, values, strict=True):
                # No variable may hold the storage while its owners are counted.
                may_be_shared = parameter.untyped_storage().resizable()
                if may_be_shared and storage_owner_count(parameter) > 1:
                    self.aliased.append(name)
                value.copy_(parameter.detach())
                gradient, place = parameter.grad, places.gradients.get(parameter)
                parameter.grad = None
                parameter.data = value
                if gradient is not None and place is not None and gradient.dtype == place.dtype:
                    alias = free_alias(place)
                    assert alias is not None, "nothing has used the place before"
                    gradient = alias.copy_(gradient)
                parameter.grad = gradient


def fetch_cost(times: Sequence[tuple[int, float]]) -> FetchCost:
    """Return the cost of copies from measured ones, each as bytes and seconds.

    It is the line whose relative errors have the smallest squares. If all copies have one size, or
    noise makes a cost negative, there is no fixed time: every byte costs the same.
    """
    times = [(n, s) for n, s in times if n and s > 0]
    if not times:
        return FetchCost(fixed_seconds=0.0, bytes_per_second=_UNMEASURED_SPEED)
    sizes, seconds = np.array(times, np.float64).T
    if np.ptp(sizes):
        slope, fixed = np.polyfit(sizes, seconds, 1, w=1 / seconds)
        if slope > 0 and fixed >= 0:
            return FetchCost(fixed_seconds=float(fixed), bytes_per_second=float(1 / slope))
    return FetchCost(fixed_seconds=0.0, bytes_per_second=float(sizes.sum() / seconds.sum()))
