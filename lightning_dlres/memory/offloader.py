"""Method A's loop for activations: the first steps are measured while everything is away, a plan
is made of them, and the steps after follow it. Steps of another shape are measured and planned
anew."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf

import msgspec
import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.bitwise_check import Audit
from lightning_dlres.memory.execute.copies import Copies, DirectCopies, StreamCopies
from lightning_dlres.memory.execute.engine import SavedTensors
from lightning_dlres.memory.execute.gpu import Gpu, gpu_of
from lightning_dlres.memory.execute.tiers import GrowingTier, SlabTier
from lightning_dlres.memory.module_patches import UNCHANGED, ModulePatches, without
from lightning_dlres.memory.plan.choices import MemoryLimits
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.plan.plan_policy import PlanPolicy
from lightning_dlres.memory.plan.planner import plan_memory, smallest_budget
from lightning_dlres.memory.profile.layer_record import LayerRecord
from lightning_dlres.memory.profile.links import measure_copies, measure_link
from lightning_dlres.memory.profile.meter import AllocatedBytes, Held, Meter, NoBytes, ProfiledBytes
from lightning_dlres.memory.profile.record import ProfilingPolicy
from lightning_dlres.memory.profile.step_profile import StepProfile, TierLink
from lightning_dlres.memory.settings import Settings, TierSettings
from lightning_dlres.memory.shapes import ShapeSteps

# Plans for so many shapes are kept.
_MOST_SHAPES = 64
# So many steps are looked at until all changed modules were seen.
_MOST_AUDITS = 3
# So many steps wait for another thread's step to be counted, before they are taken uncounted.
_MOST_TAKEN = 3
# If more than half of so many steps were measured, the user is told.
_LATEST = 50


@dataclass
class Measured:
    """What planned steps were like.

    Attributes:
        steps: how many there were.
        seconds: of each of the last ones.
        saved_peak: most bytes of data on the device.
        device_peak: most bytes on the device, as far as a step had more there than anything before
            it; None where nothing counts them. The counter is not reset: the user reads it, too.
        unlike: steps that were not like the planned one, with what was unlike.
        curve: of the latest step, seconds since its start and bytes of data on the device.
    """

    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    saved_peak: int = 0
    device_peak: int | None = None
    unlike: list[str] = field(default_factory=list)
    curve: list[tuple[float, int]] = field(default_factory=list)


class Offloader:
    """Keeps what a model's training step saves within limits.

    Args:
        root: the model.
        settings: the limits.
        device: where the model is.
        history: returns the bytes that the optimizer keeps for a parameter.
        is_compiled: whether torch.compile has had its hands on the model: then modules are not
            followed.
        say: is told every plan, as text, and that steps are measured.
        warn: is told what a person should change.
        may_profile: whether torch's profiler is free, which counts bytes on the CPU.
        gpu: the device's streams and counters, if it is a GPU; None: torch's own.
        given: a plan that is followed where steps are like it.
    """

    def __init__(
        self,
        root: nn.Module,
        settings: Settings,
        device: torch.device,
        history: Callable[[nn.Parameter], int] = lambda parameter: 0,
        is_compiled: bool = False,
        say: Callable[[str], None] = lambda text: None,
        may_profile: bool = True,
        gpu: Gpu | None = None,
        warn: Callable[[str], None] = lambda text: None,
        given: MemoryPlan | None = None,
    ) -> None:
        self._root, self._settings, self._device = root, settings, device
        self._history, self._is_compiled, self._say = history, is_compiled, say
        self._may_profile, self._warn, self._given = may_profile, warn, given
        self._gpu = gpu or gpu_of(device)
        self._engine = SavedTensors(settings.min_bytes, device)
        self._shapes: OrderedDict[Hashable, ShapeSteps] = OrderedDict()
        self._latest: deque[bool] = deque(maxlen=_LATEST)
        self._said: set[str] = set()
        self._taken = 0
        self._links: tuple[TierLink, ...] | None = None
        self._rate = inf
        self._tiers: dict[str, SlabTier] = {}
        self._copies = {tier.name: self._copies_for(tier) for tier in settings.tiers}
        self._growing = self._growing_tier()
        self.measured = Measured()
        self.plan: MemoryPlan | None = None
        self.profile: StepProfile | None = None

    def is_idle(self, shape: Hashable) -> bool:
        """Return whether nothing is to be done around a step of this shape."""
        steps = self._shapes.get(shape)
        if steps is None or not steps.is_idle:
            return False
        self._latest.append(False)
        return True

    @contextmanager
    def step(self, shape: Hashable, stays: Iterable[Tensor], held: Held) -> Iterator[None]:
        """Around one training step, forward and backward.

        Args:
            shape: steps of the same shape mostly save the same data.
            stays: tensors that never move: parameters and buffers.
            held: returns all that is on the device before: those, gradients, optimizer state, the
                batch.

        Raises:
            ConfigError: after a measured step: no plan meets the limits.
        """
        steps = self._steps_of(shape)
        if steps.is_idle:
            yield
            return
        wanted = steps.changes.names
        if wanted and not wanted <= {name for name, _ in self._root.named_modules()}:
            # The model has been changed.
            steps.forget()
        with steps.changes.applied(self._root, self._engine, steps.audit):
            if steps.follower is None or steps.is_measuring:
                self._note_measured()
                with self._recorded(steps, stays, held):
                    yield
            else:
                self._latest.append(False)
                with self._followed(steps, steps.follower, stays):
                    yield

    def _steps_of(self, shape: Hashable) -> ShapeSteps:
        steps = self._shapes.get(shape)
        if steps is None:
            steps = self._shapes[shape] = ShapeSteps(self._settings.profile_steps)
            if self._given is not None:
                self._take(steps, self._given)
        self._shapes.move_to_end(shape)
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.popitem(last=False)
        return steps

    def _take(self, steps: ShapeSteps, plan: MemoryPlan) -> None:
        """Follow the plan that the user has given, where steps are like it."""
        steps.given, steps.changes = plan, ModulePatches(plan.recompute, plan.reuse)
        if steps.changes != UNCHANGED and self._settings.exact:
            steps.audit = Audit()
        else:
            self._follow(steps, plan)

    def _note_measured(self) -> None:
        count = self._settings.profile_steps
        self._once(
            self._say,
            "measuring",
            f"dlres memory: the first steps of every batch shape ({count} of them, and some more "
            "where modules are changed) are measured with all saved tensors moved away. They are "
            "slower than those that follow.",
        )
        self._latest.append(True)
        measured = sum(self._latest)
        if len(self._latest) == _LATEST and 2 * measured > _LATEST:
            self._once(
                self._warn,
                "endless",
                f"dlres memory: {measured} of the latest {_LATEST} steps were measured, which is "
                f"slow: {len(self._shapes)} batch shapes are known by now. Give batches fewer "
                "shapes: pad them, or sort samples by length.",
            )

    def _once(self, tell: Callable[[str], None], key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            tell(text)

    @contextmanager
    def _followed(
        self, steps: ShapeSteps, follower: PlanPolicy, stays: Iterable[Tensor]
    ) -> Iterator[None]:
        ledger, measured = self._engine.ledger, self.measured
        ledger.start_peak()
        before = self._gpu.most_allocated() if self._gpu is not None else 0
        began = time.perf_counter()
        with self._engine.hooks(follower, stays):
            yield
        follower.finish()
        measured.steps += 1
        measured.seconds.append(time.perf_counter() - began)
        del measured.seconds[:-1000]
        if follower.plan is self.plan:
            measured.curve = [(when - began, nbytes) for when, nbytes in follower.seen]
        measured.saved_peak = max(measured.saved_peak, ledger.peak)
        if self._gpu is not None and (peak := self._gpu.most_allocated()) > before:
            measured.device_peak = max(measured.device_peak or 0, peak)
        if follower.unlike is not None:
            measured.unlike.append(follower.unlike)
            del measured.unlike[:-100]
        steps.end_step(follower.unlike is not None)
        if steps.is_idle:
            plan = steps.plans[-1]
            notes = "".join(f" {note}" for note in plan.notes)
            self._once(
                self._say,
                "nothing",
                f"dlres memory: the plan keeps everything (peak {format_bytes(plan.plain_peak)}): "
                f"nothing is moved, and nothing is installed from now on.{notes}",
            )

    @contextmanager
    def _recorded(self, steps: ShapeSteps, stays: Iterable[Tensor], held: Held) -> Iterator[None]:
        # Counting takes time: what a step takes is measured without.
        for_time = steps.audit is None and not steps.lacks_memory
        layers = None
        if not self._is_compiled and not for_time:
            is_first, settings = steps.first is None, self._settings
            may_change = is_first and not steps.is_fixed
            layers = LayerRecord(
                self._root,
                self._history,
                settings.min_bytes,
                settings.recompute and may_change,
                settings.reuse and may_change,
            )
        meter = NoBytes() if for_time else self._meter()
        recorder = ProfilingPolicy(
            self._growing,
            meter,
            self._engine.ledger,
            layers,
            self._gpu,
            not for_time
            and any(
                a in self._settings.actions for a in (MemoryAction.COMPRESS, MemoryAction.BOTH)
            ),
        )
        with self._engine.hooks(recorder, stays), recorder.recording(held):
            yield
        if self._links is None:
            self._links = self._measured_links(recorder.usual_bytes)
            if self._settings.reuse:
                self._rate = measure_copies(self._device, self._gpu)
        if steps.audit is not None:
            self._judge(steps, steps.audit)
            return
        if meter.was_taken and self._taken < _MOST_TAKEN:
            # Memory is counted in the next step.
            self._taken += 1
            return
        profile = steps.add(recorder.profile(self._links, self._rate), not for_time)
        if profile is not None:
            self._make_plan(steps, profile)
        if steps.is_endless and not steps.has_given_up:
            steps.stop_measuring()
            if not steps.plans:
                self._follow(steps)
            where = "stay on the device" if not self._settings.tiers else "are moved away, slowly"
            self._once(
                self._warn,
                "unlike",
                "dlres memory: steps of one batch shape go on saving something else, so that no "
                f"more of them are measured: tensors that no plan knows {where}. Make the "
                "steps save tensors of the same sizes, or leave this callback or plugin out.",
            )

    def _make_plan(self, steps: ShapeSteps, profile: StepProfile) -> None:
        if steps.first is None:
            self._begin(steps, profile)
        else:
            self._finish(steps, *self._better(steps, steps.first, profile))

    def _begin(self, steps: ShapeSteps, profile: StepProfile) -> None:
        """Make a plan of a step without changes."""
        settings, may_change = self._settings, not steps.is_fixed and not steps.plans
        plan = self._plan(profile, settings.recompute and may_change, settings.reuse and may_change)
        steps.changes = ModulePatches(plan.recompute, plan.reuse)
        if steps.changes == UNCHANGED:
            self._finish(steps, plan, profile)
            return
        # Steps with changed modules are unlike those without: measured, not guessed.
        steps.first = plan, profile
        steps.restart()
        if settings.exact and not steps.changes.names <= steps.exact:
            steps.audit = Audit()

    def _judge(self, steps: ShapeSteps, audit: Audit) -> None:
        """Go on with the changes that are exact."""
        names, audit.steps = steps.changes.names, audit.steps + 1
        failed = audit.unlike(names)
        if not failed and audit.unseen(names) and audit.steps < _MOST_AUDITS:
            # Not every step runs every module.
            return
        steps.audit = None
        failed |= audit.unseen(names)
        steps.exact |= names - failed
        if steps.given is not None:
            if failed:
                steps.forget()
            else:
                self._follow(steps, steps.given)
        elif failed:
            assert steps.first is not None
            profile, steps.first = steps.first[1], None
            self._begin(steps, without(profile, failed))

    def _finish(self, steps: ShapeSteps, plan: MemoryPlan, profile: StepProfile) -> None:
        """Follow a plan from now on."""
        self.profile = profile
        self._follow(steps, plan)
        if not plan.changes_nothing:
            self._say(plan.table())

    def _follow(self, steps: ShapeSteps, plan: MemoryPlan | None = None) -> None:
        """Follow one more plan; None: nothing is planned."""
        settings = self._settings
        if plan is not None:
            for spec in settings.tiers:
                size = plan.tiers.get(spec.name, 0)
                known = self._tiers.get(spec.name)
                if size and (known is None or known.nbytes < size):
                    self._tiers[spec.name] = SlabTier(size, spec.directory, self._is_pinned(spec))
            self.plan = plan
            steps.plan_for(plan)
        fallback = self._growing if settings.tiers else None
        steps.follower = PlanPolicy(
            steps.plans, self._tiers, self._copies, fallback, self._engine.ledger, self._gpu
        )

    def _better(
        self, steps: ShapeSteps, first: tuple[MemoryPlan, StepProfile], profile: StepProfile
    ) -> tuple[MemoryPlan, StepProfile]:
        """Return the better plan, with its profile: that with changed modules, now that such steps
        were measured, or one without."""
        found: list[tuple[MemoryPlan, StepProfile, ModulePatches]] = []
        refusal: ConfigError | None = None
        for known, changes in ((profile, steps.changes), (first[1], UNCHANGED)):
            try:
                found.append((self._plan(known, False, False, first[0]), known, changes))
            except ConfigError as error:
                refusal = refusal or error
        if not found:
            assert refusal is not None
            raise refusal
        is_min = self._settings.device_limit == "min"
        plan, own, steps.changes = min(
            found, key=lambda f: (f[0].peak if is_min else 0, f[0].seconds)
        )
        before = first[0]
        plan = msgspec.structs.replace(
            plan,
            recompute=steps.changes.recompute,
            reuse=steps.changes.reuse,
            plain_seconds=before.plain_seconds,
            plain_peak=before.plain_peak,
            plain_saved_peak=before.plain_saved_peak,
        )
        return plan, own

    def _plan(
        self,
        profile: StepProfile,
        recompute: bool,
        reuse: bool,
        first: MemoryPlan | None = None,
    ) -> MemoryPlan:
        actions = self._settings.actions
        try:
            limits = self._limits(profile, recompute, reuse, first)
            return plan_memory(profile, limits, actions, recompute, reuse)
        except ConfigError as error:
            if self._settings.on_over_budget == "error":
                raise
            self._warn(f"{error} Training goes on with the smallest that can be met.")
        limits = MemoryLimits(tiers={tier.name: tier.limit for tier in self._settings.tiers})
        limits = replace(limits, device=smallest_budget(profile, limits, actions, recompute, reuse))
        return plan_memory(profile, limits, actions, recompute, reuse)

    def close(self) -> None:
        """Give up the memory of the tiers. What graphs still hold there stays for as long."""
        for copies in self._copies.values():
            copies.finish()
        self._tiers.clear()
        self._shapes.clear()

    def _limits(
        self,
        profile: StepProfile,
        recompute: bool,
        reuse: bool,
        first_plan: MemoryPlan | None,
    ) -> MemoryLimits:
        settings = self._settings
        saved = settings.saved_limit
        if saved <= 1:
            plain = first_plan.plain_saved_peak if first_plan else profile.saved_bytes
            saved = int(saved * plain)
        tiers = {tier.name: tier.limit for tier in settings.tiers}
        limits = MemoryLimits(device=inf, saved=saved, tiers=tiers)
        device = settings.device_limit
        if isinstance(device, str):
            device = smallest_budget(profile, limits, settings.actions, recompute, reuse)
        return replace(limits, device=device)

    def _measured_links(self, nbytes: int) -> tuple[TierLink, ...]:
        return tuple(
            measure_link(
                spec.name,
                self._copies[spec.name],
                self._device,
                spec.directory,
                self._is_pinned(spec),
                nbytes,
                self._gpu,
            )
            for spec in self._settings.tiers
        )

    def _meter(self) -> Meter:
        if self._gpu is not None:
            return AllocatedBytes(self._gpu)
        return ProfiledBytes(self._may_profile)

    def _copies_for(self, tier: TierSettings) -> Copies:
        if self._gpu is not None and self._is_pinned(tier):
            return StreamCopies(self._gpu)
        return DirectCopies()

    def _is_pinned(self, tier: TierSettings) -> bool:
        return self._gpu is not None and tier.directory is None

    def _growing_tier(self) -> GrowingTier:
        # Where there is room for everything: the last tier, if it is a disk.
        tiers: Sequence[TierSettings] = self._settings.tiers
        directory = tiers[-1].directory if tiers else None
        return GrowingTier(directory)
