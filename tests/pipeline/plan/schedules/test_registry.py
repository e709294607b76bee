"""A schedule registered from outside the package can be planned, simulated and trained with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from random import Random
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres import HeteroPipeStrategy, PipelinePlan
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.cost_model.simulator import simulate, step_seconds
from lightning_dlres.pipeline.plan.schedules import registry
from lightning_dlres.pipeline.plan.schedules.base import (
    ALL_MICROBATCHES,
    Action,
    Op,
    Schedule,
    backward_actions,
    forward_actions,
)
from lightning_dlres.pipeline.plan.schedules.check import check_schedule
from lightning_dlres.pipeline.plan.schedules.registry import (
    register_schedule,
    schedule_named,
    schedule_names,
)
from lightning_dlres.pipeline.plan.search.device_orders import search_plan
from tests.support.examples import examples
from tests.support.pipeline_profiles import GPIPE, ONE_F_ONE_B, small_workload
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import QUICK, Case, Classifier, differences_in, no_differences_in


class Reversed(Schedule):
    """All forwards, one loss over the whole batch, then the backwards from the last micro-batch
    to the first."""

    name: ClassVar[str] = "reversed"
    whole_batch_loss: ClassVar[bool] = True

    def build_actions(
        self, stages: int, stage: int, microbatches: int, recompute: bool, extra_in_flight: int
    ) -> list[Action]:
        loss = [Action(Op.LOSS, ALL_MICROBATCHES)] if stage == stages - 1 else []
        return [
            *(a for m in range(microbatches) for a in forward_actions(stages, stage, m)),
            *loss,
            *(
                a
                for m in reversed(range(microbatches))
                for a in backward_actions(stages, stage, m, recompute)
            ),
        ]


class ReversedByParts(Reversed):
    """The same order, with a loss per micro-batch."""

    name: ClassVar[str] = "reversed_by_parts"
    whole_batch_loss: ClassVar[bool] = False

    def build_actions(
        self, stages: int, stage: int, microbatches: int, recompute: bool, extra_in_flight: int
    ) -> list[Action]:
        whole = Action(Op.LOSS, ALL_MICROBATCHES)
        parts = [Action(Op.LOSS, m) for m in range(microbatches)]
        return [
            part
            for action in super().build_actions(stages, stage, microbatches, recompute, 0)
            for part in (parts if action == whole else [action])
        ]


TOYS = (Reversed, ReversedByParts)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the toy schedules for the test only: other tests quote the list of names."""
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    for toy in TOYS:
        register_schedule(toy)


def splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, layers)))


@pytest.mark.parametrize("toy", [toy() for toy in TOYS])
@settings(max_examples=examples(40))
@given(
    random=st.randoms(use_true_random=False),
    stages=st.integers(1, 3),
    recompute=st.sampled_from(["never", "always"]),
)
def test_the_planner_finds_the_fastest_split_of_a_registered_schedule(
    toy: Schedule, random: Random, stages: int, recompute: str
) -> None:
    workload = small_workload(random, stages=stages, recompute=recompute, schedule=toy)
    result = search_plan(workload, stages, keep_order=True)
    count = len(workload.layers)
    recomputed = range(count) if recompute == "always" else ()
    fastest = min(step_seconds(workload, s, recomputed) for s in splits(count, stages))
    assert result.seconds <= fastest * (1 + 1e-3)
    assert result.seconds >= fastest * (1 - 1e-9)


@pytest.mark.parametrize("name", [toy.name for toy in TOYS])
def test_a_plan_with_a_registered_schedule_round_trips_through_json(name: str) -> None:
    plan = PipelinePlan(replicas=((0, 1),), split=(2, 3), schedule=name)
    assert PipelinePlan.from_json(plan.to_json()) == plan
    assert HeteroPipeStrategy(schedule=name).schedule == name


def test_the_reversed_schedule_is_simulated_in_its_order() -> None:
    workload = small_workload(Random(3), stages=2, schedule=Reversed(), recompute="never")
    timeline = simulate(workload, (1, len(workload.layers) - 1), ())
    for stage in range(2):
        backwards = [
            a.microbatch
            for a in timeline.activities
            if a.name == "backward" and (a.replica, a.stage) == (0, stage)
        ]
        assert backwards == sorted(backwards, reverse=True)


CASES = {
    "whole": Case(Classifier, Reversed.name, Reversed.name),
    "by parts": Case(Classifier, ReversedByParts.name, ReversedByParts.name),
    "planned": Case(Classifier, Reversed.name, Reversed.name, options={"plan": None}),
    "recomputed": Case(
        Classifier,
        ReversedByParts.name,
        ReversedByParts.name,
        options={
            "plan": PipelinePlan(replicas=((0, 1),), split=(2, 3), recompute=(0, 1, 2, 3, 4)),
            "profile": QUICK,
        },
    ),
}


def train_with_toys(context: RankContext) -> dict[str, list[str]]:
    for toy in TOYS:
        register_schedule(toy)
    return differences_in(context, CASES)


@pytest.mark.parametrize("ranks", [2])
def test_training_with_a_registered_schedule_equals_plain_training(
    pool: RankPool, ranks: int
) -> None:
    assert pool.run(train_with_toys, ranks) == no_differences_in(CASES, ranks)


def test_the_strategy_names_the_registered_schedules_in_its_error() -> None:
    with pytest.raises(ConfigError, match="reversed_by_parts"):
        HeteroPipeStrategy(schedule="zigzag")
    with pytest.raises(ConfigError, match=r"one of 'gpipe', '1f1b', .*, got 'zigzag'"):
        schedule_named("zigzag")


def test_built_in_schedules_are_valid_and_registered() -> None:
    assert schedule_names()[:2] == ("gpipe", "1f1b")
    for schedule in (GPIPE, ONE_F_ONE_B):
        check_schedule(schedule)


@pytest.mark.parametrize("name", ["gpipe", "auto"])
def test_a_name_can_be_used_once(name: str) -> None:
    taken = type("Taken", (Reversed,), {"name": name})
    with pytest.raises(ConfigError, match=f"must be unused, got '{name}' for Taken"):
        register_schedule(taken)


def test_registering_a_class_twice_keeps_its_schedule() -> None:
    before = schedule_named(Reversed.name)
    assert register_schedule(Reversed) is Reversed
    assert schedule_named(Reversed.name) is before


def drop_last_backward(actions: list[Action], stage: int) -> list[Action]:
    return [a for a in actions if a != Action(Op.BACKWARD, 0)]


def turn_backwards_of_first_stage(actions: list[Action], stage: int) -> list[Action]:
    """Receive the gradients in another order than the second stage sends them."""
    kinds = (Op.RECOMPUTE, Op.RECEIVE_GRADIENT, Op.BACKWARD, Op.SEND_GRADIENT)
    backwards = [a for a in actions if a.op in kinds]
    turned = sorted(backwards, key=lambda a: a.microbatch)
    return [*(a for a in actions if a not in backwards), *turned] if stage == 0 else actions


def backward_before_gradient(actions: list[Action], stage: int) -> list[Action]:
    return sorted(actions, key=lambda a: a.op is Op.RECEIVE_GRADIENT)


def forward_twice(actions: list[Action], stage: int) -> list[Action]:
    return [*actions, *(a for a in actions if a.op is Op.FORWARD)]


def no_activation(actions: list[Action], stage: int) -> list[Action]:
    return [a for a in actions if a.op is not Op.SEND_ACTIVATION]


def loss_per_part(actions: list[Action], stage: int) -> list[Action]:
    return [Action(Op.LOSS, 0) if a.op is Op.LOSS else a for a in actions]


def losses_in_reverse(actions: list[Action], stage: int) -> list[Action]:
    others = [a for a in actions if a.op in (Op.FORWARD, Op.RECEIVE_ACTIVATION, Op.SEND_ACTIVATION)]
    losses = [a for a in actions if a.op is Op.LOSS]
    rest = [a for a in actions if a not in others and a not in losses]
    return [*others, *reversed(losses), *rest]


def recompute_early(actions: list[Action], stage: int) -> list[Action]:
    return sorted(actions, key=lambda a: a.op is Op.BACKWARD or a.op is Op.SEND_GRADIENT)


def test_losses_out_of_the_order_of_micro_batches_are_refused() -> None:
    class Broken(ReversedByParts):
        name: ClassVar[str] = "broken"

        def build_actions(
            self, stages: int, stage: int, microbatches: int, recompute: bool, extra_in_flight: int
        ) -> list[Action]:
            actions = super().build_actions(stages, stage, microbatches, recompute, extra_in_flight)
            return losses_in_reverse(actions, stage)

    with pytest.raises(ConfigError, match=r"a loss of micro-batch 3 .* too early"):
        register_schedule(Broken)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_last_backward, "got no backward of micro-batch 0 on stage 0"),
        (turn_backwards_of_first_stage, "a receive gradient .* is not in the order of sending"),
        (backward_before_gradient, "a backward .* comes too early"),
        (forward_twice, "a forward of micro-batch 0 on stage 0 that comes twice"),
        (no_activation, "a receive gradient .* that waits forever"),
        (loss_per_part, "a loss of micro-batch 0 .* on the wrong stage"),
        (recompute_early, "a recompute of micro-batch 3 .* comes too early"),
    ],
)
def test_a_schedule_that_breaks_a_rule_is_refused(change: object, message: str) -> None:
    class Broken(Reversed):
        name: ClassVar[str] = "broken"

        def build_actions(
            self, stages: int, stage: int, microbatches: int, recompute: bool, extra_in_flight: int
        ) -> list[Action]:
            actions = super().build_actions(stages, stage, microbatches, recompute, extra_in_flight)
            return change(actions, stage)  # type: ignore[operator, no-any-return]

    with pytest.raises(ConfigError, match=rf"schedule 'broken' must be valid .*{message}"):
        register_schedule(Broken)
    assert "broken" not in schedule_names()
