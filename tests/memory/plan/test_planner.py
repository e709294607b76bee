"""Planner against brute force, and simulator against sums by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from math import inf

import msgspec
import pytest
from hypothesis import given, settings

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.plan.choices import KEEP, MemoryLimits, StorageChoice
from lightning_dlres.memory.plan.placement import Lifetime, overlap
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.plan.planner import plan_memory, smallest_budget
from lightning_dlres.memory.plan.simulator import simulate
from lightning_dlres.memory.profile.step_profile import Region, StepProfile
from tests.support.examples import examples
from tests.support.memory_profiles import MIB, all_selections, any_profile, profiles, stack

OFFLOAD = StorageChoice(MemoryAction.OFFLOAD, "host")


def oracle(profile: StepProfile, limits: MemoryLimits) -> float:
    """Return the duration of the fastest step within the limits; infinite if there is none."""
    least = inf
    for choices, regions, reuses in all_selections(profile):
        outcome = simulate(profile, choices, limits, regions=regions, reuses=reuses)
        if outcome.excess <= 0:
            least = min(least, outcome.seconds)
    return least


def without_overlap(profile: StepProfile) -> StepProfile:
    links = tuple(msgspec.structs.replace(link, overlaps=False) for link in profile.links)
    return msgspec.structs.replace(profile, links=links)


def some_limits(profile: StepProfile, rng: random.Random) -> MemoryLimits:
    plain = simulate(profile, [KEEP] * len(profile.storages))
    peak, saved = plain.peak, max(plain.resident)
    return MemoryLimits(
        device=peak * rng.uniform(0.3, 1.0) if rng.random() < 0.7 else inf,
        saved=saved * rng.uniform(0.3, 1.0) if rng.random() < 0.5 else inf,
        tiers={"host": rng.randint(0, 60) * MIB} if rng.random() < 0.3 else {},
    )


@pytest.mark.parametrize("seed", range(150))
def test_plans_are_optimal_if_copies_block(seed: int) -> None:
    rng = random.Random(seed)
    profile = without_overlap(any_profile(rng))
    limits = some_limits(profile, rng)
    least = oracle(profile, limits)
    if least == inf:
        with pytest.raises(ConfigError, match=r"must be at least|must allow a plan"):
            plan_memory(profile, limits)
    else:
        assert plan_memory(profile, limits).seconds == pytest.approx(least, rel=1e-4)


def test_plans_are_nearly_optimal_if_copies_overlap() -> None:
    worst = total = count = 0.0
    seeds = examples(300)
    for seed in range(seeds):
        rng = random.Random(seed)
        profile = any_profile(rng)
        limits = some_limits(profile, rng)
        least = oracle(profile, limits)
        if least == inf:
            with pytest.raises(ConfigError, match=r"must be at least|must allow a plan"):
                plan_memory(profile, limits)
            continue
        ratio = plan_memory(profile, limits).seconds / least
        worst, total, count = max(worst, ratio), total + ratio, count + 1
    assert count > 80 * seeds / 300
    assert worst < 1.1
    assert total / count < 1.003


@settings(max_examples=examples(150))
@given(profile=profiles(max_storages=12))
def test_plans_stay_within_their_limits(profile: StepProfile) -> None:
    smallest = smallest_budget(profile)
    plan = plan_memory(profile, MemoryLimits(device=smallest))
    assert plan.peak <= smallest + 1
    lives = [
        Lifetime(decision.capacity, decision.saved, storage_end(profile, decision.saved))
        for decision in plan.decisions
        if decision.tier == "host"
    ]
    offsets = [decision.offset for decision in plan.decisions if decision.tier == "host"]
    assert overlap(lives, offsets) is None
    assert MemoryPlan.from_json(plan.to_json()) == plan
    assert StepProfile.from_json(profile.to_json()) == profile
    plan.table()


def test_a_fetch_waits_for_storages_that_are_leaving() -> None:
    # A profile in which a storage is still leaving when another one is fetched.
    profile = any_profile(random.Random(886), 12)
    smallest = smallest_budget(profile)
    assert plan_memory(profile, MemoryLimits(device=smallest)).peak <= smallest + 1


def storage_end(profile: StepProfile, saved: int) -> int:
    return next(storage.end for storage in profile.storages if storage.saved == saved)


@pytest.mark.parametrize("seed", range(60))
def test_the_smallest_budget_agrees_with_brute_force(seed: int) -> None:
    profile = without_overlap(any_profile(random.Random(seed), max_storages=4))
    smallest = smallest_budget(profile)
    peaks = [
        simulate(profile, choices, regions=regions, reuses=reuses).peak
        for choices, regions, reuses in all_selections(profile)
    ]
    assert smallest == pytest.approx(min(peaks), abs=2)


def test_copies_that_overlap_cost_no_time() -> None:
    # A copy of 10 MiB takes 10.5 ms, and a layer 20 ms: it ends before the next storage is saved.
    profile = stack([10] * 5, seconds=0.02)
    outcome = simulate(profile, [OFFLOAD] * 3 + [KEEP] * 2)
    assert outcome.seconds == pytest.approx(0.02 * 11)
    assert outcome.moved == 60 * MIB
    assert outcome.peak == 20 * MIB
    # Each storage has left at the next event, and is fetched one layer ahead of its use.
    assert outcome.offloaded_by[:3] == (1, 2, 3)
    assert outcome.prefetch_at[:3] == (8, 7, 6)


def test_one_link_carries_both_directions() -> None:
    profile = stack([20] * 4, seconds=0.01)
    everything = simulate(profile, [OFFLOAD] * 4)
    # The link moves 160 MiB in 168 ms, and the first storage is saved 10 ms after the start.
    # Eight intervals of 10 ms cannot hide that.
    assert everything.seconds >= 0.01 + 160 * MIB / 1e9
    apart = stack([20] * 4, seconds=0.01, overlaps=False)
    waited = simulate(apart, [OFFLOAD] * 4)
    assert waited.seconds == pytest.approx(0.09 + 160 * MIB / 1e9)


def test_storages_of_the_last_layers_stay() -> None:
    # Backward uses them at once, so a copy would only delay it.
    profile = stack([20] * 8, seconds=0.02)
    plan = plan_memory(profile, MemoryLimits(saved=100 * MIB))
    is_offloaded = [d.action is MemoryAction.OFFLOAD for d in plan.decisions]
    assert is_offloaded[0]
    assert not is_offloaded[-1]
    assert plan.seconds == pytest.approx(plan.plain_seconds)


def test_modules_are_recomputed_if_the_link_is_slow() -> None:
    profile = stack([20] * 6, seconds=0.01, out_rate=1e8, in_rate=1e8)
    regions = tuple(
        Region(layer=f"layer{n}", storages=(n,), seconds=0.01, entry=n) for n in range(6)
    )
    profile = msgspec.structs.replace(profile, regions=regions)
    plan = plan_memory(profile, MemoryLimits(saved=60 * MIB))
    assert plan.recompute
    assert not any(d.action is MemoryAction.OFFLOAD for d in plan.decisions)
    fast = stack([20] * 6, seconds=0.05, out_rate=1e10, in_rate=1e10)
    fast = msgspec.structs.replace(fast, regions=regions)
    assert not plan_memory(fast, MemoryLimits(saved=60 * MIB)).recompute


def test_a_budget_that_cannot_be_met_raises_an_error_with_the_smallest() -> None:
    profile = stack([10] * 4)
    with pytest.raises(ConfigError, match=r"must be at least 10 MiB \(10485760 bytes\)"):
        plan_memory(profile, MemoryLimits(device=MIB))
    with pytest.raises(ConfigError, match=r"saved_budget must be at least .* got 1 MiB"):
        plan_memory(profile, MemoryLimits(saved=MIB))
    assert plan_memory(profile, MemoryLimits(device=10 * MIB)).peak == 10 * MIB


def test_a_plan_notes_that_offloading_does_not_help() -> None:
    profile = stack([1, 1])
    base = tuple(1000 * MIB for _ in profile.base)
    plan = plan_memory(msgspec.structs.replace(profile, base=base), MemoryLimits())
    assert "offloading cannot lower the peak much" in plan.notes[0]
    assert "offloading cannot lower the peak much" in plan.table()
    assert plan.changes_nothing


def test_storages_go_to_the_disk_if_the_host_is_full() -> None:
    profile = stack([10] * 6, overlaps=False)
    link = profile.links[0]
    slow = msgspec.structs.replace(link, tier="disk", out_rate=1e8, in_rate=1e8)
    profile = msgspec.structs.replace(profile, links=(link, slow))
    plan = plan_memory(profile, MemoryLimits(saved=30 * MIB, tiers={"host": 20 * MIB}))
    assert plan.tiers["host"] <= 20 * MIB
    assert plan.tiers["disk"] >= 10 * MIB
    with pytest.raises(ConfigError, match="saved_budget"):
        plan_memory(
            profile, replace(MemoryLimits(saved=30 * MIB), tiers={"host": 20 * MIB, "disk": 0.0})
        )


def test_bad_json_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"memory plan must be JSON that MemoryPlan.to_json wrote"
    ):
        MemoryPlan.from_json("{}")
    with pytest.raises(
        ConfigError, match=r"step profile must be JSON that StepProfile.to_json wrote"
    ):
        StepProfile.from_json("[")
    plan = json.loads(plan_memory(stack([1, 1]), MemoryLimits()).to_json())
    plan["decisions"][0]["room"] = 5
    with pytest.raises(ConfigError, match="unknown field `room`"):
        MemoryPlan.from_json(json.dumps(plan))
