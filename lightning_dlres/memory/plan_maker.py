"""Plans within the limits of a configuration.

A limit may be a share of what plain training saves, or "min" for the smallest possible one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.memory.config import OffloaderConfig
from lightning_dlres.memory.module_patches import NO_PATCHES, ModulePatches
from lightning_dlres.memory.plan.choices import MemoryLimits
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.plan.planner import plan_memory, smallest_budget
from lightning_dlres.memory.profile.step_profile import StepProfile
from lightning_dlres.memory.shape_steps import ProfiledPlan


class PlanMaker:
    """Maker of plans for one configuration.

    Args:
        config: Configuration with the limits and actions.
        warn: Receives warnings for the user.
    """

    def __init__(self, config: OffloaderConfig, warn: Callable[[str], None]) -> None:
        self._config, self._warn = config, warn

    def make(self, profile: StepProfile, *, recompute: bool, reuse: bool) -> MemoryPlan:
        """Return the fastest plan within the limits.

        If no plan meets them and `on_over_budget` is "warn", warn, and return a plan with the
        smallest possible peak.

        Args:
            profile: Profile of a step.
            recompute: Whether modules may run again in backward.
            reuse: Whether modules may reuse memory.

        Raises:
            ConfigError: If no plan meets the limits, and `on_over_budget` is "error".
        """
        try:
            return self._within_limits(profile, recompute, reuse)
        except ConfigError as error:
            self._reject_or_warn(error)
        return self._with_smallest_peak(profile, recompute, reuse)

    def choose_plan(
        self, unpatched: ProfiledPlan, patched_profile: StepProfile, patches: ModulePatches
    ) -> tuple[ProfiledPlan, ModulePatches]:
        """Return the better of two plans, with and without patches, and the patches that it needs.

        A plan that meets the limits is better than one that does not. Of two that meet them, the
        better plan has the shorter step. The peak counts first with the budget "min", and if
        neither plan meets the limits.

        Args:
            unpatched: Plan and profile of the steps without patches.
            patched_profile: Profile of the steps with patches.
            patches: Patches of those steps.

        Raises:
            ConfigError: If neither plan meets the limits, and `on_over_budget` is "error".
        """
        profiles = (patched_profile, patches), (unpatched.profile, NO_PATCHES)
        candidates: list[tuple[MemoryPlan, StepProfile, ModulePatches]] = []
        errors: list[ConfigError] = []
        for profile, applied in profiles:
            try:
                plan = self._within_limits(profile, False, False, unpatched.plan)
            except ConfigError as error:
                errors.append(error)
            else:
                candidates.append((plan, profile, applied))
        peak_first = self._config.device_limit == "min"
        if not candidates:
            self._reject_or_warn(errors[0])
            peak_first = True
            candidates = [
                (self._with_smallest_peak(profile, False, False), profile, applied)
                for profile, applied in profiles
            ]
        plan, profile, chosen = min(
            candidates, key=lambda c: (c[0].peak if peak_first else 0, c[0].seconds)
        )
        plan = msgspec.structs.replace(
            plan,
            recompute=chosen.recompute,
            reuse=chosen.reuse,
            plain_seconds=unpatched.plan.plain_seconds,
            plain_peak=unpatched.plan.plain_peak,
            plain_saved_peak=unpatched.plan.plain_saved_peak,
        )
        return ProfiledPlan(plan, profile), chosen

    def _reject_or_warn(self, error: ConfigError) -> None:
        """Raise the error of limits that no plan meets, or warn, as `on_over_budget` says."""
        if self._config.on_over_budget == "error":
            raise error
        self._warn(f"{error} Training continues with the smallest peak that can be met.")

    def _within_limits(
        self,
        profile: StepProfile,
        recompute: bool,
        reuse: bool,
        unpatched: MemoryPlan | None = None,
    ) -> MemoryPlan:
        """Return the fastest plan within the limits.

        Args:
            profile: Profile of a step.
            recompute: Whether modules may run again in backward.
            reuse: Whether modules may reuse memory.
            unpatched: Plan of the same steps without patches, if modules were patched during the
                profile. A share in `saved_budget` refers to what those steps save.

        Raises:
            ConfigError: If no plan meets them.
        """
        limits = self._limits(profile, recompute, reuse, unpatched)
        return plan_memory(profile, limits, self._config.actions, recompute, reuse)

    def _with_smallest_peak(self, profile: StepProfile, recompute: bool, reuse: bool) -> MemoryPlan:
        """Return a plan with the smallest possible peak, whatever the budgets are."""
        config = self._config
        # A tier has no more room than its limit.
        limits = MemoryLimits(tiers={tier.name: tier.limit for tier in config.tiers})
        smallest = smallest_budget(profile, limits, config.actions, recompute, reuse)
        limits = replace(limits, device=smallest)
        return plan_memory(profile, limits, config.actions, recompute, reuse)

    def _limits(
        self, profile: StepProfile, recompute: bool, reuse: bool, unpatched: MemoryPlan | None
    ) -> MemoryLimits:
        """Return the limits in bytes.

        "min" is computed from the profile, and a share from what the steps without patches save.
        """
        config = self._config
        saved = config.saved_limit
        if saved <= 1:
            plain = unpatched.plain_saved_peak if unpatched else profile.saved_bytes
            saved = int(saved * plain)
        tiers = {tier.name: tier.limit for tier in config.tiers}
        limits = MemoryLimits(device=inf, saved=saved, tiers=tiers)
        device = config.device_limit
        if isinstance(device, str):
            device = smallest_budget(profile, limits, config.actions, recompute, reuse)
        return replace(limits, device=device)
