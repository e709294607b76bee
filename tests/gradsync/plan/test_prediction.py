"""Predictions follow the tasks in the graphs of all ranks, counted one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.gradsync.plan.costs import LinearCost, LinkCosts, SyncCosts
from lightning_dlres.gradsync.plan.graph import TaskKind, topology
from lightning_dlres.gradsync.plan.lone_unit import UnitCosts, lone_unit_seconds
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.prediction import StepPredictor
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.gradsync.plan.costs_for_tests import FREE, codec_costs, codecs_by_name, sync_costs

CODECS = codecs_by_name("tbq", "int8")
COSTS = {
    "tbq": codec_costs(2e-5, 1e-9, 5e-10, 3e-10),
    "int8": codec_costs(1e-5, 2e-9, 7e-10, 4e-10),
}
TOPOLOGIES = ["ps", "ring"]


def counted_loads(
    plan: SyncPlan, costs: SyncCosts, codecs: dict[str, GradientCodec]
) -> tuple[float, float]:
    """Return the compute seconds of the busiest rank, and the transfer seconds of the busiest
    direction of a link, added task by task."""
    compute, out, into = ([0.0] * plan.world_size for _ in range(3))
    for unit in plan.units:
        cost, raw = costs.codecs[unit.codec], costs.codecs[RAW]
        nbytes = 4 * unit.count
        if unit.codec != RAW:
            nbytes = codecs[unit.codec].payload_bytes(unit.count)
        for rank in range(plan.world_size):
            # With a parameter server, messages to several ranks fill each other's gaps.
            peers = plan.world_size - 1 if plan.topology == "ps" else 1
            seconds = costs.links.message_seconds / max(peers, 1)
            seconds += nbytes / costs.links.bandwidths[rank]
            for task in topology(plan.topology)(rank, plan.world_size, unit.owner):
                if task.kind is TaskKind.ENCODE:
                    compute[rank] += cost.encode.seconds(unit.count)
                elif task.kind is TaskKind.DECODE:
                    compute[rank] += cost.decode.seconds(unit.count)
                elif task.kind is TaskKind.MERGE:
                    merge = raw.merge if task.peer == rank else cost.merge
                    compute[rank] += merge.seconds(unit.count)
                elif task.kind is TaskKind.SEND:
                    out[rank] += seconds
                else:
                    into[rank] += seconds
    return max(compute), max(*out, *into)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 60_000), st.sampled_from([RAW, *CODECS])), min_size=1),
    st.lists(st.sampled_from([1e6, 25e6, 1e9]), min_size=1, max_size=5),
    st.sampled_from(TOPOLOGIES),
    st.integers(1, 4),
)
def test_loads_are_those_of_the_graphs(
    gradients: list[tuple[int, str]], bandwidths: list[float], topology_name: str, partitions: int
) -> None:
    """Gradients are pairs of a number of elements and a codec."""
    specs = [GradientSpec(name=str(i), count=count) for i, (count, _) in enumerate(gradients)]
    choices = [CodecChoice(codec=codec, partitions=partitions) for _, codec in gradients]
    plan = make_plan(
        specs, choices, world_size=len(bandwidths), topology=topology_name, alignment=4096
    )
    costs = sync_costs(bandwidths, COSTS)
    prediction = StepPredictor(costs, CODECS).predict_plan(plan)
    compute, transfer = counted_loads(plan, costs, CODECS)
    assert prediction.compute_seconds == pytest.approx(compute)
    assert prediction.transfer_seconds == pytest.approx(transfer)
    assert prediction.step_seconds == prediction.sync_seconds
    assert prediction.sync_seconds >= max(compute, transfer) * (1 - 1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_critical_path_of_a_parameter_server(ranks: int) -> None:
    links = LinkCosts(message_seconds=1.0, bandwidths=(10.0,) * ranks, latency_seconds=0.5)
    unit = UnitCosts(encode=7.0, merge=2.0, own_merge=1.0, decode=3.0, nbytes=50.0)
    # Each message takes 6 s: 1 s, and 50 bytes at 10 bytes per second. The owner merges its own
    # gradient while the others encode theirs, and each message while the next one is on its way.
    sum_is_encoded = 7 + 6 * (ranks - 1) + 0.5 + 2 + 7
    expected = sum_is_encoded + 6 * (ranks - 1) + 0.5 + 3
    assert lone_unit_seconds(topology("ps"), 0, unit, links) == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("owner", [0, 1])
def test_the_critical_path_of_a_ring(ranks: int, owner: int) -> None:
    links = LinkCosts(message_seconds=1.0, bandwidths=(10.0,) * ranks, latency_seconds=0.5)
    unit = UnitCosts(encode=7.0, merge=2.0, own_merge=1.0, decode=3.0, nbytes=50.0)
    # Each rank but the first one waits for a message of 6 s and its latency, merges it and its own
    # gradient, and encodes the sum.
    hop = 6 + 0.5
    expected = 7 + (ranks - 1) * (hop + 2 + 1 + 7) + (ranks - 1) * hop + 3
    assert lone_unit_seconds(topology("ring"), owner, unit, links) == pytest.approx(expected)


def test_a_message_moves_at_the_speed_of_the_slower_link() -> None:
    links = LinkCosts(message_seconds=0.0, bandwidths=(10.0, 1.0))
    unit = UnitCosts(encode=0.0, merge=0.0, own_merge=0.0, decode=0.0, nbytes=5.0)
    assert lone_unit_seconds(topology("ps"), 0, unit, links) == pytest.approx(10.0)


def plan_of(counts: list[int], ranks: int, topology_name: str = "ps") -> SyncPlan:
    """Return a plan of uncut gradients with codec "tbq"."""
    specs = [GradientSpec(name=str(i), count=count) for i, count in enumerate(counts)]
    choices = [CodecChoice(codec="tbq", partitions=1)] * len(counts)
    return make_plan(specs, choices, world_size=ranks, topology=topology_name, alignment=4096)


@pytest.mark.parametrize("topology_name", TOPOLOGIES)
def test_a_single_unit_takes_as_long_as_its_critical_path(topology_name: str) -> None:
    costs = sync_costs([25e6] * 4, COSTS)
    plan = plan_of([1_000_000], 4, topology_name)
    prediction = StepPredictor(costs, CODECS).predict_plan(plan)
    tbq = COSTS["tbq"]
    unit = UnitCosts(
        encode=tbq.encode.seconds(1_000_000),
        merge=tbq.merge.seconds(1_000_000),
        own_merge=costs.codecs[RAW].merge.seconds(1_000_000),
        decode=tbq.decode.seconds(1_000_000),
        nbytes=CODECS["tbq"].payload_bytes(1_000_000),
    )
    path = lone_unit_seconds(topology(topology_name), plan.units[0].owner, unit, costs.links)
    assert prediction.sync_seconds == pytest.approx(path)


@pytest.mark.parametrize(("ranks", "topology_name"), [(2, "ps"), (4, "ps"), (4, "ring")])
@pytest.mark.parametrize("is_coordinated", [True, False])
def test_only_a_rank_with_several_senders_loses_bandwidth(
    ranks: int, topology_name: str, is_coordinated: bool
) -> None:
    without_loss, with_loss = (
        StepPredictor(
            sync_costs([25e6] * ranks, COSTS, message_seconds=0.0, incast_share=share),
            CODECS,
            is_coordinated=is_coordinated,
        ).predict_plan(plan_of([100_000] * 8, ranks, topology_name))
        for share in (1.0, 0.5)
    )
    is_slower = ranks > 2 and topology_name == "ps" and not is_coordinated
    factor = 2 if is_slower else 1
    assert with_loss.transfer_seconds == pytest.approx(factor * without_loss.transfer_seconds)
    assert with_loss.compute_seconds == without_loss.compute_seconds


def test_backward_hides_all_but_the_last_bucket() -> None:
    costs = sync_costs([25e6] * 4, COSTS)
    plan = plan_of([100_000] * 100, 4)
    alone = StepPredictor(costs, CODECS).predict_plan(plan).sync_seconds
    # 40 MB of gradients: the last bucket has a tenth of them.
    bucket = 4_000_000
    short, long = (
        StepPredictor(costs, CODECS, backward_seconds=seconds, bucket_bytes=bucket).predict_plan(
            plan
        )
        for seconds in (alone / 100, 50 * alone)
    )
    assert short.sync_seconds == long.sync_seconds == alone
    assert short.step_seconds == pytest.approx(alone)
    assert long.step_seconds == pytest.approx(50 * alone + 0.1 * alone)


def test_all_reduce_takes_its_fixed_time_for_each_bucket() -> None:
    cost = LinearCost(fixed_seconds=0.01, seconds_per_item=1e-8)
    predictor = StepPredictor(
        sync_costs([1e6, 1e6], all_reduce=cost), {}, element_bytes=2, bucket_bytes=1_000_000
    )
    prediction = predictor.predict_all_reduce(1_200_000)
    assert prediction.step_seconds == pytest.approx(3 * 0.01 + 2_400_000 * 1e-8)
    assert prediction.link_bytes == pytest.approx(2_400_000)


def test_one_rank_and_no_gradients_take_no_transfer() -> None:
    costs = SyncCosts(
        codecs=sync_costs([1e6], COSTS).codecs,
        links=LinkCosts(message_seconds=0.0, bandwidths=(1e6,)),
        all_reduce=FREE,
    )
    predictor = StepPredictor(costs, CODECS)
    assert predictor.predict_plan(plan_of([5000], 1)).transfer_seconds == 0
    assert predictor.predict_plan(plan_of([], 1)).step_seconds == 0
