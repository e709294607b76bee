"""The search finds the fastest plan, compared with every plan and by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.footprint import smallest_limit
from lightning_dlres.pipeline.plan.cost_model.simulator import simulate, step_seconds
from lightning_dlres.pipeline.plan.plan import consecutive_replicas
from lightning_dlres.pipeline.plan.schedules.base import Schedule
from lightning_dlres.pipeline.plan.search import device_orders
from lightning_dlres.pipeline.plan.search.device_orders import (
    search_extra_in_flight,
    search_plan,
    start_order,
    start_split,
)
from lightning_dlres.pipeline.plan.search.grouping import (
    group_into_slots,
    replicas_of,
    stage_counts,
)
from lightning_dlres.pipeline.plan.search.milp import SplitProgram
from lightning_dlres.pipeline.profile.cluster import Cluster, Device, Link
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, StepCosts
from tests.support.examples import examples, randoms
from tests.support.pipeline_profiles import (
    GPIPE,
    ONE_F_ONE_B,
    SCHEDULES,
    large_workload,
    limited,
    plain_cluster,
    plain_layers,
    small_workload,
)
from tests.support.plan_oracle import (
    OPTIMALITY_GAP,
    check_optimal,
    check_sound,
    exhaustive,
    fastest_of_all,
    least_memory,
    randomly_limited,
    schedules,
    splits,
    with_memory_limit,
)


class TestAgainstEveryPlan:
    """Random workloads that brute force can search."""

    @settings(exhaustive, max_examples=examples(120))
    @given(randoms, st.integers(1, 3), schedules)
    def test_one_replica_without_limits(
        self, random: Random, stages: int, schedule: Schedule
    ) -> None:
        layers = random.randint(stages, 7)
        check_optimal(
            small_workload(random, stages=stages, layers=layers, schedule=schedule), stages
        )

    @settings(exhaustive, max_examples=examples(120))
    @given(randoms, st.integers(1, 3), schedules)
    def test_one_replica_with_scarce_memory(
        self, random: Random, stages: int, schedule: Schedule
    ) -> None:
        layers = random.randint(stages, 6)
        workload = small_workload(random, stages=stages, layers=layers, schedule=schedule)
        check_optimal(randomly_limited(random, workload, stages), stages)

    @settings(exhaustive, max_examples=examples(60))
    @given(randoms, st.integers(1, 3), schedules)
    def test_two_replicas_of_equal_devices(
        self, random: Random, stages: int, schedule: Schedule
    ) -> None:
        layers = random.randint(stages, 6)
        workload = small_workload(
            random, stages=stages, replicas=2, layers=layers, schedule=schedule
        )
        check_optimal(randomly_limited(random, workload, stages), stages)

    @settings(exhaustive, max_examples=examples(150))
    @given(randoms, st.integers(1, 2), schedules)
    def test_two_replicas_of_different_devices(
        self, random: Random, stages: int, schedule: Schedule
    ) -> None:
        layers = random.randint(stages, 6)
        workload = small_workload(
            random, stages=2 * stages, layers=max(layers, 4), schedule=schedule
        )
        workload = replace(workload, replicas=consecutive_replicas(2 * stages, stages))
        check_optimal(randomly_limited(random, workload, stages), stages)

    def test_devices_of_a_stage_with_different_cheapest_recomputations(self) -> None:
        """Two replicas of one stage, where one layer must be recomputed. The first device has three
        micro-batches, the second one two. Layer 0 costs them 1 s and 4 s, layer 1 3 s and 3.5 s.

        All forwards end after 2 * 7.5 = 15 s. Layer 1 is cheaper for the second device, but the
        step waits for the first one: with layer 0 this takes 3 (1 + 8) = 27 s more, and the second
        2 (4 + 6) = 20 s."""
        layers = tuple(
            LayerProfile(name=name, saved_bytes=10, forward=forward, backward=backward)
            for name, forward, backward in [
                ("0", (1.0, 4.0), (4.0, 3.0)),
                ("1", (3.0, 3.5), (4.0, 3.0)),
            ]
        )
        cluster = Cluster(kinds=("a", "b"), devices=(Device(kind=0), Device(kind=1)))
        workload = Workload(layers, StepCosts(), cluster, ((0,), (1,)), GPIPE, 5)
        # 3 * 10 bytes for each of two layers; the recomputed one needs 10 bytes temporarily.
        result = search_plan(with_memory_limit(workload, 40), 1)
        assert (result.recompute, result.seconds) == ((0,), 42.0)

    @settings(exhaustive, max_examples=examples(60))
    @given(randoms, st.sampled_from(["never", "always"]), schedules)
    def test_recompute_never_and_always(
        self, random: Random, recompute: str, schedule: Schedule
    ) -> None:
        workload = small_workload(random, stages=2, recompute=recompute, schedule=schedule)
        check_optimal(randomly_limited(random, workload, 2), 2)

    @settings(exhaustive, max_examples=examples(12))
    @given(randoms)
    def test_the_number_of_stages_is_chosen(self, random: Random) -> None:
        workload = small_workload(random, stages=4, layers=random.randint(3, 5))
        if random.random() < 0.5:
            workload = with_memory_limit(workload, round(least_memory(workload, 2) * 1.1))
        counts = [count for count in stage_counts(4) if count <= len(workload.layers)]
        optimum = min(fastest_of_all(workload, count) for count in counts)
        if optimum == inf:
            with pytest.raises(ConfigError, match="no plan fits"):
                search_plan(workload)
            return
        result = search_plan(workload)
        check_sound(result)
        assert optimum * (1 - 1e-9) <= result.seconds <= optimum * (1 + OPTIMALITY_GAP)

    @settings(exhaustive, max_examples=examples(40))
    @given(randoms, schedules)
    def test_a_given_order_is_kept(self, random: Random, schedule: Schedule) -> None:
        workload = small_workload(random, stages=3, schedule=schedule)
        result = search_plan(workload, keep_order=True)
        check_sound(result)
        assert result.workload.replicas == workload.replicas
        optimum = min(step_seconds(workload, split) for split in splits(workload))
        assert result.seconds <= optimum * (1 + OPTIMALITY_GAP)


class TestExtraInFlight:
    """One more micro-batch in flight: another split may be the fastest with it."""

    @settings(exhaustive, max_examples=examples(50))
    @given(randoms, st.integers(2, 3))
    def test_no_plan_in_this_order_is_faster(self, random: Random, stages: int) -> None:
        workload = small_workload(random, stages=stages, layers=random.randint(stages, 6))
        found = search_plan(workload, keep_order=True)
        result = search_extra_in_flight(found)
        check_sound(result)
        assert result.seconds <= found.seconds * (1 + 1e-9)
        either = [replace(workload, extra_in_flight=extra) for extra in (0, 1)]
        optimum = min(step_seconds(one, split) for one in either for split in splits(workload))
        assert result.seconds <= optimum * (1 + OPTIMALITY_GAP)

    @settings(exhaustive, max_examples=examples(30))
    @given(randoms)
    def test_it_fits_into_scarce_memory(self, random: Random) -> None:
        workload = randomly_limited(random, small_workload(random, stages=2, layers=4), 2)
        if fastest_of_all(workload, 2) == inf:
            return
        found = search_plan(workload, 2)
        result = search_extra_in_flight(found)
        check_sound(result)
        assert result.seconds <= found.seconds * (1 + 1e-9)

    def test_latency_moves_the_split(self) -> None:
        """Without the extra micro-batch, stages of 2 and 3 s forward take 46 s: each waits for the
        other's messages. With it, no stage waits, and 3 and 2 s are the faster split."""
        links = (Link(ranks=(0, 1), latency=2.0, bytes_per_second=1e9),)
        layers = plain_layers([1.0, 1.0, 1.0, 2.0], [2.0, 2.0, 2.0, 4.0])
        workload = Workload(
            layers, StepCosts(), plain_cluster(2, links=links), ((0, 1),), ONE_F_ONE_B, 4
        )
        found = search_plan(workload, keep_order=True)
        result = search_extra_in_flight(found)
        assert (found.split, result.split) == ((2, 2), (3, 1))
        assert result.workload.extra_in_flight == 1
        assert result.seconds == pytest.approx(40.0)


class TestStart:
    """The start of the search: the ratio order with a split in proportion to power."""

    @staticmethod
    def two_replicas() -> Workload:
        """Kind a is twice as fast as b; ranks 0 and 2 are of kind b, 1 and 3 of kind a.

        Nine layers take a 1 s forward and 2 s backward, with 20 bytes of gradients each. Split:
        a's power is 1, b's 1/2, so they get 6 layers and 3. Communication: they send 120 and 60 of
        180 bytes; the links have 6 bytes a second between a's devices and 12 between b's, which
        takes 20 s and 5 s. Order: compute times are equal, 18 s for two micro-batches, so the
        ratios are 0.9 for a and 3.6 for b, and b is the first stage.
        """
        layers = tuple(
            LayerProfile(
                name=f"layer{index}",
                parameter_bytes=20,
                gradient_bytes=20,
                forward=(1.0, 2.0),
                backward=(2.0, 4.0),
            )
            for index in range(9)
        )
        devices = [Device(kind=1, power=0.5), Device(kind=0, power=1.0)] * 2
        links = [((0, 2), 12.0), ((1, 3), 6.0)]
        cluster = Cluster(
            kinds=("a", "b"),
            devices=tuple(devices),
            links=tuple(
                Link(ranks=ranks, latency=0.0, bytes_per_second=speed)
                for ranks, speed in [*links, *(((a, b), inf) for a in (0, 2) for b in (1, 3))]
            ),
        )
        return Workload(layers, StepCosts(), cluster, consecutive_replicas(4, 2), ONE_F_ONE_B, 2)

    def test_the_order_and_the_split_by_hand(self) -> None:
        workload = self.two_replicas()
        slots = group_into_slots(workload.cluster, 2)
        assert slots == ((0, 2), (1, 3))
        assert start_order(workload, slots) == ((0, 2), (1, 3))
        reversed_slots = slots[::-1]
        assert start_order(workload, reversed_slots) == ((0, 2), (1, 3)), "from any order"
        assert start_split(workload) == (3, 6)
        assert start_split(replace(workload, replicas=((1, 0), (3, 2)))) == (6, 3)

    def test_the_step_of_the_start_by_hand(self) -> None:
        """One micro-batch on each replica. b: 6 s forward; a: 6 s and 12 s; b: 12 s of backward.
        a's gradients are complete 12 s before the end and take 2 (2 - 1) / 2 * 120 / 6 = 20 s in a
        ring of two; b's take 60 / 12 = 5 s after its backward."""
        workload = self.two_replicas()
        assert step_seconds(workload, (3, 6)) == 24 + 20
        assert search_plan(workload, 2).start_seconds == 24 + 20

    def test_exchanged_links_reverse_the_order(self) -> None:
        workload = self.two_replicas()
        old = workload.cluster
        links = [Link(ranks=x.ranks, latency=0.0, bytes_per_second=18.0) for x in old.links[:1]]
        links += [Link(ranks=x.ranks, latency=0.0, bytes_per_second=60.0) for x in old.links[1:2]]
        cluster = Cluster(kinds=old.kinds, devices=old.devices, links=(*links, *old.links[2:]))
        # 120 / 60 = 2 s for a, 60 / 18 = 3.3 s for b.
        slots = group_into_slots(cluster, 2)
        assert start_order(replace(workload, cluster=cluster), slots) == ((1, 3), (0, 2))

    def test_the_slowest_device_of_a_stage_sets_its_share(self) -> None:
        cluster = plain_cluster(4, powers=[1.0, 1.0, 0.5, 0.25])
        workload = Workload(
            plain_layers([1.0] * 10), StepCosts(), cluster, ((0, 2), (1, 3)), ONE_F_ONE_B, 4
        )
        assert start_split(workload) == (8, 2)

    @settings(exhaustive, max_examples=examples(25))
    @given(randoms, st.booleans(), st.sampled_from([4, 8, 16]))
    def test_no_result_is_slower_than_the_start(
        self, random: Random, gpt: bool, microbatches: int
    ) -> None:
        workload = large_workload(random, 14, 4, microbatches, gpt=gpt)
        slots = start_order(workload, group_into_slots(workload.cluster, 4))
        start = replace(workload, replicas=replicas_of(slots))
        split = start_split(start)
        if random.random() < 0.8:
            peaks = simulate(start, split).peak_bytes
            limits = [round(peak * random.uniform(0.85, 1.2)) for peak in peaks]
            by_rank = dict(zip(start.replicas[0], limits, strict=True))
            start = limited(start, [by_rank[rank] for rank in range(4)])
        try:
            result = search_plan(start, 4)
        except ConfigError:
            assert smallest_limit(start) > min(d.memory_limit or 0 for d in start.cluster.devices)
            return
        check_sound(result)
        for recompute in ((), range(14)):
            timeline = simulate(start, split, recompute)
            if all(
                peak <= (start.memory_limit(stage) or inf)
                for stage, peak in enumerate(timeline.peak_bytes)
            ):
                assert result.seconds <= timeline.step_seconds * (1 + 1e-12)
                assert result.start_seconds <= timeline.step_seconds * (1 + 1e-12)
        assert result.seconds <= result.start_seconds


class TestMemory:
    @settings(exhaustive, max_examples=examples(80))
    @given(randoms, st.integers(1, 3), st.integers(1, 2), st.sampled_from(["auto", "never"]))
    def test_the_smallest_limit_works_and_one_byte_less_does_not(
        self, random: Random, stages: int, replicas: int, recompute: str
    ) -> None:
        workload = small_workload(random, stages=stages, replicas=replicas, recompute=recompute)
        least = least_memory(workload, stages)
        with pytest.raises(ConfigError, match="no plan fits") as refusal:
            search_plan(with_memory_limit(workload, least - 1), stages)
        named = re.search(r"at least (\d+) bytes", str(refusal.value))
        assert named is not None
        assert int(named[1]) == least
        check_sound(search_plan(with_memory_limit(workload, least), stages))

    @settings(exhaustive, max_examples=examples(15))
    @given(randoms)
    def test_the_smallest_limit_over_all_numbers_of_stages(self, random: Random) -> None:
        workload = small_workload(random, stages=4, layers=random.randint(4, 6))
        least = min(least_memory(workload, stages) for stages in stage_counts(4))
        with pytest.raises(ConfigError, match=f"at least {least} bytes"):
            search_plan(with_memory_limit(workload, least - 1))
        check_sound(search_plan(with_memory_limit(workload, least)))

    def test_the_error_names_the_smallest_limit_that_works(self) -> None:
        layers = plain_layers([1.0] * 4, parameter_bytes=100, gradient_bytes=100)
        workload = Workload(layers, StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 2)
        # Two layers each: weights and gradients.
        with pytest.raises(ConfigError, match=r"at least 400 bytes.*got 300 B: no plan fits"):
            search_plan(with_memory_limit(workload, 300), 2)
        with pytest.raises(ConfigError, match=r"with the same limit on all\), got 100 B and 300 B"):
            search_plan(limited(workload, [100, 300]), 2)
        with pytest.raises(ConfigError, match="without recomputation"):
            search_plan(with_memory_limit(replace(workload, recompute="never"), 300), 2)

    def test_recomputation_is_free_where_a_stage_waits(self) -> None:
        """Two layers, two stages, two micro-batches; stage 0 holds both. With 1 s forward and 2 s
        backward, the first stage has time to recompute while it waits for a gradient."""
        layers = plain_layers([1.0, 1.0], saved_bytes=100, output_bytes=10)
        workload = Workload(layers, StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 2)
        free = search_plan(workload, 2)
        assert (free.recompute, free.seconds) == ((), 9.0)
        # Saved: 2 * 110 bytes on stage 0, and 110 on stage 1, which also holds its input.
        tight = search_plan(with_memory_limit(workload, 219), 2)
        assert (tight.recompute, tight.seconds) == ((0,), 9.0)

    def test_scarce_memory_of_the_first_stage_moves_layers_down(self) -> None:
        layers = plain_layers([1.0] * 6, parameter_bytes=100, gradient_bytes=100)
        workload = Workload(layers, StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 4)
        assert search_plan(workload, 2).split == (3, 3)
        assert search_plan(limited(workload, [400, None]), keep_order=True).split == (2, 4)


class TestDegenerate:
    """Workloads at the limits of what can be planned."""

    def test_one_stage(self) -> None:
        layers = plain_layers([1.0, 2.0, 3.0])
        result = search_plan(
            Workload(layers, StepCosts(), plain_cluster(1), ((0,),), ONE_F_ONE_B, 2), 1
        )
        assert (result.split, result.recompute, result.seconds) == ((3,), (), 36.0)
        assert result.start_seconds == 36.0

    def test_one_layer(self) -> None:
        workload = Workload(
            plain_layers([1.0]), StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 2
        )
        with pytest.raises(ConfigError, match=r"at least 2 layers for 2 ranks, .* got 1"):
            search_plan(workload)
        # One stage makes the two devices two replicas.
        result = search_plan(workload, 1)
        assert (result.workload.replicas, result.split) == (((0,), (1,)), (1,))
        assert result.seconds == 3.0
        alone = replace(workload, cluster=plain_cluster(1), replicas=((0,),))
        assert search_plan(alone).seconds == 6.0

    def test_as_many_stages_as_layers(self) -> None:
        layers = plain_layers([3.0, 1.0, 2.0])
        workload = Workload(layers, StepCosts(), plain_cluster(3), ((0, 1, 2),), GPIPE, 2)
        result = search_plan(workload, 3)
        assert result.split == (1, 1, 1)
        assert result.seconds == result.start_seconds == step_seconds(workload, (1, 1, 1))

    def test_more_stages_than_layers(self) -> None:
        workload = Workload(
            plain_layers([1.0]), StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 2
        )
        with pytest.raises(ConfigError, match=r"at most the number of layers \(1\), got 2"):
            search_plan(workload, 2)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("limit", [None, 800])
    def test_layers_without_any_time(self, schedule: Schedule, limit: int | None) -> None:
        layers = plain_layers([0.0] * 5, parameter_bytes=100, gradient_bytes=100, saved_bytes=9)
        workload = Workload(layers, StepCosts(), plain_cluster(2), ((0, 1),), schedule, 3)
        result = search_plan(with_memory_limit(workload, limit), 2)
        check_sound(result)
        assert result.seconds == 0.0

    def test_some_layers_without_any_time(self) -> None:
        layers = plain_layers([0.0, 4.0, 0.0, 0.0, 4.0, 0.0])
        workload = Workload(layers, StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 4)
        result = search_plan(workload, 2)
        # 12 s a stage and micro-batch, four of them and one to fill; any cut between 2 and 4.
        assert result.seconds == 60.0
        assert result.split[0] in (2, 3, 4)

    def test_ties_have_the_same_result_every_time(self) -> None:
        layers = plain_layers([1.0] * 8)
        workload = Workload(layers, StepCosts(), plain_cluster(4), ((0, 1, 2, 3),), ONE_F_ONE_B, 4)
        plans = {
            (d.workload.replicas, d.split) for d in (search_plan(workload, 4) for _ in range(3))
        }
        assert plans == {(((0, 1, 2, 3),), (2, 2, 2, 2))}

    def test_one_microbatch(self) -> None:
        # Nothing overlaps, and only layers take time: every split is equally fast.
        workload = Workload(
            plain_layers([1.0] * 4), StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 1
        )
        assert search_plan(workload, 2).seconds == 12.0


class TestLittleTime:
    """A search that reaches the time limit of HiGHS; the plan states its gap."""

    @pytest.fixture
    def hard(self) -> Workload:
        return large_workload(Random(5), 24, 4, 16, gpt=False, slack=2.0)

    def test_a_program_without_a_solution_in_time_returns_none(self, hard: Workload) -> None:
        program = SplitProgram(hard, seconds=0.0)
        assert program.solve(inf) is None
        assert not program.in_time

    def test_the_gap_is_wider_after_the_time_limit(self, hard: Workload) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_orders, "SplitProgram", partial(SplitProgram, seconds=0.0))
            result = search_plan(hard, keep_order=True)
        check_sound(result)
        best = search_plan(hard, keep_order=True)
        assert best.seconds <= result.seconds
        assert best.seconds >= result.seconds * (1 - result.gap)
        assert result.gap > best.gap


class TestManyOrders:
    """Workloads with more orders than are searched one by one."""

    @settings(exhaustive, max_examples=examples(15))
    @given(randoms, st.integers(4, 16))
    def test_exchanges_are_not_slower_than_the_start(
        self, random: Random, microbatches: int
    ) -> None:
        workload = large_workload(random, 10, 4, microbatches, gpt=random.random() < 0.5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_orders, "_MAX_ORDERS", 1)
            result = search_plan(workload, 4)
        check_sound(result)
        assert result.seconds <= result.start_seconds
        assert result.seconds >= search_plan(workload, 4).seconds * (1 - OPTIMALITY_GAP)

    @settings(exhaustive, max_examples=examples(60))
    @given(randoms, st.integers(2, 3))
    def test_a_feasible_order_is_found(self, random: Random, stages: int) -> None:
        workload = small_workload(random, stages=stages, layers=random.randint(stages, 5))
        workload = randomly_limited(random, workload, stages)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_orders, "_MAX_ORDERS", 1)
            try:
                check_sound(search_plan(workload, stages))
            except ConfigError:
                assert fastest_of_all(workload, stages) == inf
