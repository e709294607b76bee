"""All ranks get the same costs, and an error names the rank that is late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from lightning_dlres.codecs.gradient import GradientCodec, State
from lightning_dlres.core.comm.channel_ends import LONGER_THAN_ANY_RUN
from lightning_dlres.core.comm.mailbox import Mailbox
from lightning_dlres.core.errors import PeerError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.plan.costs import LinearCost, LinkCosts, SyncCosts
from lightning_dlres.gradsync.plan.plan import RAW
from lightning_dlres.gradsync.profile import measurement
from lightning_dlres.gradsync.profile.codec_times import measure_codecs
from lightning_dlres.gradsync.profile.measurement import measure_costs
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages
from tests.gradsync.plan.costs_for_tests import codecs_by_name
from tests.support.rank_pool import RankContext, RankPool

CPU = torch.device("cpu")


@contextmanager
def probe_messages(context: RankContext, timeout: float = 20.0) -> Iterator[ProbeMessages]:
    context.init_process_group()
    group = dist.new_group(backend="gloo", timeout=LONGER_THAN_ANY_RUN)
    assert isinstance(group, dist.ProcessGroup)
    names = [f"rank {rank}" for rank in range(context.world_size)]
    mailbox = Mailbox(
        group, context.rank, names, timeout=timeout, check=lambda: None, tracer=Tracer()
    )
    is_orderly = False
    try:
        yield ProbeMessages(mailbox)
        is_orderly = True
    finally:
        mailbox.close(orderly=is_orderly)


def measure(context: RankContext) -> SyncCosts:
    with probe_messages(context) as messages:
        return measure_costs(messages, codecs_by_name("tbq", "int8"), CPU, elements=200_000)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_get_the_same_costs(pool: RankPool, world_size: int) -> None:
    costs, *others = pool.run(measure, world_size)
    assert all(other == costs for other in others)
    assert list(costs.codecs) == [RAW, "tbq", "int8"]
    assert len(costs.links.bandwidths) == world_size
    assert min(costs.links.bandwidths) > 0
    assert costs.links.latency_seconds >= 0
    assert 0 < costs.links.incast_share <= 1
    # Two ranks have one sender each.
    assert costs.links.incast_share == 1 or world_size > 2
    lines = [costs.all_reduce]
    for codec in costs.codecs.values():
        lines += [codec.encode, codec.merge, codec.decode]
    for cost in lines:
        assert min(cost.fixed_seconds, cost.seconds_per_item) >= 0
        assert cost.seconds(1) > 0
    # A message takes time of its own, but for one rank there is none.
    assert (costs.links.message_seconds > 0) == (world_size > 1)


def measure_again(context: RankContext, speed: float, all_reduce: float) -> bool:
    """Return True if the codecs were measured again at links and an all-reduce of some speed."""
    links = [LinkCosts(message_seconds=0.0, bandwidths=(s,)) for s in (1e6, speed)]
    reduces = [LinearCost(fixed_seconds=0.0, seconds_per_item=s) for s in (1.0, all_reduce)]
    costs: list[SyncCosts] = []
    with probe_messages(context) as messages, pytest.MonkeyPatch.context() as patch:
        for link, reduce in zip(links, reduces, strict=True):
            patch.setattr(measurement, "measure_links", lambda *_, link=link, **__: link)
            patch.setattr(measurement, "measure_all_reduce", lambda *_, cost=reduce, **__: cost)
            codecs, earlier = codecs_by_name("int8"), costs[0] if costs else None
            costs.append(measure_costs(messages, codecs, CPU, elements=9000, earlier=earlier))
    assert costs[1].links == links[1]
    assert costs[1].all_reduce == reduces[1]
    return costs[1].codecs is not costs[0].codecs


@pytest.mark.parametrize(
    ("speed", "all_reduce", "is_measured"),
    [(1.2e6, 0.9, True), (2e6, 1.0, False), (5e5, 1.0, False), (1e6, 3.0, False)],
)
def test_codecs_are_measured_again_if_nothing_else_has_changed(
    pool: RankPool, speed: float, all_reduce: float, is_measured: bool
) -> None:
    assert pool.run(measure_again, 1, speed, all_reduce) == [is_measured]


class CountingCodec(GradientCodec):
    """A codec that records its calls."""

    name = "counting"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def payload_bytes(self, count: int) -> int:
        return 8

    def compress(
        self,
        values: torch.Tensor,
        state: State,
        payload: torch.Tensor,
        *,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        assert payload.numel() == 8
        assert state["residual"].numel() == values.numel()
        self.calls.append("encode")

    def expand(
        self,
        payload: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        self.calls.append("merge" if accumulate else "decode")


def count_calls(context: RankContext) -> dict[str, int]:
    codec = CountingCodec()
    with probe_messages(context) as messages:
        measure_codecs({"counting": codec}, messages, CPU, unit_elements=50_000, seconds=0.0)
    return {name: codec.calls.count(name) for name in ("encode", "merge", "decode")}


def test_without_time_each_task_runs_three_times(pool: RankPool) -> None:
    """Two sizes, and one call before them; each size starts by encoding four units."""
    (calls,) = pool.run(count_calls, 1)
    assert calls == {"encode": 1 + 2 * (4 + 3), "merge": 1 + 2 * 3, "decode": 1 + 2 * 3}


def slow_rank(context: RankContext) -> list[float]:
    with probe_messages(context) as messages:
        return messages.slowest([float(context.rank), -float(context.rank), 5.0])


def test_the_slowest_rank_counts(pool: RankPool) -> None:
    assert pool.run(slow_rank, 3) == [[2.0, 0.0, 5.0]] * 3


def lose_a_rank(context: RankContext) -> str:
    """Return the error of a rank; rank 1 does not take part."""
    try:
        with probe_messages(context, timeout=0.5) as messages:
            if context.rank == 1:
                # Stays connected until the others have failed.
                dist.barrier()
                return ""
            try:
                measure_costs(messages, {}, CPU, elements=1000)
            finally:
                dist.barrier()
    except PeerError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_late_rank_is_named_by_all_others(pool: RankPool) -> None:
    first, _, third = pool.run(lose_a_rank, 3)
    for rank, error in ((0, first), (2, third)):
        assert f"rank {rank} waited 0.5 s for the measurement of gradient synchronisation" in error
        assert "from rank 1, and no message came" in error
