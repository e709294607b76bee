"""Links that other engines use: the share that is left for saved tensors, and plans with it."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.core.device.link_use import LinkUse
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.plan.choices import MemoryLimits
from lightning_dlres.memory.plan.planner import plan_memory
from lightning_dlres.memory.profile.shared_links import shared_links
from lightning_dlres.memory.profile.step_profile import Region, StepProfile, TierLink
from tests.support.memory_profiles import MIB, stack

LINK = TierLink(tier="host", out_rate=2e9, in_rate=4e9, overlaps=True, latency=1e-5)
MOST = 0.9


def test_the_share_is_that_of_the_time_of_the_copies() -> None:
    # 0.1 s to the device, and 0.1 s from it, of a step of one second.
    (shared,) = shared_links([LINK], LinkUse(to_device=400_000_000, from_device=200_000_000), 1.0)
    assert shared == msgspec.structs.replace(LINK, taken=pytest.approx(0.2))
    assert shared.in_seconds(4_000_000) == pytest.approx(1e-5 + 1e-3 / 0.8)
    assert shared.out_seconds(4_000_000) == pytest.approx(1e-5 + 2e-3 / 0.8)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.floats(0, 10))
def test_a_part_of_the_link_is_left(to_device: int, from_device: int, seconds: float) -> None:
    (shared,) = shared_links([LINK], LinkUse(to_device, from_device), seconds)
    assert 0 <= shared.taken <= MOST
    assert 0 < shared.in_seconds(MIB) < inf


def test_links_over_which_the_device_waits_are_not_shared() -> None:
    waiting = msgspec.structs.replace(LINK, tier="disk", overlaps=False)
    links = shared_links([LINK, waiting], LinkUse(to_device=1 << 30), 1.0)
    assert [link.taken > 0 for link in links] == [True, False]
    assert links[1] == waiting


def test_without_other_copies_links_stay_as_measured() -> None:
    assert shared_links([LINK], LinkUse(), 1.0) == (LINK,)
    assert LinkUse(1, 2) + LinkUse(3, 4) == LinkUse(4, 6)


def profile_with_choice(taken: float) -> StepProfile:
    """Return a profile in which a layer can be offloaded in time, or recomputed in 5 ms."""
    profile = stack([8, 8, 8], seconds=0.01, taken=taken)
    region = Region(layer="layer0", storages=(0,), seconds=0.005, entry=0)
    return msgspec.structs.replace(profile, regions=(region,))


def test_a_plan_recomputes_where_other_copies_leave_too_little_of_the_link() -> None:
    limits = MemoryLimits(device=inf, saved=17 * MIB)
    actions = (MemoryAction.KEEP, MemoryAction.OFFLOAD)
    free, busy = (
        plan_memory(profile_with_choice(taken), limits, actions, True, False)
        for taken in (0.0, MOST)
    )
    assert free.bytes_of(MemoryAction.OFFLOAD) > 0
    assert not free.recompute
    assert not free.notes
    assert busy.recompute == ("layer0",)
    assert busy.bytes_of(MemoryAction.OFFLOAD) == 0
    assert "90% of the link to the host" in busy.notes[0]


def test_a_prediction_with_the_share_is_that_of_a_slower_link() -> None:
    limits = MemoryLimits(device=inf, saved=9 * MIB)
    actions = (MemoryAction.KEEP, MemoryAction.OFFLOAD)
    shared, slower = (
        plan_memory(stack([8, 8, 8], 0.01, **link), limits, actions, False, False)
        for link in ({"taken": 0.5}, {"out_rate": 0.5e9, "in_rate": 0.5e9})
    )
    assert msgspec.structs.replace(shared, notes=shared.notes[1:]) == slower
