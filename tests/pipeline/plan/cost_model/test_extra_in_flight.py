"""An extra micro-batch is in flight only if memory allows it and the step gets no longer."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.pipeline.plan.cost_model.costs import Workload, layer_ranges
from lightning_dlres.pipeline.plan.cost_model.extra_in_flight import with_extra_in_flight
from lightning_dlres.pipeline.plan.cost_model.simulator import step_seconds
from lightning_dlres.pipeline.plan.schedules.base import Schedule
from lightning_dlres.pipeline.profile.cluster import Link
from lightning_dlres.pipeline.profile.run_profile import StepCosts
from tests.support.examples import examples, randoms, replica_counts, stage_counts
from tests.support.pipeline_profiles import (
    GPIPE,
    ONE_F_ONE_B,
    limited,
    plain_cluster,
    plain_layers,
    random_recompute,
    random_split,
    small_workload,
)


def two_stages(latency: float = 0.0, schedule: Schedule = ONE_F_ONE_B) -> Workload:
    links = (Link(ranks=(0, 1), latency=latency, bytes_per_second=1e9),) if latency else ()
    layers = plain_layers([1.0, 1.0], [2.0, 2.0])
    cluster = plain_cluster(2, links=links)
    return Workload(layers, StepCosts(), cluster, ((0, 1),), schedule, 8)


def test_equal_stages_do_not_wait_for_messages() -> None:
    workload = two_stages(latency=0.25)
    extra = with_extra_in_flight(workload, [1, 1], ())
    assert extra.extra_in_flight == 1
    # Without the extra micro-batch, two are in flight. After each of the first three pairs, the
    # stages wait for a message in each direction. With it, they wait only for the first and the
    # last message.
    assert step_seconds(workload, [1, 1]) == pytest.approx(9 * 3.0 + 8 * 0.25)
    assert step_seconds(extra, [1, 1]) == pytest.approx(9 * 3.0 + 2 * 0.25)


def test_an_extra_microbatch_is_taken_where_it_costs_nothing() -> None:
    assert with_extra_in_flight(two_stages(), [1, 1], ()).extra_in_flight == 1


def test_no_extra_microbatch_if_its_forward_would_delay_a_gradient() -> None:
    layers = plain_layers([4.0, 1.0, 1.0], [4.0, 1.0, 1.0])
    workload = Workload(layers, StepCosts(), plain_cluster(3), ((0, 1, 2),), ONE_F_ONE_B, 3)
    assert with_extra_in_flight(workload, [1, 1, 1], ()) == workload


@pytest.mark.parametrize(
    "workload", [two_stages(schedule=GPIPE), replace(two_stages(), microbatches=2)]
)
def test_no_extra_microbatch_if_no_more_would_be_in_flight(workload: Workload) -> None:
    assert with_extra_in_flight(workload, [1, 1], ()) == workload


@settings(max_examples=examples(150))
@given(randoms, stage_counts, replica_counts, st.integers(0, 6))
def test_an_extra_microbatch_neither_slows_the_step_nor_breaks_a_limit(
    random: Random, stages: int, replicas: int, free: int
) -> None:
    workload = small_workload(random, stages=stages, replicas=replicas)
    split = random_split(random, workload)
    recompute = random_recompute(random, workload)
    ranges = layer_ranges(split)
    held = [workload.bound_bytes(s, ranges[s], recompute) for s in range(stages)]
    workload = limited(workload, [size + free for size in held] * replicas)
    extended = with_extra_in_flight(workload, split, recompute)
    assert replace(extended, extra_in_flight=0) == workload
    before = step_seconds(workload, split, recompute)
    assert step_seconds(extended, split, recompute) <= before * (1 + 1e-9)
    for stage in range(stages):
        assert extended.bound_bytes(stage, ranges[stage], recompute) <= held[stage] + free
