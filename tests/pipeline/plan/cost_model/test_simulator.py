"""The simulated step, by hand and against stages that pass messages one action at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.pipeline.plan.cost_model.costs import BUCKET_BYTES, Workload
from lightning_dlres.pipeline.plan.cost_model.events import COMPUTING, Work, event_graph
from lightning_dlres.pipeline.plan.cost_model.simulator import (
    Timeline,
    run_events,
    simulate,
    stage_costs,
    step_seconds,
)
from lightning_dlres.pipeline.plan.schedules.base import ALL_MICROBATCHES, Op, Schedule
from lightning_dlres.pipeline.profile.cluster import Cluster, Device, Link
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, StepCosts
from tests.support.examples import examples, randoms, replica_counts, stage_counts
from tests.support.pipeline_profiles import (
    GPIPE,
    NO_STEP_COSTS,
    ONE_F_ONE_B,
    SCHEDULES,
    plain_cluster,
    plain_layers,
    random_recompute,
    random_split,
    small_workload,
    stage_per_layer,
)


def times(timeline: Timeline, name: str, stage: int, replica: int = 0) -> list[tuple[float, float]]:
    return [
        (a.start, a.end)
        for a in timeline.activities
        if (a.name, a.stage, a.replica) == (name, stage, replica)
    ]


def oracle(workload: Workload, split: Sequence[int], recompute: Collection[int]) -> float:
    """Return the seconds of a step, simulated in another way.

    Every stage has its own clock and goes through its actions as far as it can. A link carries one
    message after the other.
    """
    stages = workload.stages
    todo = {
        (replica, stage): deque(
            workload.schedule.actions(
                stages,
                stage,
                share,
                recompute=bool(recompute),
                extra_in_flight=workload.extra_in_flight,
            )
        )
        for replica, share in enumerate(workload.shares)
        if share
        for stage in range(stages)
    }
    costs = stage_costs(workload, split, recompute)
    clock = dict.fromkeys(todo, 0.0)
    forwards_left = {place: workload.shares[place[0]] for place in todo}
    link_free: dict[tuple[int, int, Op], float] = {}
    inbox: dict[tuple[int, int, Op], deque[float]] = {
        (*place, op): deque()
        for place in todo
        for op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT)
    }

    def perform(place: tuple[int, int], op: Op, is_whole_batch: bool) -> bool:
        replica, stage = place
        seconds = costs[place].seconds
        if op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
            if not inbox[replica, stage, op]:
                return False
            clock[place] = max(clock[place], inbox[replica, stage, op].popleft())
        elif op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
            is_activation = op is Op.SEND_ACTIVATION
            message_seconds = seconds[Work.ACTIVATION if is_activation else Work.GRADIENT]
            arrival = max(clock[place], link_free.get((replica, stage, op), 0.0)) + message_seconds
            link_free[replica, stage, op] = arrival
            receiving = Op.RECEIVE_ACTIVATION if is_activation else Op.RECEIVE_GRADIENT
            inbox[replica, stage + (1 if is_activation else -1), receiving].append(arrival)
        elif op is Op.LOSS and is_whole_batch:
            lasts = [place for place in todo if place[1] == stage]
            if any(forwards_left[last] for last in lasts):
                return False
            clock[place] = max(forwards_done[last] for last in lasts) + seconds[Work.LOSS]
        else:
            clock[place] += seconds[Work[op.name]]
            if op is Op.FORWARD:
                forwards_left[place] -= 1
                forwards_done[place] = clock[place]
        return True

    forwards_done: dict[tuple[int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for place, actions in todo.items():
            while actions and perform(
                place, actions[0].op, actions[0].microbatch == ALL_MICROBATCHES
            ):
                actions.popleft()
                moved = True
    assert not any(todo.values())
    return max(clock[place] + costs[place].tail for place in todo)


@settings(max_examples=examples(150))
@given(randoms, stage_counts, replica_counts, st.integers(0, 2))
def test_a_step_takes_as_long_as_stages_that_pass_messages(
    random: Random, stages: int, replicas: int, extra: int
) -> None:
    workload = small_workload(random, stages=stages, replicas=replicas, extra=extra)
    split = random_split(random, workload)
    recompute = random_recompute(random, workload)
    expected = oracle(workload, split, recompute)
    assert simulate(workload, split, recompute).step_seconds == pytest.approx(expected, rel=1e-12)
    assert step_seconds(workload, split, recompute) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=examples(100))
@given(randoms, stage_counts, replica_counts)
def test_an_event_starts_when_its_predecessors_end(
    random: Random, stages: int, replicas: int
) -> None:
    workload = small_workload(random, stages=stages, replicas=replicas)
    split = random_split(random, workload)
    events = event_graph(workload.schedule, stages, workload.shares)
    costs = stage_costs(workload, split, random_recompute(random, workload))
    starts, ends = run_events(events, costs)
    for event, start, end in zip(events, starts, ends, strict=True):
        assert start == max((ends[index] for index in event.after), default=0.0)
        assert end - start == pytest.approx(costs[event.replica, event.stage].seconds[event.work])
    for replica in range(replicas):
        for stage in range(stages):
            own = sorted(
                (start, end)
                for event, start, end in zip(events, starts, ends, strict=True)
                if (event.replica, event.stage) == (replica, stage) and event.work in COMPUTING
            )
            assert all(end <= start for (_, end), (start, _) in pairwise(own))


@settings(max_examples=examples(100))
@given(randoms, stage_counts, replica_counts)
def test_longer_work_never_shortens_the_step(random: Random, stages: int, replicas: int) -> None:
    """The planner relies on this: in a segment it takes the cheapest recomputation."""
    workload = small_workload(random, stages=stages, replicas=replicas)
    split = random_split(random, workload)
    recompute = random_recompute(random, workload)
    layers = list(workload.layers)
    index = random.randrange(len(layers))
    kind = random.randrange(len(workload.cluster.kinds))
    field = random.choice(["forward", "backward", "output_bytes", "gradient_output_bytes"])
    if field in ("forward", "backward"):
        seconds = list(getattr(layers[index], field))
        seconds[kind] += random.choice([0.25, 1.0, 20.0])
        longer = msgspec.structs.replace(layers[index], **{field: tuple(seconds)})
    else:
        more = getattr(layers[index], field) + random.randint(1, 50)
        longer = msgspec.structs.replace(layers[index], **{field: more})
    layers[index] = longer
    slower = replace(workload, layers=tuple(layers))
    before = step_seconds(workload, split, recompute)
    assert step_seconds(slower, split, recompute) >= before * (1 - 1e-12)
    also = {*recompute, random.randrange(len(layers))}
    assert step_seconds(workload, split, also) >= before * (1 - 1e-12)


class TestOneReplica:
    """Steps of one replica; a micro-batch takes 1 s forward and 2 s backward on each stage."""

    def test_1f1b_with_messages_and_a_loss(self) -> None:
        layers = plain_layers([1.0, 1.0], output_bytes=4, gradient_output_bytes=2)
        links = [Link(ranks=(0, 1), latency=0.25, bytes_per_second=16.0)]
        workload = stage_per_layer(layers, 2, step=StepCosts(loss=(0.5,)), links=links)
        timeline = simulate(workload, [1, 1])
        assert times(timeline, "forward", 0) == [(0, 1), (1, 2)]
        assert times(timeline, "activation", 0) == [(1, 1.5), (2, 2.5)]
        assert times(timeline, "forward", 1) == [(1.5, 2.5), (5, 6)]
        assert times(timeline, "loss", 1) == [(2.5, 3), (6, 6.5)]
        assert times(timeline, "backward", 1) == [(3, 5), (6.5, 8.5)]
        assert times(timeline, "gradient", 1) == [(5, 5.375), (8.5, 8.875)]
        assert times(timeline, "backward", 0) == [(5.375, 7.375), (8.875, 10.875)]
        assert timeline.step_seconds == 10.875
        assert timeline.busy_seconds == ((6.0, 7.0),)
        assert timeline.bubble == pytest.approx(1 - 13 / (2 * 10.875))

    def test_gpipe_with_messages_and_a_loss(self) -> None:
        layers = plain_layers([1.0, 1.0], output_bytes=24, gradient_output_bytes=40)
        links = [Link(ranks=(0, 1), latency=0.0, bytes_per_second=16.0)]
        workload = stage_per_layer(layers, 2, GPIPE, step=StepCosts(loss=(0.5,)), links=links)
        timeline = simulate(workload, [1, 1])
        # Messages are slower than stages: they queue on the link, and stages do not wait to send.
        assert times(timeline, "activation", 0) == [(1, 2.5), (2.5, 4)]
        assert times(timeline, "forward", 1) == [(2.5, 3.5), (4, 5)]
        assert times(timeline, "loss", 1) == [(5, 6)], "one loss over both micro-batches"
        assert times(timeline, "backward", 1) == [(6, 8), (8, 10)]
        assert times(timeline, "gradient", 1) == [(8, 10.5), (10.5, 13)]
        assert times(timeline, "backward", 0) == [(10.5, 12.5), (13, 15)]
        assert timeline.step_seconds == 15

    def test_three_stages_and_fewer_microbatches(self) -> None:
        timeline = simulate(
            stage_per_layer(plain_layers([1.0, 2.0, 1.0], [1.0, 2.0, 1.0]), 2), [1, 1, 1]
        )
        assert times(timeline, "forward", 1) == [(1, 3), (3, 5)]
        assert times(timeline, "forward", 2) == [(3, 4), (5, 6)]
        assert times(timeline, "backward", 2) == [(4, 5), (6, 7)]
        assert times(timeline, "backward", 1) == [(5, 7), (7, 9)]
        assert times(timeline, "backward", 0) == [(7, 8), (9, 10)]

    @given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 9))
    def test_equal_stages_follow_the_textbook_formula(
        self, schedule: Schedule, stages: int, microbatches: int
    ) -> None:
        """The bubble is (stages - 1) of (micro-batches + stages - 1) time slots."""
        timeline = simulate(
            stage_per_layer(plain_layers([1.0] * stages), microbatches, schedule), [1] * stages
        )
        assert timeline.step_seconds == 3 * (microbatches + stages - 1)
        assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))

    def test_a_message_takes_time_from_computation(self) -> None:
        step = StepCosts(message=(0.25,), update=(0.5,))
        layers = plain_layers([1.0] * 3, gradient_bytes=6)
        timeline = simulate(stage_per_layer(layers, 1, step=step), [1, 1, 1])
        assert times(timeline, "forward", 0) == [(0, 1.25)]
        assert times(timeline, "forward", 1) == [(1.25, 2.75)], "it receives and sends"
        assert times(timeline, "forward", 2) == [(2.75, 4)]
        # 3 of forward, 6 of backward, 4 messages at both ends, and the optimizer.
        assert timeline.step_seconds == 9 + 8 * 0.25 + 3

    def test_each_further_run_of_a_stage_has_an_overhead(self) -> None:
        layers, step = plain_layers([1.0] * 4), StepCosts(run_overhead_seconds=(0.5,))
        one, two = (
            Workload(layers, step, plain_cluster(4), replicas, ONE_F_ONE_B, 1)
            for replicas in (((0, 1),), ((0, 1), (2, 3)))
        )
        costs = one.stage_cost(0, 0, range(2), {1}).seconds
        assert (costs[Work.FORWARD], costs[Work.BACKWARD]) == (2, 4)
        # Two forwards and a backward, each with half of the overhead.
        assert costs[Work.RECOMPUTE] == 1.75
        # With several replicas every layer is a run of its own. Only the second forward is new.
        costs = two.stage_cost(0, 0, range(2), {1}).seconds
        assert (costs[Work.FORWARD], costs[Work.BACKWARD]) == (2.5, 4.5)
        assert costs[Work.RECOMPUTE] == 1.25

    def test_recomputation_hides_in_idle_time(self) -> None:
        layers = plain_layers([1.0, 1.0])
        plain, recomputed = (
            simulate(stage_per_layer(layers, 2), [1, 1], recompute) for recompute in ((), (0,))
        )
        assert times(plain, "backward", 0) == [(4, 6), (7, 9)]
        # Before the gradients arrive, at 4 and at 7.
        assert times(recomputed, "recompute", 0) == [(2, 3), (6, 7)]
        assert times(recomputed, "backward", 0) == [(4, 6), (7, 9)]
        assert recomputed.step_seconds == plain.step_seconds == 9
        assert recomputed.busy_seconds == ((8.0, 6.0),)

    def test_recomputation_delays_a_stage_without_idle_time(self) -> None:
        timeline = simulate(stage_per_layer(plain_layers([1.0, 1.0]), 2), [1, 1], (1,))
        assert times(timeline, "recompute", 1) == [(2, 3), (6, 7)]
        assert times(timeline, "backward", 1) == [(3, 5), (7, 9)]
        assert timeline.step_seconds == 11

    def test_some_layers_of_a_stage_can_be_recomputed(self) -> None:
        workload = stage_per_layer(plain_layers([1.0, 0.5]), 1)
        workload = replace(workload, cluster=plain_cluster(1), replicas=((0,),))
        timeline = simulate(workload, [2], (1,))
        assert times(timeline, "recompute", 0) == [(1.5, 2.0)]
        assert timeline.step_seconds == 5.0


def two_replicas(
    microbatches: int,
    schedule: Schedule = ONE_F_ONE_B,
    *,
    layers: Sequence[LayerProfile] = (),
    step: StepCosts = NO_STEP_COSTS,
    stages: int = 1,
    links: Sequence[Link] = (),
) -> Workload:
    """Return a workload whose second replica has devices of half the speed."""
    kinds = [0] * stages + [1] * stages
    cluster = Cluster(
        kinds=("fast", "slow"),
        devices=tuple(Device(kind=kind, power=1.0 / (1 + kind)) for kind in kinds),
        links=tuple(links),
    )
    layers = [
        msgspec.structs.replace(
            layer,
            forward=(layer.forward[0], 2 * layer.forward[0]),
            backward=(layer.backward[0], 2 * layer.backward[0]),
        )
        for layer in layers
    ]
    replicas = (tuple(range(stages)), tuple(range(stages, 2 * stages)))
    return Workload(tuple(layers), step, cluster, replicas, schedule, microbatches)


class TestTwoReplicas:
    def test_the_slower_replica_sets_the_step_of_1f1b(self) -> None:
        timeline = simulate(two_replicas(3, layers=plain_layers([1.0])), [1])
        assert times(timeline, "backward", 0) == [(1, 3), (4, 6)], (
            "it has two of three micro-batches"
        )
        assert times(timeline, "backward", 0, replica=1) == [(2, 6)]
        assert timeline.busy_seconds == ((6.0,), (6.0,))

    def test_losses_of_gpipe_wait_for_all_replicas(self) -> None:
        step = StepCosts(loss=(0.5, 1.0))
        workload = two_replicas(4, GPIPE, layers=plain_layers([1.0, 1.0]), step=step, stages=2)
        timeline = simulate(workload, [1, 1])
        assert times(timeline, "forward", 1)[-1] == (2, 3)
        assert times(timeline, "forward", 1, replica=1)[-1] == (4, 6)
        # Over the outputs of all replicas: four micro-batches.
        assert times(timeline, "loss", 1) == [(6, 8)]
        assert times(timeline, "loss", 1, replica=1) == [(6, 10)]
        assert times(timeline, "backward", 1)[0] == (8, 10)

    def test_a_replica_without_micro_batches_does_nothing(self) -> None:
        timeline = simulate(two_replicas(1, GPIPE, layers=plain_layers([1.0])), [1])
        assert {activity.replica for activity in timeline.activities} == {0}
        assert timeline.step_seconds == 3
        assert timeline.busy_seconds == ((3.0,), (0.0,))

    def test_gradients_travel_after_the_last_backward(self) -> None:
        layers = plain_layers([1.0], gradient_bytes=6)
        links = [Link(ranks=(0, 1), latency=0.25, bytes_per_second=4.0)]
        step = StepCosts(update=(1 / 6, 1 / 6))
        timeline = simulate(two_replicas(2, layers=layers, links=links, step=step), [1])
        # In a ring of two: half of it to the other and back, each after a latency.
        assert times(timeline, "sync", 0) == [(3, 5)]
        assert times(timeline, "sync", 0, replica=1) == [(6, 8)]
        assert timeline.step_seconds == 9

    @pytest.mark.parametrize(("seconds", "tail"), [(1.0, 1.0), (3.0, 3.0), (4.0, 5.0)])
    def test_buckets_travel_during_backward(self, seconds: float, tail: float) -> None:
        """The last layer's gradients are sent 3 s before the end, the first layer's at the end."""
        layers = plain_layers([1.0, 1.0], [3.0, 1.0], gradient_bytes=BUCKET_BYTES)
        links = [Link(ranks=(0, 1), latency=0.0, bytes_per_second=BUCKET_BYTES / seconds)]
        workload = two_replicas(1, layers=layers, links=links)
        assert workload.sync_tail(0, 0, range(2)) == pytest.approx(tail)

    def test_a_bucket_waits_until_it_is_full(self) -> None:
        layers = plain_layers([1.0] * 3, [5.0, 4.0, 1.0], gradient_bytes=BUCKET_BYTES // 2)
        links = [Link(ranks=(0, 1), latency=0.0, bytes_per_second=BUCKET_BYTES)]
        workload = two_replicas(1, layers=layers, links=links)
        # The two last layers fill a bucket 5 s before the end; half a bucket remains.
        assert workload.sync_tail(0, 0, range(3)) == pytest.approx(0.5)

    def test_the_slowest_link_of_three_replicas_counts(self) -> None:
        bandwidths = [((0, 1), 8.0), ((1, 2), 4.0), ((0, 2), 2.0)]
        links = [Link(ranks=ranks, latency=0.5, bytes_per_second=b) for ranks, b in bandwidths]
        workload = Workload(
            plain_layers([1.0], gradient_bytes=6),
            StepCosts(),
            plain_cluster(3, links=links),
            ((0,), (1,), (2,)),
            ONE_F_ONE_B,
            3,
        )
        assert workload.sync_seconds(0, 6) == pytest.approx(4 * 0.5 + 4 / 3 * 6 / 2)
