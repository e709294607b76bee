"""Schedules run without deadlock in stages that pass messages, and do everything once."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.schedules.base import ALL_MICROBATCHES, Action, Op, Schedule
from tests.support.examples import examples
from tests.support.pipeline_profiles import GPIPE, ONE_F_ONE_B, SCHEDULES

schedules = st.sampled_from(SCHEDULES)
stage_counts = st.integers(1, 7)
microbatch_counts = st.integers(0, 12)
extras = st.integers(0, 3)


def actions_of_stages(
    schedule: Schedule, stages: int, microbatches: int, extra: int = 0
) -> list[list[Action]]:
    return [
        schedule.actions(stages, stage, microbatches, extra_in_flight=extra)
        for stage in range(stages)
    ]


def microbatches_of(op: Op, actions: list[Action]) -> list[int]:
    return [action.microbatch for action in actions if action.op is op]


class Simulation:
    """Simulation of all stages; messages on a link arrive in the order of sending."""

    def __init__(self, actions: list[list[Action]]) -> None:
        self.actions = actions
        # Number of actions that each stage has done.
        self.position = [0] * len(actions)
        # (stage that receives, kind of message) -> micro-batches on their way.
        self.links: dict[tuple[int, str], deque[int]] = {
            (stage, kind): deque()
            for stage in range(len(actions))
            for kind in ("activation", "gradient")
        }
        self.has_input = [set[int]() for _ in actions]
        self.has_output = [set[int]() for _ in actions]
        self.has_gradient = [set[int]() for _ in actions]
        self.done = [set[int]() for _ in actions]

    def run(self) -> None:
        """Advance every stage as far as possible, until all reach the end."""
        while any(self.step(stage) for stage in range(len(self.actions))):
            pass
        for stage, own in enumerate(self.actions):
            assert self.position[stage] == len(own), (
                f"stage {stage} waits for ever for {own[self.position[stage]]}"
            )
        assert not any(self.links.values()), "a message was sent and not received"

    def step(self, stage: int) -> bool:
        if self.position[stage] == len(self.actions[stage]):
            return False
        action = self.actions[stage][self.position[stage]]
        if not self.perform(stage, action.op, action.microbatch):
            return False
        self.position[stage] += 1
        return True

    def perform(self, stage: int, op: Op, m: int) -> bool:
        last = stage == len(self.actions) - 1
        if op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
            link = self.links[stage, "activation" if op is Op.RECEIVE_ACTIVATION else "gradient"]
            if not link:
                return False
            assert link.popleft() == m, "received in another order than sent"
            (self.has_input if op is Op.RECEIVE_ACTIVATION else self.has_gradient)[stage].add(m)
        elif op is Op.FORWARD:
            assert stage == 0 or m in self.has_input[stage]
            assert m not in self.has_output[stage], "forward twice"
            self.has_output[stage].add(m)
        elif op is Op.SEND_ACTIVATION:
            assert m in self.has_output[stage]
            assert not last
            self.links[stage + 1, "activation"].append(m)
        elif op is Op.LOSS:
            assert last
            self.has_gradient[stage] |= self.has_output[stage] if m == ALL_MICROBATCHES else {m}
        elif op is Op.BACKWARD:
            assert m in self.has_gradient[stage] & self.has_output[stage]
            assert m not in self.done[stage], "backward twice"
            self.done[stage].add(m)
        else:
            assert m in self.done[stage]
            self.links[stage - 1, "gradient"].append(m)
        return True


@settings(max_examples=examples(200))
@given(schedules, stage_counts, microbatch_counts, extras)
def test_all_stages_together_reach_the_end(
    schedule: Schedule, stages: int, microbatches: int, extra: int
) -> None:
    simulation = Simulation(actions_of_stages(schedule, stages, microbatches, extra))
    simulation.run()
    assert simulation.done == [set(range(microbatches))] * stages


@given(schedules, stage_counts, microbatch_counts, extras)
def test_every_microbatch_runs_once_and_in_order(
    schedule: Schedule, stages: int, microbatches: int, extra: int
) -> None:
    everything = list(range(microbatches))
    for stage, own in enumerate(actions_of_stages(schedule, stages, microbatches, extra)):
        for op in (Op.FORWARD, Op.BACKWARD):
            assert microbatches_of(op, own) == everything
        for op in (Op.RECEIVE_ACTIVATION, Op.SEND_GRADIENT):
            assert microbatches_of(op, own) == (everything if stage > 0 else [])
        for op in (Op.SEND_ACTIVATION, Op.RECEIVE_GRADIENT):
            assert microbatches_of(op, own) == (everything if stage < stages - 1 else [])


def in_flight(actions: list[Action]) -> int:
    """Return the largest number of micro-batches between forward and backward."""
    held = most = 0
    for action in actions:
        held += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
        most = max(most, held)
    return most


@given(schedules, stage_counts, microbatch_counts, extras)
def test_stages_before_the_last_run_ahead_by_the_extra_micro_batches(
    schedule: Schedule, stages: int, microbatches: int, extra: int
) -> None:
    for stage, own in enumerate(actions_of_stages(schedule, stages, microbatches, extra)):
        ahead = stages - stage + (extra if stage < stages - 1 else 0)
        expected = microbatches if schedule == GPIPE else min(ahead, microbatches)
        assert in_flight(own) == expected
        assert schedule.max_in_flight(stages, stage, microbatches, extra) == expected


@given(stage_counts, microbatch_counts)
def test_1f1b_holds_as_few_micro_batches_as_possible(stages: int, microbatches: int) -> None:
    all_actions = actions_of_stages(ONE_F_ONE_B, stages, microbatches)
    for stage, own in enumerate(all_actions):
        assert in_flight(own) == min(stages - stage, microbatches)
        assert ONE_F_ONE_B.max_in_flight(stages, stage, microbatches) == in_flight(own)
    for m in range(microbatches):
        # The last stage runs each backward right after its forward: the gradient leaves early.
        forward = all_actions[-1].index(Action(Op.FORWARD, m))
        assert all_actions[-1][forward + 1 : forward + 3] == [
            Action(Op.LOSS, m),
            Action(Op.BACKWARD, m),
        ]


@given(stage_counts, microbatch_counts)
def test_gpipe_computes_one_loss_between_all_forwards_and_all_backwards(
    stages: int, microbatches: int
) -> None:
    *others, last = actions_of_stages(GPIPE, stages, microbatches)
    assert not any(microbatches_of(Op.LOSS, actions) for actions in others)
    computed = [a.op for a in last if a.op in (Op.FORWARD, Op.LOSS, Op.BACKWARD)]
    assert computed == [Op.FORWARD] * microbatches + [Op.LOSS] + [Op.BACKWARD] * microbatches
    assert microbatches_of(Op.LOSS, last) == [ALL_MICROBATCHES]
    for actions in others:
        assert in_flight(actions) == microbatches


@pytest.mark.parametrize(
    ("schedule", "arguments", "words"),
    [
        (GPIPE, (2, 2, 1), r"stage must be .* stages \(2\), got 2"),
        (ONE_F_ONE_B, (2, -1, 1), "stage must be at least 0 .*, got -1"),
        (GPIPE, (0, 0, 1), r"stage must be .* stages \(0\), got 0"),
        (ONE_F_ONE_B, (2, 0, -1), "microbatches must be at least 0, got -1"),
    ],
)
def test_bad_arguments_are_refused(
    schedule: Schedule, arguments: tuple[int, int, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        schedule.actions(*arguments)
