"""Training steps of one batch shape: their phase, their measurements, and the plans they follow.

Steps with the same signature save the same storages: equal bytes and dtypes in the same order.
Steps of one shape may alternate between several signatures, with a plan for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from lightning_dlres.memory.execute.bitwise_check import BitwiseCheck
from lightning_dlres.memory.module_patches import NO_PATCHES, ModulePatches
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.plan.plan_policy import PlanPolicy
from lightning_dlres.memory.profile.step_profile import StepProfile

# Largest number of steps that are measured after the latest plan. Measuring then stops.
_MAX_MEASURED = 16
# Largest number of plans of one shape.
_MAX_PLANS = 8
# Number of steps in a row that must match a plan. After them no other signature is expected.
_SETTLED_STEPS = 4

# Bytes and dtype of every storage that a step saves, in the order of saving.
Signature = tuple[tuple[int, str], ...]


class Phase(Enum):
    """Phase of the steps of one shape.

    PROFILE -> PLAN -> FOLLOW is the usual course. A plan with module patches takes
    PROFILE -> PLAN -> VERIFY -> PROFILE -> PLAN -> FOLLOW: the patched modules are verified, and
    the patched steps are measured before they are planned. A followed step with an unplanned
    signature leads back to PROFILE.
    """

    PROFILE = "the next step is measured"
    PLAN = "enough steps were measured for a plan"
    VERIFY = "the next step compares patched modules with unpatched ones"
    FOLLOW = "the next step follows the plans"


@dataclass(frozen=True)
class ProfiledPlan:
    """Plan with the profile that it was made from."""

    plan: MemoryPlan
    profile: StepProfile


@dataclass
class _SignatureProfiles:
    """Profiles of steps with the same signature.

    Attributes:
        memory: Profile of the step whose memory was metered. Metering slows a step down, so its
            times are not used if others are known.
        times: Profiles of steps that were only timed.
    """

    memory: StepProfile | None = None
    times: list[StepProfile] = field(default_factory=list)


@dataclass
class ShapeSteps:
    """Steps of one batch shape.

    Attributes:
        profile_steps: Number of steps that are measured for a plan.
        phase: Phase of the next step.
        has_stopped_measuring: Whether steps with unplanned signatures are no longer measured.
        may_patch: Whether a plan may patch modules. False for alternating steps: a patch changes
            the signature, too, and the two causes could not be distinguished.
        patches: Patches of the next step.
        unpatched: Plan and profile of the steps before the patches; None without patches.
        bitwise_check: Comparison of the patched modules; None except in phase VERIFY.
        exact: Names of the patched modules that computed the same bits.
        plans: One plan for each signature.
        given_plan: Plan given by the user, while these steps follow it; else None.
        policy: Policy that follows the plans; None before there is a plan.
    """

    profile_steps: int
    phase: Phase = Phase.PROFILE
    has_stopped_measuring: bool = False
    may_patch: bool = True
    patches: ModulePatches = NO_PATCHES
    unpatched: ProfiledPlan | None = None
    bitwise_check: BitwiseCheck | None = None
    exact: set[str] = field(default_factory=set)
    plans: list[MemoryPlan] = field(default_factory=list)
    given_plan: MemoryPlan | None = None
    policy: PlanPolicy | None = None
    _profiles: dict[Signature, _SignatureProfiles] = field(default_factory=dict)
    _measured: int = 0
    _matched_in_a_row: int = 0
    _patched_mismatches: int = 0

    @property
    def is_idle(self) -> bool:
        """Return whether steps run without the engine.

        All plans keep everything, and enough steps matched them.
        """
        return (
            self.phase is Phase.FOLLOW
            and self._matched_in_a_row >= _SETTLED_STEPS
            and all(plan.changes_nothing for plan in self.plans)
        )

    @property
    def lacks_memory_profile(self) -> bool:
        """Return whether the next step must be metered, and not only timed."""
        signatures = self._profiles.values()
        return not signatures or any(profiles.memory is None for profiles in signatures)

    @property
    def has_measured_enough(self) -> bool:
        """Return whether measuring must stop: the limit of steps or of plans was reached."""
        return self._measured >= _MAX_MEASURED or len(self.plans) >= _MAX_PLANS

    def reset(self) -> None:
        """Drop all plans and measurements, and profile again."""
        self._profiles.clear()
        self.plans.clear()
        self.patches, self.unpatched, self.policy = NO_PATCHES, None, None
        self.bitwise_check = self.given_plan = None
        self.phase, self.has_stopped_measuring = Phase.PROFILE, False
        self._measured = self._matched_in_a_row = 0
        # Other modules may have these names by now.
        self.exact.clear()

    def add(self, profile: StepProfile, has_memory: bool) -> StepProfile | None:
        """Add the profile of a measured step.

        Args:
            profile: Profile of the step.
            has_memory: Whether its memory was metered.

        Returns:
            The profile to plan with, in phase PLAN, once enough steps of one signature were
            measured; else None.
        """
        self._measured += 1
        signature = tuple((storage.nbytes, storage.dtype) for storage in profile.storages)
        if any(signature == signature_of(plan) for plan in self.plans):
            return None
        profiles = self._profiles.setdefault(signature, _SignatureProfiles())
        if has_memory:
            profiles.memory = profiles.memory or profile
        else:
            profiles.times.append(profile)
        if self.unpatched is not None and len(self._profiles) > 1:
            # Patched steps alternate between signatures.
            self.may_patch = False
            self.reset()
            return None
        if profiles.memory is None or 1 + len(profiles.times) < self.profile_steps:
            return None
        del self._profiles[signature]
        self.phase = Phase.PLAN
        return _with_least_times(profiles.memory, profiles.times)

    def profile_patched(self, planned: ProfiledPlan, patches: ModulePatches) -> None:
        """Measure steps with patched modules; `planned` is the plan of the unpatched steps."""
        self.patches, self.unpatched = patches, planned
        self.phase, self._measured = Phase.PROFILE, 0

    def verify(self) -> None:
        """Compare the patched modules with unpatched ones in the next step."""
        self.phase, self.bitwise_check = Phase.VERIFY, BitwiseCheck()

    def end_verification(self) -> None:
        """End the comparison; the patched steps are measured next."""
        self.phase, self.bitwise_check = Phase.PROFILE, None

    def follow(self, plan: MemoryPlan) -> None:
        """Add a plan, and follow all plans."""
        self.plans.append(plan)
        self.phase, self._measured, self._matched_in_a_row = Phase.FOLLOW, 0, 0

    def end_step(self, is_mismatch: bool) -> None:
        """End a step in phase FOLLOW.

        Args:
            is_mismatch: Whether its signature was not planned.
        """
        if not is_mismatch:
            self._matched_in_a_row += 1
            if self._matched_in_a_row >= _SETTLED_STEPS:
                self._profiles.clear()
            return
        self._matched_in_a_row = 0
        if self.patches != NO_PATCHES:
            # After a second mismatch, plans patch no modules.
            self._patched_mismatches += 1
            self.may_patch &= self._patched_mismatches <= 1
            self.reset()
        elif self.given_plan is not None:
            self.reset()
        elif not self.has_stopped_measuring:
            self.phase = Phase.PROFILE

    def stop_measuring(self) -> None:
        """Follow the present plans in all later steps, even if a step's signature is unplanned."""
        self.has_stopped_measuring, self.phase = True, Phase.FOLLOW
        self.patches, self.unpatched, self.bitwise_check = NO_PATCHES, None, None
        self._profiles.clear()


def signature_of(plan: MemoryPlan) -> Signature:
    """Return the signature of the steps that a plan was made for."""
    return tuple((decision.nbytes, decision.dtype) for decision in plan.decisions)


def _with_least_times(profile: StepProfile, timed: Sequence[StepProfile]) -> StepProfile:
    """Return a profile with the shortest duration of each interval among the timed profiles.

    Timed profiles with other events are left out. The durations of regions are scaled by the same
    ratio as the step.
    """
    matching = [other for other in timed if _events(other) == _events(profile)]
    if not matching:
        return profile
    seconds = tuple(
        min(times) for times in zip(*(other.seconds for other in matching), strict=True)
    )
    ratio = sum(seconds) / max(sum(profile.seconds), 1e-9)
    regions = tuple(
        msgspec.structs.replace(region, seconds=region.seconds * ratio)
        for region in profile.regions
    )
    return msgspec.structs.replace(profile, seconds=seconds, regions=regions)


def _events(profile: StepProfile) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(storage.nbytes, storage.saved, storage.uses) for storage in profile.storages]
