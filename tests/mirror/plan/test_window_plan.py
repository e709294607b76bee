"""Plans of the window against a search over all plans."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.mirror.plan.window_plan import (
    WindowPlan,
    choose_window,
    plan_window,
    simulate,
)
from lightning_dlres.mirror.profile.step_profile import FetchCost, MirrorProfile, UseEvent


def profile_of(
    nbytes: list[int], uses: list[int], gap: list[float], speed: float = 10.0, fixed: float = 0.0
) -> MirrorProfile:
    """Return the profile of a step whose uses follow each other."""
    events = [UseEvent(kind, unit) for unit in uses for kind in ("begin", "end")]  # type: ignore[arg-type]
    gaps = [seconds for use in gap for seconds in (use, 0.0)]
    return MirrorProfile(
        nbytes=tuple(nbytes),
        events=tuple(events),
        gaps=tuple(gaps),
        fetch=FetchCost(fixed_seconds=fixed, bytes_per_second=speed),
    )


@st.composite
def profiles(draw: st.DrawFn, most_units: int = 4, most_uses: int = 9) -> MirrorProfile:
    """Draw a step; most have forward and backward through some of the units."""
    units = draw(st.integers(1, most_units))
    nbytes = draw(st.lists(st.integers(1, 40), min_size=units, max_size=units))
    if draw(st.booleans()):
        uses = [*range(units), *reversed(range(units))]
    else:
        uses = draw(st.lists(st.integers(0, units - 1), min_size=1, max_size=most_uses))
    gaps = draw(st.lists(st.floats(0, 5), min_size=len(uses), max_size=len(uses)))
    return profile_of(nbytes, uses, gaps, speed=draw(st.floats(1, 40)), fixed=draw(st.floats(0, 1)))


limits = st.one_of(st.just(0.0), st.just(inf), st.floats(1, 150))


def smallest_window(profile: MirrorProfile) -> int:
    """Return the bytes of the largest unit that the step uses."""
    return max(profile.nbytes[event.unit] for event in profile.events)


def check_plan(profile: MirrorProfile, plan: WindowPlan, limit: float) -> None:
    """Check that each used unit is on the device, and nothing in use leaves it."""
    resident: set[int] = set()
    in_use: set[int] = set()
    for event, drops, fetches in zip(plan.events, plan.drops, plan.fetches, strict=True):
        if event.kind == "end":
            in_use.discard(event.unit)
        assert not in_use & set(drops)
        assert set(drops) <= resident
        resident -= set(drops)
        assert not resident & set(fetches)
        assert len(set(fetches)) == len(fetches)
        resident |= set(fetches)
        assert sum(profile.nbytes[unit] for unit in resident) <= max(
            limit, smallest_window(profile)
        )
        if event.kind == "begin":
            assert event.unit in resident
            in_use.add(event.unit)
    assert plan.seconds == pytest.approx(sum(profile.gaps) + plan.stall_seconds)


@given(profiles(), limits)
def test_plans_keep_the_limit_and_fetch_what_is_used(profile: MirrorProfile, limit: float) -> None:
    check_plan(profile, plan_window(profile, limit), limit)


@given(profiles(), limits)
def test_plans_are_at_least_as_fast_as_fetching_at_each_use(
    profile: MirrorProfile, limit: float
) -> None:
    drops = [[event.unit] if event.kind == "end" else [] for event in profile.events]
    fetches = [[event.unit] if event.kind == "begin" else [] for event in profile.events]
    on_demand = simulate(profile, drops, fetches)
    assert plan_window(profile, limit).seconds <= on_demand.seconds + 1e-9


def all_plans(profile: MirrorProfile, limit: float) -> Iterator[WindowPlan]:
    """Yield plans for all choices of kept units and of the time of each fetch.

    A unit is kept after a use, or dropped. Each fetch starts at one of the events before its use.
    """
    events = profile.events
    ends = [i for i, event in enumerate(events) if event.kind == "end"]
    for kept in product((False, True), repeat=len(ends)):
        keeps = dict(zip(ends, kept, strict=True))
        drops = [
            [event.unit] if event.kind == "end" and not keeps[i] else []
            for i, event in enumerate(events)
        ]
        needed = []
        last_end: dict[int, int] = {}
        for i, event in enumerate(events):
            if event.kind == "end":
                last_end[event.unit] = i
            elif event.unit not in last_end or not keeps[last_end[event.unit]]:
                # A fetch may start once the unit was dropped.
                needed.append((event.unit, range(last_end.get(event.unit, 0), i + 1)))
        for starts in product(*(window for _, window in needed)):
            if list(starts) != sorted(starts):
                continue
            fetches: list[list[int]] = [[] for _ in events]
            for (unit, _), start in zip(needed, starts, strict=True):
                fetches[start].append(unit)
            plan = simulate(profile, drops, fetches)
            if plan.peak_bytes <= max(limit, smallest_window(profile)):
                yield plan


@given(profiles(most_units=3, most_uses=4), limits)
def test_plans_are_close_to_the_best_of_all_plans(profile: MirrorProfile, limit: float) -> None:
    best = min(plan.seconds for plan in all_plans(profile, limit))
    # Greedy choices are not always the best ones.
    assert plan_window(profile, limit).seconds <= 1.5 * best + 1e-9


@given(profiles())
def test_the_chosen_window_is_small_and_about_as_fast_as_any(profile: MirrorProfile) -> None:
    chosen, largest = choose_window(profile), plan_window(profile, inf)
    assert chosen.seconds <= 1.02 * largest.seconds + 1e-9
    assert chosen.peak_bytes <= largest.peak_bytes
    check_plan(profile, chosen, chosen.peak_bytes)


def test_a_window_of_two_layers_hides_all_copies_but_the_first() -> None:
    units = 8
    # A copy takes 1 s, and a layer 1.5 s.
    profile = profile_of([10] * units, [*range(units), *reversed(range(units))], [1.5] * 2 * units)
    plan = plan_window(profile, 20)
    assert plan.peak_bytes == 20
    assert plan.stall_seconds == pytest.approx(1.0)
    assert choose_window(profile).peak_bytes == 20
    assert "waiting for copies" in plan.table()


def test_the_last_layers_stay_for_backward() -> None:
    profile = profile_of([10, 10, 10], [0, 1, 2, 2, 1, 0], [1.0] * 6)
    assert sum(map(len, plan_window(profile, 20).fetches)) == 4
    assert sum(map(len, plan_window(profile, 30).fetches)) == 3
    assert sum(map(len, plan_window(profile, 0).fetches)) == 5
