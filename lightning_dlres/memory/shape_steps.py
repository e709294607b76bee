"""Training steps of one batch shape: what was measured of them, and the plans that they follow.

Steps that save the same, saved_storage by saved_storage, are one course. Steps of one shape may take turns between
several courses, with a plan each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from lightning_dlres.memory.execute.bitwise_check import Audit
from lightning_dlres.memory.module_patches import UNCHANGED, ModulePatches
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.plan.plan_policy import PlanPolicy
from lightning_dlres.memory.profile.step_profile import StepProfile

# So many steps are measured for one more plan before nothing more is measured.
_MOST_MEASURED = 16
# So many plans a shape may have.
_MOST_COURSES = 8
# After so many planned steps in a row, other courses are not waited for any more.
_SETTLED = 4

Course = tuple[tuple[int, str], ...]


@dataclass
class _CourseProfiles:
    """Profiles of steps that saved the same.

    Attributes:
        memory: of a step whose memory was counted.
        times: of the others.
    """

    memory: StepProfile | None = None
    times: list[StepProfile] = field(default_factory=list)


@dataclass
class ShapeSteps:
    """The steps of one shape.

    Attributes:
        profile_steps: steps that are measured for a plan.
        is_measuring: whether the step to come is measured.
        has_given_up: whether steps that no plan knows are not measured any more.
        is_fixed: whether modules stay as they are: with steps that take turns, what changed modules
            save could not be told from another course.
        changes: modules that are not as they were.
        first: plan and profile of the steps before that.
        audit: looks at the changes in the step to come.
        exact: changed modules that were found exact.
        plans: one for each course.
        given: a plan that the user has given, and whose changes are looked at.
        follower: carries the plans out.
    """

    profile_steps: int
    is_measuring: bool = True
    has_given_up: bool = False
    is_fixed: bool = False
    changes: ModulePatches = UNCHANGED
    first: tuple[MemoryPlan, StepProfile] | None = None
    audit: Audit | None = None
    exact: set[str] = field(default_factory=set)
    plans: list[MemoryPlan] = field(default_factory=list)
    given: MemoryPlan | None = None
    follower: PlanPolicy | None = None
    _profiles: dict[Course, _CourseProfiles] = field(default_factory=dict)
    _measured: int = 0
    _alike: int = 0
    _changed_unlike: int = 0

    @property
    def is_idle(self) -> bool:
        """Return whether all plans keep everything, and steps were alike for long enough not to be
        watched any more."""
        return (
            not self.is_measuring
            and self._alike >= _SETTLED
            and all(plan.changes_nothing for plan in self.plans)
        )

    @property
    def lacks_memory(self) -> bool:
        """Return whether memory is to be counted in the step to come."""
        found = self._profiles.values()
        return not found or any(profiles.memory is None for profiles in found)

    def forget(self) -> None:
        """Begin anew."""
        self._profiles.clear()
        self.plans.clear()
        self.changes, self.first, self.follower = UNCHANGED, None, None
        self.audit = self.given = None
        self.is_measuring, self.has_given_up = True, False
        self._measured = self._alike = 0
        # By now other modules may have these names.
        self.exact.clear()

    def add(self, profile: StepProfile, has_memory: bool) -> StepProfile | None:
        """Note a measured step.

        Returns:
            What a plan can be made from, once enough steps of one course were measured.
        """
        self._measured += 1
        course = tuple(
            (saved_storage.nbytes, saved_storage.dtype) for saved_storage in profile.data
        )
        if any(course == course_of(plan) for plan in self.plans):
            return None
        known = self._profiles.setdefault(course, _CourseProfiles())
        if has_memory:
            known.memory = known.memory or profile
        else:
            known.times.append(profile)
        if self.first is not None and len(self._profiles) > 1:
            self.is_fixed = True
            self.forget()
            return None
        if known.memory is None or 1 + len(known.times) < self.profile_steps:
            return None
        del self._profiles[course]
        return _timed(known.memory, known.times)

    @property
    def is_endless(self) -> bool:
        """Return whether enough was measured without a plan."""
        return self._measured >= _MOST_MEASURED or len(self.plans) >= _MOST_COURSES

    def restart(self) -> None:
        """Modules were changed, or put back: steps are measured as they are now."""
        self._measured = 0

    def plan_for(self, plan: MemoryPlan) -> None:
        """Note one more plan, and follow all."""
        self.plans.append(plan)
        self.is_measuring, self._measured, self._alike = False, 0, 0

    def end_step(self, unlike: bool) -> None:
        """A step that followed the plans is over."""
        if not unlike:
            self._alike += 1
            if self._alike >= _SETTLED:
                self._profiles.clear()
            return
        self._alike = 0
        if self.changes != UNCHANGED:
            # The next plans leave modules alone, if this happens again.
            self._changed_unlike += 1
            self.is_fixed |= self._changed_unlike > 1
            self.forget()
        elif self.given is not None:
            self.forget()
        else:
            self.is_measuring = not self.has_given_up

    def stop_measuring(self) -> None:
        """Measure nothing more."""
        self.has_given_up, self.is_measuring = True, False
        self.changes, self.first, self.audit = UNCHANGED, None, None
        self._profiles.clear()


def course_of(plan: MemoryPlan) -> Course:
    """Return what the steps of a plan save."""
    return tuple((decision.nbytes, decision.dtype) for decision in plan.decisions)


def _timed(first: StepProfile, others: Sequence[StepProfile]) -> StepProfile:
    """Return the first profile, with the least time that every interval took in the others."""
    alike = [profile for profile in others if _events(profile) == _events(first)]
    if not alike:
        return first
    seconds = tuple(min(times) for times in zip(*(p.seconds for p in alike), strict=True))
    faster = sum(seconds) / max(sum(first.seconds), 1e-9)
    regions = tuple(
        msgspec.structs.replace(region, seconds=region.seconds * faster) for region in first.regions
    )
    return msgspec.structs.replace(first, seconds=seconds, regions=regions)


def _events(profile: StepProfile) -> list[tuple[int, int, tuple[int, ...]]]:
    return [
        (saved_storage.nbytes, saved_storage.saved, saved_storage.uses)
        for saved_storage in profile.data
    ]
