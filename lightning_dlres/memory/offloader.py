"""Method A's loop for activations: the first steps are measured while everything is away, a plan
is made of them, and the steps after follow it. Steps of another shape are measured and planned
anew."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf

import msgspec
import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.memory.actions import Action
from lightning_dlres.memory.audit import Audit
from lightning_dlres.memory.changes import UNCHANGED, Changes, without
from lightning_dlres.memory.choices import Limits
from lightning_dlres.memory.copies import Copies, DirectCopies, StreamCopies
from lightning_dlres.memory.engine import SavedTensors
from lightning_dlres.memory.follow import Follower
from lightning_dlres.memory.gpu import Gpu, gpu_of
from lightning_dlres.memory.layer_record import LayerRecord
from lightning_dlres.memory.links import measure_copies, measure_link
from lightning_dlres.memory.meter import AllocatedBytes, Held, Meter, NoBytes, ProfiledBytes
from lightning_dlres.memory.plan import MemoryPlan
from lightning_dlres.memory.planner import plan_memory, smallest_budget
from lightning_dlres.memory.profile import Link, StepProfile
from lightning_dlres.memory.record import Recorder
from lightning_dlres.memory.settings import Settings, TierSettings
from lightning_dlres.memory.tiers import GrowingTier, SlabTier

# Plans for so many shapes are kept.
_MOST_PLANS = 64
# So many times steps of one shape may be unlike each other before they are taken as they are.
_PATIENCE = 3
# So many steps are looked at until all changed modules were seen.
_MOST_AUDITS = 3


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


@dataclass
class _Kind:
    """Steps of one shape."""

    profiles: list[StepProfile] = field(default_factory=list)
    failures: int = 0
    changes: Changes = UNCHANGED
    first: tuple[MemoryPlan, StepProfile] | None = None
    # Looks at the changes in the step to come; those that it has found exact.
    audit: Audit | None = None
    exact: set[str] = field(default_factory=set)
    plan: MemoryPlan | None = None
    follower: Follower | None = None

    def forget(self) -> None:
        """Begin anew."""
        self.profiles.clear()
        self.changes, self.first, self.follower, self.failures = UNCHANGED, None, None, 0
        self.audit = None
        # By now other modules may have these names.
        self.exact.clear()


class Offloader:
    """Keeps what a model's training step saves within limits.

    Args:
        root: the model.
        settings: the limits.
        device: where the model is.
        history: returns the bytes that the optimizer keeps for a parameter.
        is_compiled: whether torch.compile has had its hands on the model: then modules are not
            followed.
        say: is told every plan, as text.
        may_profile: whether torch's profiler is free, which counts bytes on the CPU.
        gpu: the device's streams and counters, if it is a GPU; None: torch's own.
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
    ) -> None:
        self._root, self._settings, self._device = root, settings, device
        self._history, self._is_compiled, self._say = history, is_compiled, say
        self._may_profile = may_profile
        self._gpu = gpu or gpu_of(device)
        self._engine = SavedTensors(settings.min_bytes, device)
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._links: tuple[Link, ...] | None = None
        self._rate = inf
        self._tiers: dict[str, SlabTier] = {}
        self._copies = {tier.name: self._copies_for(tier) for tier in settings.tiers}
        self._growing = self._growing_tier()
        self.measured = Measured()
        self.plan: MemoryPlan | None = None
        self.profile: StepProfile | None = None

    @contextmanager
    def step(self, shape: Hashable, stays: Iterable[Tensor], held: Held) -> Iterator[None]:
        """Around one training step, forward and backward.

        Args:
            shape: steps of the same shape save the same data.
            stays: tensors that never move: parameters and buffers.
            held: returns all that is on the device before: those, gradients, optimizer state, the
                batch.

        Raises:
            ConfigError: after a measured step: no plan meets the limits.
        """
        kind = self._kinds.setdefault(shape, _Kind())
        self._kinds.move_to_end(shape)
        if len(self._kinds) > _MOST_PLANS:
            self._kinds.popitem(last=False)
        wanted = kind.changes.names
        if wanted and not wanted <= {name for name, _ in self._root.named_modules()}:
            # The model has been changed.
            kind.forget()
        with kind.changes.made(self._root, self._engine, kind.audit):
            if kind.follower is None:
                with self._recorded(kind, stays, held):
                    yield
            else:
                with self._followed(kind, kind.follower, stays):
                    yield

    @contextmanager
    def _followed(self, kind: _Kind, follower: Follower, stays: Iterable[Tensor]) -> Iterator[None]:
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
        if kind.plan is self.plan:
            measured.curve = [(when - began, nbytes) for when, nbytes in follower.seen]
        measured.saved_peak = max(measured.saved_peak, ledger.peak)
        if self._gpu is not None and (peak := self._gpu.most_allocated()) > before:
            measured.device_peak = max(measured.device_peak or 0, peak)
        if follower.unlike is not None:
            # What it was planned for does not come any more: it is measured again.
            measured.unlike.append(follower.unlike)
            del measured.unlike[:-100]
            kind.forget()

    @contextmanager
    def _recorded(self, kind: _Kind, stays: Iterable[Tensor], held: Held) -> Iterator[None]:
        # Counting takes time: what a step takes is measured without.
        for_time = bool(kind.profiles)
        layers = None
        if not self._is_compiled and not for_time:
            is_first, settings = kind.first is None, self._settings
            layers = LayerRecord(
                self._root,
                self._history,
                settings.min_bytes,
                settings.recompute and is_first,
                settings.reuse and is_first,
            )
        recorder = Recorder(
            self._growing,
            NoBytes() if for_time else self._meter(),
            self._engine.ledger,
            layers,
            self._gpu,
            not for_time
            and any(a in self._settings.actions for a in (Action.COMPRESS, Action.BOTH)),
        )
        with self._engine.hooks(recorder, stays), recorder.recording(held):
            yield
        if self._links is None:
            self._links = self._measured_links(recorder.usual_bytes)
            if self._settings.reuse:
                self._rate = measure_copies(self._device, self._gpu)
        if kind.audit is not None:
            self._judge(kind, kind.audit)
            return
        profile = recorder.profile(self._links, self._rate)
        if for_time and _shape(profile) != _shape(kind.profiles[0]) and kind.failures < _PATIENCE:
            # Not the steps to plan for: the first ones may be unlike all others.
            kind.profiles.clear()
            kind.failures += 1
            return
        kind.profiles.append(profile)
        if len(kind.profiles) >= self._settings.profile_steps:
            self._make_plan(kind)

    def _make_plan(self, kind: _Kind) -> None:
        profile = _timed(kind.profiles)
        kind.profiles.clear()
        if kind.first is None:
            self._begin(kind, profile)
        else:
            self._finish(kind, *self._better(kind, kind.first, profile))

    def _begin(self, kind: _Kind, profile: StepProfile) -> None:
        """Make a plan of a step without changes."""
        plan = self._plan(profile, self._settings.recompute, self._settings.reuse)
        kind.changes = Changes(plan.recompute, plan.reuse)
        if kind.changes == UNCHANGED:
            self._finish(kind, plan, profile)
            return
        # Steps with changed modules are unlike those without: measured, not guessed.
        kind.first = plan, profile
        if self._settings.exact and not kind.changes.names <= kind.exact:
            kind.audit = Audit()

    def _judge(self, kind: _Kind, audit: Audit) -> None:
        """Go on with the changes that are exact."""
        names, audit.steps = kind.changes.names, audit.steps + 1
        failed = audit.unlike(names)
        if not failed and audit.unseen(names) and audit.steps < _MOST_AUDITS:
            # Not every step runs every module.
            return
        kind.audit = None
        failed |= audit.unseen(names)
        kind.exact |= names - failed
        if failed:
            assert kind.first is not None
            profile, kind.first = kind.first[1], None
            self._begin(kind, without(profile, failed))

    def _finish(self, kind: _Kind, plan: MemoryPlan, profile: StepProfile) -> None:
        """Follow a plan from now on."""
        settings = self._settings
        for spec in settings.tiers:
            size = plan.tiers.get(spec.name, 0)
            known = self._tiers.get(spec.name)
            if size and (known is None or known.nbytes < size):
                self._tiers[spec.name] = SlabTier(size, spec.directory, self._is_pinned(spec))
        kind.plan = self.plan = plan
        self.profile = profile
        fallback = self._growing if settings.tiers else None
        kind.follower = Follower(
            plan, self._tiers, self._copies, fallback, self._engine.ledger, self._gpu
        )
        self._say(plan.table())

    def _better(
        self, kind: _Kind, first: tuple[MemoryPlan, StepProfile], profile: StepProfile
    ) -> tuple[MemoryPlan, StepProfile]:
        """Return the better plan, with its profile: that with changed modules, now that such steps
        were measured, or one without."""
        found: list[tuple[MemoryPlan, StepProfile, Changes]] = []
        refusal: ConfigError | None = None
        for known, changes in ((profile, kind.changes), (first[1], UNCHANGED)):
            try:
                found.append((self._plan(known, False, False, first[0]), known, changes))
            except ConfigError as error:
                refusal = refusal or error
        if not found:
            assert refusal is not None
            raise refusal
        is_min = self._settings.device_limit == "min"
        plan, own, kind.changes = min(
            found, key=lambda f: (f[0].peak if is_min else 0, f[0].seconds)
        )
        before = first[0]
        plan = msgspec.structs.replace(
            plan,
            recompute=kind.changes.again,
            reuse=kind.changes.reuse,
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
        limits = self._limits(profile, recompute, reuse, first)
        return plan_memory(profile, limits, self._settings.actions, recompute, reuse)

    def close(self) -> None:
        """Give up the memory of the tiers. What graphs still hold there stays for as long."""
        for copies in self._copies.values():
            copies.finish()
        self._tiers.clear()
        self._kinds.clear()

    def _limits(
        self,
        profile: StepProfile,
        recompute: bool,
        reuse: bool,
        first_plan: MemoryPlan | None,
    ) -> Limits:
        settings = self._settings
        saved = settings.saved_limit
        if saved <= 1:
            plain = first_plan.plain_saved_peak if first_plan else profile.saved_bytes
            saved = int(saved * plain)
        tiers = {tier.name: tier.limit for tier in settings.tiers}
        limits = Limits(device=inf, saved=saved, tiers=tiers)
        device = settings.device_limit
        if isinstance(device, str):
            device = smallest_budget(profile, limits, settings.actions, recompute, reuse)
        return replace(limits, device=device)

    def _measured_links(self, nbytes: int) -> tuple[Link, ...]:
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


def _timed(profiles: Sequence[StepProfile]) -> StepProfile:
    """Return the first profile, with the least time that every interval took in the others."""
    first = profiles[0]
    alike = [p for p in profiles[1:] if _shape(p) == _shape(first)]
    if not alike:
        return first
    seconds = tuple(min(times) for times in zip(*(p.seconds for p in alike), strict=True))
    faster = sum(seconds) / max(sum(first.seconds), 1e-9)
    regions = tuple(
        msgspec.structs.replace(region, seconds=region.seconds * faster) for region in first.regions
    )
    return msgspec.structs.replace(first, seconds=seconds, regions=regions)


def _shape(profile: StepProfile) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(datum.nbytes, datum.saved, datum.uses) for datum in profile.data]
