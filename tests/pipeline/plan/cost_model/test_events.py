"""The event graph of a step has the events and the dependencies of its schedule."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.pipeline.plan.cost_model.events import (
    COMPUTING,
    ScheduleEvent,
    Work,
    event_graph,
)
from lightning_dlres.pipeline.plan.schedules.base import ALL_MICROBATCHES, Schedule
from tests.support.pipeline_profiles import GPIPE, ONE_F_ONE_B, SCHEDULES

schedules = st.sampled_from(SCHEDULES)
stage_counts = st.integers(1, 4)
# Numbers of micro-batches of the replicas.
microbatch_shares = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple)


def named(events: tuple[ScheduleEvent, ...]) -> list[tuple[str, set[str]]]:
    """Return the name of every event of one replica, with the names of its predecessors."""

    def name(event: ScheduleEvent) -> str:
        return f"{event.work.name.lower()} {event.microbatch} on {event.stage}"

    return [(name(event), {name(events[i]) for i in event.after}) for event in events]


def test_one_microbatch_passes_two_stages() -> None:
    assert named(event_graph(ONE_F_ONE_B, 2, (1,))) == [
        ("forward 0 on 0", set()),
        ("activation 0 on 0", {"forward 0 on 0"}),
        ("recompute 0 on 0", {"forward 0 on 0"}),
        ("forward 0 on 1", {"activation 0 on 0"}),
        ("loss 0 on 1", {"forward 0 on 1"}),
        ("recompute 0 on 1", {"loss 0 on 1"}),
        ("backward 0 on 1", {"recompute 0 on 1"}),
        ("gradient 0 on 1", {"backward 0 on 1"}),
        ("backward 0 on 0", {"recompute 0 on 0", "gradient 0 on 1"}),
    ]


def test_messages_travel_one_after_the_other_during_computation() -> None:
    waits = dict(named(event_graph(GPIPE, 2, (2,))))
    assert waits["forward 1 on 0"] == {"forward 0 on 0"}
    assert waits["activation 1 on 0"] == {"forward 1 on 0", "activation 0 on 0"}
    assert waits["gradient 1 on 1"] == {"backward 1 on 1", "gradient 0 on 1"}


def test_recomputing_does_not_wait_for_the_gradient() -> None:
    waits = dict(named(event_graph(ONE_F_ONE_B, 2, (3,))))
    assert waits["recompute 1 on 0"] == {"forward 2 on 0"}
    assert waits["backward 1 on 0"] == {"recompute 1 on 0", "gradient 1 on 1"}


def test_the_loss_of_gpipe_waits_for_all_replicas() -> None:
    events = event_graph(GPIPE, 2, (2, 1, 0))
    losses = [event for event in events if event.work is Work.LOSS]
    assert {(loss.replica, loss.microbatch) for loss in losses} == {
        (0, ALL_MICROBATCHES),
        (1, ALL_MICROBATCHES),
    }
    for loss in losses:
        waits = {(events[i].work, events[i].replica, events[i].microbatch) for i in loss.after}
        assert waits == {(Work.FORWARD, 0, 1), (Work.FORWARD, 1, 0)}


@given(schedules, stage_counts, microbatch_shares)
def test_every_event_occurs_once(schedule: Schedule, stages: int, shares: tuple[int, ...]) -> None:
    counts = Counter(
        (e.work, e.replica, e.stage, e.microbatch) for e in event_graph(schedule, stages, shares)
    )
    expected: Counter[tuple[Work, int, int, int]] = Counter()
    for replica, count in enumerate(shares):
        for stage in range(stages):
            works = {Work.FORWARD, Work.RECOMPUTE, Work.BACKWARD}
            works |= {Work.ACTIVATION} if stage < stages - 1 else set()
            works |= {Work.GRADIENT} if stage > 0 else set()
            expected.update((work, replica, stage, m) for work in works for m in range(count))
        losses = range(count) if schedule == ONE_F_ONE_B else [ALL_MICROBATCHES] * min(count, 1)
        expected.update((Work.LOSS, replica, stages - 1, m) for m in losses)
    assert counts == expected


@given(schedules, stage_counts, microbatch_shares)
def test_a_stage_does_one_thing_at_a_time(
    schedule: Schedule, stages: int, shares: tuple[int, ...]
) -> None:
    """Events follow their predecessors, and a computation waits for the stage's previous one."""
    events = event_graph(schedule, stages, shares)
    latest: dict[tuple[int, int], int] = {}
    for index, event in enumerate(events):
        assert all(before < index for before in event.after)
        place = event.replica, event.stage
        if place in latest:
            assert latest[place] in event.after
        if event.work in COMPUTING:
            latest[place] = index
