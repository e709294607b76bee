"""Peak memory of a stage, by hand and against the bounds that the planner relies on."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.pipeline.plan.cost_model.costs import layer_ranges
from lightning_dlres.pipeline.plan.cost_model.simulator import simulate
from lightning_dlres.pipeline.plan.schedules.base import Schedule
from lightning_dlres.pipeline.profile.run_profile import StepCosts
from tests.support.examples import examples, randoms, replica_counts, stage_counts
from tests.support.pipeline_profiles import (
    GPIPE,
    SCHEDULES,
    plain_cluster,
    plain_layers,
    random_recompute,
    random_split,
    small_workload,
    stage_per_layer,
)


class TestMemory:
    def test_micro_batches_in_flight_over_time(self) -> None:
        simulation = simulate(stage_per_layer(plain_layers([1.0, 1.0]), 3), [1, 1])
        assert simulation.in_flight(0, 0) == [(0, 1), (1, 2), (6, 1), (6, 2), (9, 1), (12, 0)]
        assert max(count for _, count in simulation.in_flight(0, 1)) == 1

    @settings(max_examples=examples(50))
    @given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 8), st.integers(0, 2))
    def test_as_many_micro_batches_are_in_flight_as_planned(
        self, schedule: Schedule, stages: int, count: int, extra: int
    ) -> None:
        workload = stage_per_layer(plain_layers([1.0] * stages), count, schedule)
        workload = replace(workload, extra_in_flight=extra)
        simulation = simulate(workload, [1] * stages)
        for stage in range(stages):
            assert max(n for _, n in simulation.in_flight(0, stage)) == workload.in_flight(stage)

    def test_peak_bytes_by_hand(self) -> None:
        layer = {
            "parameter_bytes": 100,
            "gradient_bytes": 80,
            "input_bytes": 5,
            "output_bytes": 7,
            "gradient_output_bytes": 11,
            "saved_bytes": 30,
            "workspace_bytes": 13,
        }
        layers = [
            msgspec.structs.replace(x, shared={"tied": 20})
            for x in plain_layers([1.0] * 4, **layer)
        ]
        step = StepCosts(loss_bytes=17, state_bytes_per_parameter_byte=1.5)
        workload = stage_per_layer(layers, 3, step=step)
        workload = replace(workload, cluster=plain_cluster(2), replicas=((0, 1),))
        # Weights, gradients, optimizer state, workspace and the batch.
        static = 220 + 180 + 270 + 13 + 15
        assert workload.peak_bytes(0, range(2), ()) == static + 11 + 2 * 2 * 37
        # One micro-batch is recomputed at a time; the input of the next layer stays saved.
        assert workload.peak_bytes(0, range(2), (0,)) == static + 11 + 2 * (7 + 37) + 37
        assert workload.peak_bytes(0, range(2), (1,)) == static + 11 + 2 * 37 + 37
        # The loss needs more memory than backward. One micro-batch and its input are held.
        assert workload.peak_bytes(1, range(2, 4), ()) == static + 4 + 5 + 5 + 2 * 37
        gpipe = replace(workload, schedule=GPIPE)
        bound = static + 4 + 5 + 3 * 17 + 3 * (5 + 2 * 37)
        assert gpipe.bound_bytes(1, range(2, 4), ()) == bound
        # Temporary memory of backward and of the loss is not needed at the same time.
        assert gpipe.peak_bytes(1, range(2, 4), ()) == bound - 17
        # While all micro-batches are in flight, half of the gradients do not exist yet. During the
        # second backward all exist, and those of one layer twice.
        assert gpipe.peak_bytes(0, range(2), ()) == static + 11 + 2 * 2 * 37
        # The loss check holds all outputs and the temporary memory of the whole batch's loss.
        large = replace(workload, step=msgspec.structs.replace(step, loss_bytes=170))
        assert large.peak_bytes(1, range(2, 4), ()) == static - 13 + 3 * (7 + 170)
        # The optimizer's step needs the largest layer's memory and half of all gradients.
        bytes_by_layer = zip((9, 120, 9, 9), layers, strict=True)
        updated = replace(
            workload,
            layers=tuple(msgspec.structs.replace(x, update_bytes=n) for n, x in bytes_by_layer),
            step=msgspec.structs.replace(step, update_bytes_per_byte=0.5),
        )
        assert updated.update_bytes(range(2)) == static - 13 + 120 + 180 // 2
        assert updated.peak_bytes(0, range(2), (0, 1)) == static - 13 + 120 + 180 // 2
        twice = replace(workload, step=msgspec.structs.replace(step, gradient_copies=2))
        assert twice.peak_bytes(0, range(2), ()) == workload.peak_bytes(0, range(2), ()) + 180
        assert simulate(workload, [2, 2]).peak_bytes == (
            workload.peak_bytes(0, range(2), ()),
            workload.peak_bytes(1, range(2, 4), ()),
        )

    def test_saved_tensors_of_later_layers_are_freed_during_backward(self) -> None:
        bottom, top = plain_layers([1.0] * 2, saved_bytes=30, output_bytes=7)
        bottom = msgspec.structs.replace(bottom, workspace_bytes=50)
        workload = stage_per_layer([bottom, top], 1)
        workload = replace(workload, cluster=plain_cluster(1), replicas=((0,),))
        assert workload.peak_bytes(0, range(2), ()) == 37 + 50

    @settings(max_examples=examples(100))
    @given(randoms, stage_counts, replica_counts)
    def test_recomputing_a_layer_frees_the_predicted_bytes(
        self, random: Random, stages: int, replicas: int
    ) -> None:
        workload = small_workload(random, stages=stages, replicas=replicas)
        recompute = set(random_recompute(random, workload))
        for stage, layers in enumerate(layer_ranges(random_split(random, workload))):
            for index in layers:
                less = workload.bound_bytes(stage, layers, recompute | {index})
                more = workload.bound_bytes(stage, layers, recompute - {index})
                assert less >= workload.peak_bytes(stage, layers, recompute | {index})
                # Saved tensors do not count in the loss check and in the optimizer's step.
                if min(less, more) > workload.idle_bytes(stage, layers):
                    assert more - less == workload.freed_by_recompute(stage, layers, index)
