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

    def make(
        self,
        profile: StepProfile,
        *,
        recompute: bool,
        reuse: bool,
        unpatched: MemoryPlan | None = None,
    ) -> MemoryPlan:
        """Return the fastest plan within the limits.

        If no plan meets them and `on_over_budget` is "warn", warn, and return a plan with the
        smallest possible peak.

        Args:
            profile: Profile of a step.
            recompute: Whether modules may run again in backward.
            reuse: Whether modules may reuse memory.
            unpatched: Plan of the same steps without patches, if modules were patched during the
                profile. A share in `saved_budget` refers to what those steps save.

        Raises:
            ConfigError: If no plan meets the limits, and `on_over_budget` is "error".
        """
        config = self._config
        try:
            limits = self._limits(profile, recompute, reuse, unpatched)
            return plan_memory(profile, limits, config.actions, recompute, reuse)
        except ConfigError as error:
            if config.on_over_budget == "error":
                raise
            self._warn(f"{error} Training continues with the smallest peak that can be met.")
        # The budgets are dropped. A tier has no more room than its limit.
        limits = MemoryLimits(tiers={tier.name: tier.limit for tier in config.tiers})
        smallest = smallest_budget(profile, limits, config.actions, recompute, reuse)
        limits = replace(limits, device=smallest)
        return plan_memory(profile, limits, config.actions, recompute, reuse)

    def choose_plan(
        self, unpatched: ProfiledPlan, patched_profile: StepProfile, patches: ModulePatches
    ) -> tuple[ProfiledPlan, ModulePatches]:
        """Return the better of two plans, with and without patches, and the patches that it needs.

        The better plan has the shorter step. With the budget "min" the peak counts first.

        Args:
            unpatched: Plan and profile of the steps without patches.
            patched_profile: Profile of the steps with patches.
            patches: Patches of those steps.

        Raises:
            ConfigError: If neither plan meets the limits, and `on_over_budget` is "error".
        """
        candidates: list[tuple[MemoryPlan, StepProfile, ModulePatches]] = []
        first_error: ConfigError | None = None
        for profile, applied in ((patched_profile, patches), (unpatched.profile, NO_PATCHES)):
            try:
                plan = self.make(profile, recompute=False, reuse=False, unpatched=unpatched.plan)
            except ConfigError as error:
                first_error = first_error or error
            else:
                candidates.append((plan, profile, applied))
        if not candidates:
            assert first_error is not None
            raise first_error
        is_min = self._config.device_limit == "min"
        plan, profile, chosen = min(
            candidates, key=lambda c: (c[0].peak if is_min else 0, c[0].seconds)
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
