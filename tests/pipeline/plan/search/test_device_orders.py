"""The planner's plan is the best there is: held against every plan, and worked out by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import chain, combinations, pairwise, permutations, product
from math import inf
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.cost_model.costs import Workload, layer_ranges
from lightning_dlres.pipeline.plan.cost_model.footprint import smallest_limit
from lightning_dlres.pipeline.plan.cost_model.simulator import simulate, step_seconds
from lightning_dlres.pipeline.plan.plan import arrange
from lightning_dlres.pipeline.plan.schedules.base import Schedule
from lightning_dlres.pipeline.plan.search import device_orders
from lightning_dlres.pipeline.plan.search.device_orders import (
    SearchResult,
    search_plan,
    start_order,
    start_split,
)
from lightning_dlres.pipeline.plan.search.grouping import group, replicas_of, stage_counts
from lightning_dlres.pipeline.plan.search.milp import SplitProgram
from lightning_dlres.pipeline.profile.cluster import Cluster, Device, Link
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, StepCosts
from tests.support.examples import examples
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

OPTIMAL = 1e-3
randoms = st.randoms(use_true_random=False)
schedules = st.sampled_from(SCHEDULES)
exhaustive = settings(
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def orders(workload: Workload, stages: int) -> Iterator[Workload]:
    for slots in permutations(group(workload.cluster, stages)):
        yield replace(workload, replicas=replicas_of(slots))


def splits(workload: Workload) -> Iterator[tuple[int, ...]]:
    count = len(workload.layers)
    for cuts in combinations(range(1, count), workload.stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, count)))


def choices(workload: Workload, layers: range) -> Iterator[tuple[int, ...]]:
    """Which of its layers a stage may recompute, whatever memory says; smaller sets first."""
    if workload.recompute == "always":
        return iter([tuple(layers)])
    most = 0 if workload.recompute == "never" else len(layers)
    return chain.from_iterable(combinations(layers, count) for count in range(most + 1))


def fitting(workload: Workload, stage: int, layers: range) -> list[tuple[int, ...]]:
    """What a stage may recompute so that its layers fit into memory. Of sets that contain each
    other the smallest: `test_simulator` shows that the larger one's step is no shorter."""
    limit, found = workload.memory_limit(stage), list[tuple[int, ...]]()
    for chosen in choices(workload, layers):
        if any(set(less) <= set(chosen) for less in found):
            continue
        if limit is None or workload.bound_bytes(stage, layers, chosen) <= limit:
            found.append(chosen)
    return found


def fastest_of_all(workload: Workload, stages: int) -> float:
    """Return the seconds of the best of all plans; infinite where none fits into memory."""
    best = inf
    for arranged in orders(workload, stages):
        fits = cache(lambda stage, layers, arranged=arranged: fitting(arranged, stage, layers))
        for split in splits(arranged):
            for recompute in product(*(fits(*run) for run in enumerate(layer_ranges(split)))):
                best = min(best, step_seconds(arranged, split, list(chain(*recompute))))
    return best


def least_memory(workload: Workload, stages: int) -> int:
    """Return the smallest limit for all devices under which some plan fits."""
    arranged = next(orders(workload, stages))
    return min(
        max(
            min(arranged.bound_bytes(stage, layers, chosen) for chosen in choices(arranged, layers))
            for stage, layers in enumerate(layer_ranges(split))
        )
        for split in splits(arranged)
    )


def everywhere(workload: Workload, limit: int | None) -> Workload:
    return limited(workload, [limit] * len(workload.cluster.devices))


def randomly_limited(random: Random, workload: Workload, stages: int) -> Workload:
    """Limits that bind as a rule, unlike on every device, and now and then too small."""
    least = least_memory(workload, stages)
    return limited(
        workload,
        [
            random.choice([None, *(round(least * factor) for factor in (0.9, 1, 1.05, 1.2, 1.5))])
            for _ in workload.cluster.devices
        ],
    )


def check_sound(found: SearchResult) -> None:
    """The plan is one, fits into memory, and takes as long as the simulator says."""
    workload = found.workload
    timeline = simulate(workload, found.split, found.recompute)
    assert found.seconds == pytest.approx(timeline.step_seconds, rel=1e-9, abs=1e-12)
    assert min(found.split) >= 1
    assert sum(found.split) == len(workload.layers)
    for stage, peak in enumerate(timeline.peak_bytes):
        limit = workload.memory_limit(stage)
        assert limit is None or peak <= limit


def check_optimal(workload: Workload, stages: int) -> None:
    optimum = fastest_of_all(workload, stages)
    if optimum == inf:
        with pytest.raises(ConfigError, match="no plan fits"):
            search_plan(workload, stages)
        return
    found = search_plan(workload, stages)
    check_sound(found)
    assert found.seconds <= optimum * (1 + OPTIMAL)
    assert found.seconds >= optimum * (1 - 1e-9)


class TestAgainstEveryPlan:
    @settings(exhaustive, max_examples=examples(120))
    @given(randoms, st.integers(1, 3), schedules)
    def test_one_machine(self, random: Random, stages: int, schedule: Schedule) -> None:
        layers = random.randint(stages, 7)
        check_optimal(
            small_workload(random, stages=stages, layers=layers, schedule=schedule), stages
        )

    @settings(exhaustive, max_examples=examples(120))
    @given(randoms, st.integers(1, 3), schedules)
    def test_one_machine_with_little_memory(
        self, random: Random, stages: int, schedule: Schedule
    ) -> None:
        layers = random.randint(stages, 6)
        workload = small_workload(random, stages=stages, layers=layers, schedule=schedule)
        check_optimal(randomly_limited(random, workload, stages), stages)

    @settings(exhaustive, max_examples=examples(60))
    @given(randoms, st.integers(1, 3), schedules)
    def test_two_replicas(self, random: Random, stages: int, schedule: Schedule) -> None:
        layers = random.randint(stages, 6)
        workload = small_workload(
            random, stages=stages, replicas=2, layers=layers, schedule=schedule
        )
        check_optimal(randomly_limited(random, workload, stages), stages)

    @settings(exhaustive, max_examples=examples(150))
    @given(randoms, st.integers(1, 2), schedules)
    def test_two_replicas_whose_stages_are_unlike(
        self, random: Random, stages: int, schedule: Schedule
    ) -> None:
        layers = random.randint(stages, 6)
        workload = small_workload(
            random, stages=2 * stages, layers=max(layers, 4), schedule=schedule
        )
        workload = replace(workload, replicas=arrange(2 * stages, stages))
        check_optimal(randomly_limited(random, workload, stages), stages)

    def test_unlike_devices_that_disagree_about_what_is_cheap_to_recompute(self) -> None:
        """Two replicas of one stage, and a layer has to be recomputed. The first device has three
        micro-batches, the second one two: layer 0 costs them 1 s and 4 s, layer 1 3 s and 3.5 s.

        All forwards have ended after 2 * 7.5 = 15 s. The second device would rather recompute layer
        1, but the step waits for the first one: 3 (1 + 8) = 27 s more with layer 0, while the other
        takes 2 (4 + 6) = 20 s."""
        layers = tuple(
            LayerProfile(name=name, saved_bytes=10, forward=forward, backward=backward)
            for name, forward, backward in [
                ("0", (1.0, 4.0), (4.0, 3.0)),
                ("1", (3.0, 3.5), (4.0, 3.0)),
            ]
        )
        cluster = Cluster(kinds=("a", "b"), devices=(Device(kind=0), Device(kind=1)))
        workload = Workload(layers, StepCosts(), cluster, ((0,), (1,)), GPIPE, 5)
        # 3 * 10 for each of two layers; one of them is recomputed with 10 bytes for a moment.
        found = search_plan(everywhere(workload, 40), 1)
        assert (found.recompute, found.seconds) == ((0,), 42.0)

    @settings(exhaustive, max_examples=examples(60))
    @given(randoms, st.sampled_from(["never", "always"]), schedules)
    def test_without_a_choice_of_what_is_recomputed(
        self, random: Random, recompute: str, schedule: Schedule
    ) -> None:
        workload = small_workload(random, stages=2, recompute=recompute, schedule=schedule)
        check_optimal(randomly_limited(random, workload, 2), 2)

    @settings(exhaustive, max_examples=examples(12))
    @given(randoms)
    def test_the_number_of_stages_is_chosen_too(self, random: Random) -> None:
        workload = small_workload(random, stages=4, layers=random.randint(3, 5))
        if random.random() < 0.5:
            workload = everywhere(workload, round(least_memory(workload, 2) * 1.1))
        counts = [count for count in stage_counts(4) if count <= len(workload.layers)]
        optimum = min(fastest_of_all(workload, count) for count in counts)
        if optimum == inf:
            with pytest.raises(ConfigError, match="no plan fits"):
                search_plan(workload)
            return
        found = search_plan(workload)
        check_sound(found)
        assert optimum * (1 - 1e-9) <= found.seconds <= optimum * (1 + OPTIMAL)

    @settings(exhaustive, max_examples=examples(40))
    @given(randoms, schedules)
    def test_only_splits_in_an_order_that_is_given(
        self, random: Random, schedule: Schedule
    ) -> None:
        workload = small_workload(random, stages=3, schedule=schedule)
        found = search_plan(workload, keep_order=True)
        check_sound(found)
        assert found.workload.replicas == workload.replicas
        optimum = min(step_seconds(workload, split) for split in splits(workload))
        assert found.seconds <= optimum * (1 + OPTIMAL)


class TestStart:
    """E4's order with the split of E2, the plan that every other one is measured against."""

    @staticmethod
    def two_replicas() -> Workload:
        """Kind a is twice as fast as b; ranks 0 and 2 are of kind b, 1 and 3 of kind a.

        Nine layers that take a 1 s forward and 2 s backward, with 20 bytes of gradients each. E2:
        a's power is 1, b's 1/2, so 6 layers and 3. E3: 120 and 60 of 180 bytes. a's devices are
        joined by 6 bytes a second, b's by 12: 20 s and 5 s. E4: compute times are alike, 18 s for
        two micro-batches, so the ratios are 0.9 for a and 3.6 for b: b is the first stage.
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
        return Workload(layers, StepCosts(), cluster, arrange(4, 2), ONE_F_ONE_B, 2)

    def test_order_and_split_by_hand(self) -> None:
        workload = self.two_replicas()
        slots = group(workload.cluster, 2)
        assert slots == ((0, 2), (1, 3))
        assert start_order(workload, slots) == ((0, 2), (1, 3))
        reversed_slots = slots[::-1]
        assert start_order(workload, reversed_slots) == ((0, 2), (1, 3)), "whatever comes first"
        assert start_split(workload) == (3, 6)
        assert start_split(replace(workload, replicas=((1, 0), (3, 2)))) == (6, 3)

    def test_its_step_by_hand(self) -> None:
        """One micro-batch on each replica. b: 6 s forward; a: 6 s and 12 s; b: 12 s of backward.
        a's gradients are complete 12 s before the end and take 2 (2 - 1) / 2 * 120 / 6 = 20 s in a
        ring of two; b's take 60 / 12 = 5 s after its backward."""
        workload = self.two_replicas()
        assert step_seconds(workload, (3, 6)) == 24 + 20
        assert search_plan(workload, 2).start_seconds == 24 + 20

    def test_the_other_way_round_when_links_are_exchanged(self) -> None:
        workload = self.two_replicas()
        old = workload.cluster
        links = [Link(ranks=x.ranks, latency=0.0, bytes_per_second=18.0) for x in old.links[:1]]
        links += [Link(ranks=x.ranks, latency=0.0, bytes_per_second=60.0) for x in old.links[1:2]]
        cluster = Cluster(kinds=old.kinds, devices=old.devices, links=(*links, *old.links[2:]))
        # 120 / 60 = 2 s for a, 60 / 18 = 3.3 s for b.
        slots = group(cluster, 2)
        assert start_order(replace(workload, cluster=cluster), slots) == ((1, 3), (0, 2))

    def test_the_slowest_device_of_a_stage_sets_its_share(self) -> None:
        cluster = plain_cluster(4, powers=[1.0, 1.0, 0.5, 0.25])
        workload = Workload(
            plain_layers([1.0] * 10), StepCosts(), cluster, ((0, 2), (1, 3)), ONE_F_ONE_B, 4
        )
        assert start_split(workload) == (8, 2)

    @settings(exhaustive, max_examples=examples(25))
    @given(randoms, st.booleans(), st.sampled_from([4, 8, 16]))
    def test_no_plan_is_worse(self, random: Random, gpt: bool, microbatches: int) -> None:
        workload = large_workload(random, 14, 4, microbatches, gpt=gpt)
        slots = start_order(workload, group(workload.cluster, 4))
        start = replace(workload, replicas=replicas_of(slots))
        split = start_split(start)
        if random.random() < 0.8:
            peaks = simulate(start, split).peak_bytes
            limits = [round(peak * random.uniform(0.85, 1.2)) for peak in peaks]
            by_rank = dict(zip(start.replicas[0], limits, strict=True))
            start = limited(start, [by_rank[rank] for rank in range(4)])
        try:
            found = search_plan(start, 4)
        except ConfigError:
            assert smallest_limit(start) > min(d.memory_limit or 0 for d in start.cluster.devices)
            return
        check_sound(found)
        for recompute in ((), range(14)):
            timeline = simulate(start, split, recompute)
            if all(
                peak <= (start.memory_limit(stage) or inf)
                for stage, peak in enumerate(timeline.peak_bytes)
            ):
                assert found.seconds <= timeline.step_seconds * (1 + 1e-12)
                assert found.start_seconds <= timeline.step_seconds * (1 + 1e-12)
        assert found.seconds <= found.start_seconds


class TestMemory:
    @settings(exhaustive, max_examples=examples(80))
    @given(randoms, st.integers(1, 3), st.integers(1, 2), st.sampled_from(["auto", "never"]))
    def test_the_smallest_limit_works_and_one_byte_less_does_not(
        self, random: Random, stages: int, replicas: int, recompute: str
    ) -> None:
        workload = small_workload(random, stages=stages, replicas=replicas, recompute=recompute)
        least = least_memory(workload, stages)
        with pytest.raises(ConfigError, match="no plan fits") as refusal:
            search_plan(everywhere(workload, least - 1), stages)
        wanted = re.search(r"at least (\d+) bytes", str(refusal.value))
        assert wanted is not None
        assert int(wanted[1]) == least
        check_sound(search_plan(everywhere(workload, least), stages))

    @settings(exhaustive, max_examples=examples(15))
    @given(randoms)
    def test_of_all_numbers_of_stages(self, random: Random) -> None:
        workload = small_workload(random, stages=4, layers=random.randint(4, 6))
        least = min(least_memory(workload, stages) for stages in stage_counts(4))
        with pytest.raises(ConfigError, match=f"at least {least} bytes"):
            search_plan(everywhere(workload, least - 1))
        check_sound(search_plan(everywhere(workload, least)))

    def test_the_refusal_says_what_would_help(self) -> None:
        layers = plain_layers([1.0] * 4, parameter_bytes=100, gradient_bytes=100)
        workload = Workload(layers, StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 2)
        # Two layers each: weights and gradients.
        with pytest.raises(ConfigError, match=r"at least 400 bytes.*got 300 B: no plan fits"):
            search_plan(everywhere(workload, 300), 2)
        with pytest.raises(ConfigError, match=r"with the same limit on all\), got 100 B and 300 B"):
            search_plan(limited(workload, [100, 300]), 2)
        with pytest.raises(ConfigError, match="without recomputation"):
            search_plan(everywhere(replace(workload, recompute="never"), 300), 2)

    def test_recomputing_hides_where_a_stage_waits(self) -> None:
        """Two layers, two stages, two micro-batches, and stage 0 keeps both. 1 s forward, 2 s
        backward: while the first stage waits for a gradient it has time to compute again."""
        layers = plain_layers([1.0, 1.0], saved_bytes=100, output_bytes=10)
        workload = Workload(layers, StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 2)
        free = search_plan(workload, 2)
        assert (free.recompute, free.seconds) == ((), 9.0)
        # Kept: 2 * 110 bytes on stage 0, 110 on stage 1 that also holds its input.
        tight = search_plan(everywhere(workload, 219), 2)
        assert (tight.recompute, tight.seconds) == ((0,), 9.0)

    def test_little_memory_for_the_first_stage_moves_layers_down(self) -> None:
        layers = plain_layers([1.0] * 6, parameter_bytes=100, gradient_bytes=100)
        workload = Workload(layers, StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 4)
        assert search_plan(workload, 2).split == (3, 3)
        assert search_plan(limited(workload, [400, None]), keep_order=True).split == (2, 4)


class TestDegenerate:
    def test_one_stage(self) -> None:
        layers = plain_layers([1.0, 2.0, 3.0])
        found = search_plan(
            Workload(layers, StepCosts(), plain_cluster(1), ((0,),), ONE_F_ONE_B, 2), 1
        )
        assert (found.split, found.recompute, found.seconds) == ((3,), (), 36.0)
        assert found.start_seconds == 36.0

    def test_one_layer(self) -> None:
        workload = Workload(
            plain_layers([1.0]), StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 2
        )
        with pytest.raises(ConfigError, match=r"at least 2 layers for 2 ranks, .* got 1"):
            search_plan(workload)
        # The devices are two replicas then.
        found = search_plan(workload, 1)
        assert (found.workload.replicas, found.split) == (((0,), (1,)), (1,))
        assert found.seconds == 3.0
        alone = replace(workload, cluster=plain_cluster(1), replicas=((0,),))
        assert search_plan(alone).seconds == 6.0

    def test_as_many_stages_as_layers(self) -> None:
        layers = plain_layers([3.0, 1.0, 2.0])
        workload = Workload(layers, StepCosts(), plain_cluster(3), ((0, 1, 2),), GPIPE, 2)
        found = search_plan(workload, 3)
        assert found.split == (1, 1, 1)
        assert found.seconds == found.start_seconds == step_seconds(workload, (1, 1, 1))

    def test_more_stages_than_layers(self) -> None:
        workload = Workload(
            plain_layers([1.0]), StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 2
        )
        with pytest.raises(ConfigError, match=r"one layer per stage \(2\), got 1 layers"):
            search_plan(workload, 2)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("limit", [None, 800])
    def test_layers_that_take_no_time(self, schedule: Schedule, limit: int | None) -> None:
        layers = plain_layers([0.0] * 5, parameter_bytes=100, gradient_bytes=100, saved_bytes=9)
        workload = Workload(layers, StepCosts(), plain_cluster(2), ((0, 1),), schedule, 3)
        found = search_plan(everywhere(workload, limit), 2)
        check_sound(found)
        assert found.seconds == 0.0

    def test_some_layers_that_take_no_time(self) -> None:
        layers = plain_layers([0.0, 4.0, 0.0, 0.0, 4.0, 0.0])
        workload = Workload(layers, StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 4)
        found = search_plan(workload, 2)
        # 12 s a stage and micro-batch, four of them and one to fill; any cut between 2 and 4.
        assert found.seconds == 60.0
        assert found.split[0] in (2, 3, 4)

    def test_ties_are_decided_alike_every_time(self) -> None:
        layers = plain_layers([1.0] * 8)
        workload = Workload(layers, StepCosts(), plain_cluster(4), ((0, 1, 2, 3),), ONE_F_ONE_B, 4)
        found = {
            (d.workload.replicas, d.split) for d in (search_plan(workload, 4) for _ in range(3))
        }
        assert found == {(((0, 1, 2, 3),), (2, 2, 2, 2))}

    def test_one_microbatch(self) -> None:
        # Nothing overlaps, and nothing takes time but the layers: every split is as good.
        workload = Workload(
            plain_layers([1.0] * 4), StepCosts(), plain_cluster(2), ((0, 1),), ONE_F_ONE_B, 1
        )
        assert search_plan(workload, 2).seconds == 12.0


class TestLittleTime:
    """What HiGHS does not finish in time is given up, and the plan says how good it may be."""

    @pytest.fixture
    def hard(self) -> Workload:
        return large_workload(Random(5), 24, 4, 16, gpt=False, slack=2.0)

    def test_no_solution_is_no_error(self, hard: Workload) -> None:
        program = SplitProgram(hard, seconds=0.0)
        assert program.solve(inf) is None
        assert not program.in_time

    def test_the_gap_is_not_claimed(self, hard: Workload) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_orders, "SplitProgram", partial(SplitProgram, seconds=0.0))
            found = search_plan(hard, keep_order=True)
        check_sound(found)
        best = search_plan(hard, keep_order=True)
        assert best.seconds <= found.seconds
        assert best.seconds >= found.seconds * (1 - found.gap)
        assert found.gap > best.gap


class TestManyOrders:
    """Where there are too many orders to try them all."""

    @settings(exhaustive, max_examples=examples(15))
    @given(randoms, st.integers(4, 16))
    def test_not_worse_than_the_start(self, random: Random, microbatches: int) -> None:
        workload = large_workload(random, 10, 4, microbatches, gpt=random.random() < 0.5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_orders, "_MAX_ORDERS", 1)
            found = search_plan(workload, 4)
        check_sound(found)
        assert found.seconds <= found.start_seconds
        assert found.seconds >= search_plan(workload, 4).seconds * (1 - OPTIMAL)

    @settings(exhaustive, max_examples=examples(60))
    @given(randoms, st.integers(2, 3))
    def test_an_order_that_fits_is_found(self, random: Random, stages: int) -> None:
        workload = small_workload(random, stages=stages, layers=random.randint(stages, 5))
        workload = randomly_limited(random, workload, stages)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_orders, "_MAX_ORDERS", 1)
            try:
                check_sound(search_plan(workload, stages))
            except ConfigError:
                assert fastest_of_all(workload, stages) == inf
