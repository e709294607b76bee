"""Offloader: profiles the first steps of every batch shape, plans them, and follows the plans.

A measured step offloads all saved tensors. It therefore fits in memory if any plan does. Every
batch shape is measured and planned separately.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from math import inf

import msgspec
import torch
from torch import Tensor, nn

from lightning_dlres.core.device.gpu import Gpu, gpu_of
from lightning_dlres.core.device.link_use import LinkUse
from lightning_dlres.core.host.freed_memory import returning_freed_memory
from lightning_dlres.core.units import format_bytes
from lightning_dlres.memory.config import OffloaderConfig
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.bitwise_check import BitwiseCheck
from lightning_dlres.memory.execute.engine import OffloadEngine
from lightning_dlres.memory.measurements import StepMeasurements
from lightning_dlres.memory.module_patches import NO_PATCHES, ModulePatches, without_patches_of
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.plan.plan_policy import PlanPolicy
from lightning_dlres.memory.plan_maker import PlanMaker
from lightning_dlres.memory.profile.layer_record import LayerRecord
from lightning_dlres.memory.profile.links import measure_copy_rate
from lightning_dlres.memory.profile.meter import (
    AllocatorMeter,
    MemoryMeter,
    NullMeter,
    ProfilerMeter,
    ResidentTensors,
)
from lightning_dlres.memory.profile.profiling_policy import ProfilingPolicy
from lightning_dlres.memory.profile.shared_links import shared_links
from lightning_dlres.memory.profile.step_profile import StepProfile, TierLink
from lightning_dlres.memory.shape_steps import Phase, ProfiledPlan, ShapeSteps
from lightning_dlres.memory.tier_set import TierSet

# Largest number of shapes with plans; beyond it the least recently used shape is dropped.
_MAX_SHAPES = 64
# Largest number of steps that verify patches. Modules that have not run by then stay unpatched.
_MAX_VERIFIED_STEPS = 3
# Largest number of steps that are measured again because another thread used the profiler.
_MAX_BUSY_STEPS = 3
# Number of latest steps that are looked at. If more than half were measured, the user is warned.
_WINDOW = 50


class Offloader:
    """Offloader of one model.

    Args:
        root: Model.
        config: Limits and actions.
        device: Device of the model.
        optimizer_bytes: Returns the bytes of optimizer state of a parameter.
        is_compiled: Whether torch.compile has compiled the model. It then hides the modules.
        log: Receives every plan as text, and a line when measuring starts.
        warn: Receives warnings about what the user should change.
        may_profile: Whether torch's profiler is free: it measures memory on the CPU.
        gpu: Streams and counters of the device; None: those of torch, if the device is a GPU.
        link_use: Returns the copies of other engines in a step, with which the plans share the
            link.
        given_plan: Plan that the user gives; the offloader follows it in steps that match it.

    Attributes:
        measurements: Measurements of the steps that followed a plan.
        plan: Latest plan; None before the first one.
        profile: Profile that the latest plan was made from.
    """

    def __init__(
        self,
        root: nn.Module,
        config: OffloaderConfig,
        device: torch.device,
        *,
        optimizer_bytes: Callable[[nn.Parameter], int] = lambda parameter: 0,
        is_compiled: bool = False,
        log: Callable[[str], None] = lambda text: None,
        warn: Callable[[str], None] = lambda text: None,
        may_profile: bool = True,
        gpu: Gpu | None = None,
        link_use: Callable[[], LinkUse] = LinkUse,
        given_plan: MemoryPlan | None = None,
    ) -> None:
        self._root, self._config, self._device = root, config, device
        self._optimizer_bytes, self._is_compiled, self._log = optimizer_bytes, is_compiled, log
        self._may_profile, self._warn, self._given_plan = may_profile, warn, given_plan
        self._gpu, self._link_use = gpu or gpu_of(device), link_use
        self._engine = OffloadEngine(config.min_bytes, device)
        self._tiers = TierSet(config, device, self._gpu)
        self._plan_maker = PlanMaker(config, warn)
        self._shapes: OrderedDict[Hashable, ShapeSteps] = OrderedDict()
        # For each of the latest steps: True if it was measured.
        self._was_measured: deque[bool] = deque(maxlen=_WINDOW)
        self._logged: set[str] = set()
        self._busy_steps = 0
        self._links: tuple[TierLink, ...] | None = None
        # Bytes per second that the device copies within its memory.
        self._copy_rate = inf
        self.measurements = StepMeasurements()
        self.plan: MemoryPlan | None = None
        self.profile: StepProfile | None = None

    def is_idle(self, shape: Hashable) -> bool:
        """Return whether steps of a shape need no `step` around them."""
        steps = self._shapes.get(shape)
        if steps is None or not steps.is_idle:
            return False
        # An idle step counts among the latest steps.
        self._was_measured.append(False)
        return True

    @contextmanager
    def step(
        self, shape: Hashable, exempt: Iterable[Tensor], resident_tensors: ResidentTensors
    ) -> Iterator[None]:
        """Context manager around one training step, with its forward and backward.

        Args:
            shape: Key of the batch shape. Steps with equal keys mostly save the same storages.
            exempt: Tensors that never move: parameters and buffers.
            resident_tensors: Returns all tensors on the device before the step: the exempt ones,
                gradients, optimizer state and the batch.

        Raises:
            ConfigError: If no plan meets the limits; raised after a measured step.
        """
        steps = self._steps_of(shape)
        if steps.is_idle:
            yield
            return
        names = steps.patches.names
        if names and not names <= {name for name, _ in self._root.named_modules()}:
            # The user has replaced modules since the plan was made.
            steps.reset()
        # On the CPU the process has to shrink when a tensor leaves.
        freeing = returning_freed_memory() if self._device.type == "cpu" else nullcontext()
        with freeing, steps.patches.applied(self._root, self._engine, steps.bitwise_check):
            if steps.phase is Phase.FOLLOW and steps.policy is not None:
                self._was_measured.append(False)
                with self._followed(steps, steps.policy, exempt):
                    yield
            else:
                self._note_measured_step()
                with self._profiled(steps, exempt, resident_tensors):
                    yield

    def close(self) -> None:
        """Release the model, and the memory of the tiers except for storages that live graphs still
        hold. No step may follow."""
        self._tiers.close()
        self._shapes.clear()
        self._root = nn.Module()

    def _steps_of(self, shape: Hashable) -> ShapeSteps:
        steps = self._shapes.get(shape)
        if steps is None:
            steps = self._shapes[shape] = ShapeSteps(self._config.profile_steps)
            if self._given_plan is not None:
                self._use_given_plan(steps, self._given_plan)
        self._shapes.move_to_end(shape)
        if len(self._shapes) > _MAX_SHAPES:
            self._shapes.popitem(last=False)
        return steps

    def _use_given_plan(self, steps: ShapeSteps, plan: MemoryPlan) -> None:
        steps.given_plan, steps.patches = plan, ModulePatches(plan.recompute, plan.reuse)
        if steps.patches != NO_PATCHES and self._config.exact:
            steps.verify()
        else:
            self._follow(steps, plan)

    # --- Phase FOLLOW ------------------------------------------------------------------------

    @contextmanager
    def _followed(
        self, steps: ShapeSteps, policy: PlanPolicy, exempt: Iterable[Tensor]
    ) -> Iterator[None]:
        """Context manager around a step that follows the plans."""
        byte_counter, measurements = self._engine.byte_counter, self.measurements
        byte_counter.reset_peak()
        peak_before = self._gpu.peak_allocated() if self._gpu is not None else 0
        start = time.perf_counter()
        with self._engine.hooks(policy, exempt):
            yield
        policy.finish()
        measurements.add(time.perf_counter() - start, byte_counter.peak, policy.mismatch)
        if policy.plan is self.plan:
            measurements.curve = [(at - start, nbytes) for at, nbytes in policy.curve]
        if self._gpu is not None and (peak := self._gpu.peak_allocated()) > peak_before:
            measurements.device_peak = max(measurements.device_peak or 0, peak)
        steps.end_step(policy.mismatch is not None)
        if steps.is_idle:
            plan = steps.plans[-1]
            notes = "".join(f" {note}" for note in plan.notes)
            self._log_once(
                self._log,
                "idle",
                "dlres memory: the plan keeps all saved tensors on the device (peak "
                f"{format_bytes(plan.plain_peak)}), so later steps run without hooks and patches."
                f"{notes}",
            )

    def _follow(self, steps: ShapeSteps, plan: MemoryPlan | None = None) -> None:
        """Add a plan, and follow all plans.

        Args:
            plan: Plan to add; None: add no plan. Without any plan, the policy treats all storages
                as unplanned.
        """
        if plan is not None:
            self._tiers.reserve(plan.tiers)
            self.plan = plan
            steps.follow(plan)
        steps.policy = PlanPolicy(
            steps.plans,
            tiers=self._tiers.slabs,
            copiers=self._tiers.copiers,
            fallback=self._tiers.fallback,
            byte_counter=self._engine.byte_counter,
            gpu=self._gpu,
        )

    # --- Phases PROFILE and VERIFY -----------------------------------------------------------

    @contextmanager
    def _profiled(
        self, steps: ShapeSteps, exempt: Iterable[Tensor], resident_tensors: ResidentTensors
    ) -> Iterator[None]:
        """Context manager around a step that is measured."""
        # A meter slows the step down, so time is measured in steps without one.
        is_timed = steps.phase is not Phase.VERIFY and not steps.lacks_memory_profile
        meter = NullMeter() if is_timed else self._meter()
        compresses = {MemoryAction.COMPRESS, MemoryAction.BOTH} & set(self._config.actions)
        policy = ProfilingPolicy(
            self._tiers.growing,
            meter=meter,
            byte_counter=self._engine.byte_counter,
            layers=None if is_timed or self._is_compiled else self._layer_record(steps),
            gpu=self._gpu,
            measures_codec=not is_timed and bool(compresses),
        )
        with self._engine.hooks(policy, exempt), policy.recording(resident_tensors):
            yield
        if self._links is None:
            self._links = self._tiers.measure_links(policy.usual_bytes)
            if self._config.reuse:
                self._copy_rate = measure_copy_rate(self._device, self._gpu)
        if steps.bitwise_check is not None:
            self._end_verified_step(steps, steps.bitwise_check)
            return
        if meter.was_busy and self._busy_steps < _MAX_BUSY_STEPS:
            # Measure the memory in the next step instead.
            self._busy_steps += 1
            return
        profile = steps.add(policy.profile(self._links, self._copy_rate), not is_timed)
        if profile is not None:
            links = shared_links(profile.links, self._link_use(), sum(profile.seconds))
            self._make_plan(steps, msgspec.structs.replace(profile, links=links))
        if steps.has_measured_enough and not steps.has_stopped_measuring:
            self._stop_measuring(steps)

    def _layer_record(self, steps: ShapeSteps) -> LayerRecord:
        config, may_patch = self._config, steps.unpatched is None and steps.may_patch
        return LayerRecord(
            self._root,
            self._optimizer_bytes,
            config.min_bytes,
            finds_regions=config.recompute and may_patch,
            finds_reuses=config.reuse and may_patch,
        )

    def _meter(self) -> MemoryMeter:
        if self._gpu is not None:
            return AllocatorMeter(self._gpu)
        return ProfilerMeter(self._may_profile)

    def _end_verified_step(self, steps: ShapeSteps, bitwise_check: BitwiseCheck) -> None:
        """Continue with the patches that computed the same bits."""
        names = steps.patches.names
        bitwise_check.steps += 1
        failed = bitwise_check.differing(names)
        unchecked = bitwise_check.unchecked(names)
        if not failed and unchecked and bitwise_check.steps < _MAX_VERIFIED_STEPS:
            # Not every step runs every module: verify the next step, too.
            return
        steps.end_verification()
        failed |= unchecked
        steps.exact |= names - failed
        if steps.given_plan is not None:
            if failed:
                steps.reset()
            else:
                self._follow(steps, steps.given_plan)
        elif failed:
            assert steps.unpatched is not None
            profile, steps.unpatched = steps.unpatched.profile, None
            self._plan_unpatched(steps, without_patches_of(profile, failed))

    def _stop_measuring(self, steps: ShapeSteps) -> None:
        steps.stop_measuring()
        if not steps.plans:
            self._follow(steps)
        treatment = "stay on the device" if not self._config.tiers else "are offloaded, slowly"
        self._log_once(
            self._warn,
            "unstable",
            "dlres memory: steps of one batch shape keep saving different tensors, so no more of "
            f"them are measured. Unplanned tensors {treatment}. Make the steps save "
            "tensors of the same sizes, or remove this callback or plugin.",
        )

    # --- Phase PLAN --------------------------------------------------------------------------

    def _make_plan(self, steps: ShapeSteps, profile: StepProfile) -> None:
        if steps.unpatched is None:
            self._plan_unpatched(steps, profile)
        else:
            better, steps.patches = self._plan_maker.choose_plan(
                steps.unpatched, profile, steps.patches
            )
            self._adopt(steps, better)

    def _plan_unpatched(self, steps: ShapeSteps, profile: StepProfile) -> None:
        """Plan from a profile without patches; measure again if the plan patches modules."""
        config, may_patch = self._config, steps.may_patch and not steps.plans
        plan = self._plan_maker.make(
            profile, recompute=config.recompute and may_patch, reuse=config.reuse and may_patch
        )
        planned, patches = ProfiledPlan(plan, profile), ModulePatches(plan.recompute, plan.reuse)
        if patches == NO_PATCHES:
            steps.patches = patches
            self._adopt(steps, planned)
            return
        # Patched steps differ from unpatched ones in what they save: measure them.
        steps.profile_patched(planned, patches)
        if config.exact and not patches.names <= steps.exact:
            steps.verify()

    def _adopt(self, steps: ShapeSteps, planned: ProfiledPlan) -> None:
        """Follow a plan of the planner, and log it."""
        self.profile = planned.profile
        self._follow(steps, planned.plan)
        if not planned.plan.changes_nothing:
            self._log(planned.plan.table())

    # --- Messages ----------------------------------------------------------------------------

    def _note_measured_step(self) -> None:
        count = self._config.profile_steps
        self._log_once(
            self._log,
            "measuring",
            f"dlres memory: measuring the first {count} steps of every batch shape (and a few more "
            "where modules are patched) with all saved tensors offloaded. They are slower than "
            "later steps.",
        )
        self._was_measured.append(True)
        measured = sum(self._was_measured)
        if len(self._was_measured) == _WINDOW and 2 * measured > _WINDOW:
            self._log_once(
                self._warn,
                "many shapes",
                f"dlres memory: {measured} of the latest {_WINDOW} steps were measured, which is "
                f"slow. {len(self._shapes)} batch shapes were seen so far. Use fewer batch shapes: "
                "pad the batches, or sort samples by length.",
            )

    def _log_once(self, log: Callable[[str], None], key: str, text: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            log(text)
