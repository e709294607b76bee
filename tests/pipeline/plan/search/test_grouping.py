"""Grouping of devices into replicas, the ratio order, and the distinct orders of stages."""

from __future__ import annotations

import math
from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.simulator import simulate
from lightning_dlres.pipeline.plan.search.grouping import (
    Slots,
    communication_costs,
    distinct_orders,
    group_into_slots,
    order_by_ratio,
    replicas_of,
    slot_power,
)
from lightning_dlres.pipeline.profile.cluster import Cluster, Link
from lightning_dlres.pipeline.profile.run_profile import StepCosts
from tests.support.examples import examples
from tests.support.pipeline_profiles import (
    ONE_F_ONE_B,
    devices_on_hosts,
    plain_cluster,
    small_layers,
)


def link(a: int, b: int, bytes_per_second: float, latency: float = 0.0) -> Link:
    return Link(ranks=(a, b), latency=latency, bytes_per_second=bytes_per_second)


class TestGroup:
    def test_devices_of_similar_power_share_a_stage(self) -> None:
        cluster = plain_cluster(6, powers=[0.5, 1.0, 0.2, 0.2, 1.0, 0.5])
        assert group_into_slots(cluster, 3) == ((0, 5), (1, 4), (2, 3))
        assert [slot_power(cluster, slot) for slot in group_into_slots(cluster, 3)] == [
            0.5,
            1.0,
            0.2,
        ]

    def test_a_replica_stays_on_one_host(self) -> None:
        cluster = plain_cluster(4, powers=[1.0, 0.5, 0.5, 1.0], hosts=["a", "b", "a", "b"])
        assert group_into_slots(cluster, 2) == ((0, 3), (2, 1))
        assert replicas_of(group_into_slots(cluster, 2)) == ((0, 2), (3, 1))

    def test_power_counts_before_hosts(self) -> None:
        cluster = plain_cluster(4, powers=[1.0, 1.0, 0.5, 0.5], hosts=["a", "a", "b", "b"])
        assert group_into_slots(cluster, 2) == ((0, 1), (2, 3))

    def test_equal_devices_keep_the_order_of_their_ranks(self) -> None:
        assert group_into_slots(plain_cluster(4), 4) == ((0,), (1,), (2,), (3,))
        assert replicas_of(group_into_slots(plain_cluster(4), 2)) == ((0, 2), (1, 3))
        assert group_into_slots(plain_cluster(3), 1) == ((0, 1, 2),)

    def test_the_slowest_device_sets_the_power_of_its_stage(self) -> None:
        cluster = plain_cluster(4, powers=[1.0, 0.9, 0.3, 0.4])
        assert [slot_power(cluster, slot) for slot in group_into_slots(cluster, 2)] == [0.9, 0.3]

    @pytest.mark.parametrize("stages", [0, -1, 4, 12])
    def test_ranks_that_do_not_divide_are_refused(self, stages: int) -> None:
        with pytest.raises(ConfigError, match=rf"ranks \(6\), got {stages}\..*\[1, 2, 3, 6\]"):
            group_into_slots(plain_cluster(6), stages)


class TestOrder:
    def test_costs_are_sizes_over_bandwidths(self) -> None:
        # Powers 1 and 1/4 divide 100 bytes into 80 and 20.
        powers = [1.0, 0.25, 1.0, 0.25]
        cluster = plain_cluster(4, powers=powers, links=[link(0, 2, 40.0), link(1, 3, 2.0)])
        assert communication_costs(cluster, ((0, 2), (1, 3)), 100) == pytest.approx([2.0, 10.0])

    def test_the_slowest_link_of_a_ring_counts(self) -> None:
        links = [link(0, 1, 8.0), link(1, 2, 4.0), link(2, 0, 2.0)]
        cluster = plain_cluster(3, links=links)
        assert communication_costs(cluster, ((0, 1, 2),), 100) == pytest.approx([50.0])

    def test_the_largest_ratio_is_first(self) -> None:
        # Compute times are equal, so the smallest communication cost comes first:
        # 1/4, 1/2 and 1/4 of the bytes over 10, 40 and 1 bytes a second.
        powers = [0.5, 1.0, 0.5]
        links = [link(0, 3, 10.0), link(1, 4, 40.0), link(2, 5, 1.0)]
        cluster = plain_cluster(6, powers=powers * 2, links=links)
        slots = ((0, 3), (1, 4), (2, 5))
        assert communication_costs(cluster, slots, 400) == pytest.approx([10.0, 5.0, 100.0])
        assert order_by_ratio(cluster, slots, 8.0, 400) == ((1, 4), (0, 3), (2, 5))

    def test_ties_keep_their_order(self) -> None:
        links = [link(0, 3, 1.0), link(1, 4, 2.0), link(2, 5, 1.0)]
        cluster = plain_cluster(6, links=links)
        slots = ((0, 3), (1, 4), (2, 5))
        assert order_by_ratio(cluster, slots, 8.0, 400) == ((1, 4), (0, 3), (2, 5))
        assert order_by_ratio(cluster, slots, 0.0, 400) == slots, "no time: all ratios are 0"

    def test_slots_without_communication_come_first_in_their_order(self) -> None:
        cluster = plain_cluster(3, powers=[0.2, 1.0, 0.5])
        slots = group_into_slots(cluster, 3)
        assert communication_costs(cluster, slots, 400) == [0.0, 0.0, 0.0]
        assert order_by_ratio(cluster, slots, 8.0, 400) == slots == ((0,), (1,), (2,))
        perfect = plain_cluster(4, links=[link(0, 2, 5.0), link(1, 3, math.inf)])
        assert order_by_ratio(perfect, ((0, 2), (1, 3)), 8.0, 400) == ((1, 3), (0, 2))


class TestDistinctOrders:
    @staticmethod
    def count(cluster: Cluster, stages: int) -> int:
        slots = group_into_slots(cluster, stages)
        orders = list(distinct_orders(cluster, slots))
        assert orders[0] == slots
        assert len(set(orders)) == len(orders)
        return len(orders)

    def test_equal_devices_have_one_order(self) -> None:
        assert self.count(plain_cluster(4), 4) == 1
        assert self.count(plain_cluster(4), 2) == 1

    def test_sixteen_equal_devices_have_one_order_too(self) -> None:
        links = [link(a, b, 1e9, 1e-4) for a in range(16) for b in range(a)]
        assert self.count(plain_cluster(16, links=links), 16) == 1

    def test_orders_of_different_devices_are_distinct(self) -> None:
        def with_memory_limits(*limits: int) -> int:
            return self.count(plain_cluster(len(limits), limits=limits), len(limits))

        assert with_memory_limits(1, 2, 3) == 6
        assert with_memory_limits(1, 1, 2) == 3
        assert with_memory_limits(1, 1, 2, 2) == 6
        assert with_memory_limits(1, 1, 1, 1, 2) == 5

    def test_orders_with_different_links_are_distinct(self) -> None:
        # The link 0-1 is fast: its ranks are neighbours at the front or at the back, or apart.
        cluster = plain_cluster(3, links=[link(0, 1, 9.0), link(0, 2, 1.0), link(1, 2, 1.0)])
        assert self.count(cluster, 3) == 3
        # Two hosts with two devices each: the stages' hosts are aabb, abab or abba.
        assert self.count(devices_on_hosts("aabb"), 4) == 3

    def test_the_last_link_of_a_ring_counts(self) -> None:
        # Stages 0 and 1 differ only in the link from the last replica to the first.
        links = [link(a, b, 1.0 if (a, b) == (5, 3) else 5.0) for a in range(6) for b in range(a)]
        cluster = plain_cluster(6, links=links)
        assert len(list(distinct_orders(cluster, ((0, 1, 2), (3, 4, 5))))) == 2

    @settings(max_examples=examples(60))
    @given(st.randoms(use_true_random=False), st.integers(2, 4), st.integers(1, 2))
    def test_no_order_is_missing(self, random: Random, stages: int, replicas: int) -> None:
        """Every permutation takes as long as one of the distinct orders, for random layers."""
        count = stages * replicas
        cluster = plain_cluster(
            count,
            limits=[random.choice([None, 7]) for _ in range(count)],
            links=[
                link(a, b, float(random.choice([1, 4])), random.choice([0.0, 2.0]))
                for a in range(count)
                for b in range(a)
            ],
        )
        slots = tuple(tuple(range(s, count, stages)) for s in range(stages))
        layers = small_layers(random, stages + 1, 1)
        split = [2] + [1] * (stages - 1)

        def outcome(order: Slots) -> tuple[object, ...]:
            replicas = replicas_of(order)
            workload = Workload(layers, StepCosts(), cluster, replicas, ONE_F_ONE_B, 3)
            limits = [workload.memory_limit(stage) for stage in range(stages)]
            return round(simulate(workload, split).step_seconds, 9), *limits

        distinct = {outcome(order) for order in distinct_orders(cluster, slots)}
        assert {outcome(order) for order in permutations(slots)} == distinct
