"""Gradients are added as they are inside a host, and compressed between hosts."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.codecs import codec
from lightning_dlres.codecs.gradient import RESIDUAL, GradientCodec
from lightning_dlres.gradsync.execute.messages import Payload, message_of
from lightning_dlres.gradsync.plan.graph import Part
from lightning_dlres.gradsync.plan.hosts import Hosts, over_hosts
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.support.gradient_sync import OpenSync, open_sync
from tests.support.rank_pool import RankContext, RankPool
from tests.support.sync_tables import unpacked

# Elements of each gradient.
COUNTS = {"scalar": 1, "empty": 0, "bias": 10, "weight": 9000, "large": 30_000}
STEPS = 4
# Hosts of three and of four ranks. Ranks 0 and 2 share a host, though rank 1 is between them.
THREE: Hosts = ((0, 2), (1,))
FOUR: Hosts = ((0,), (1, 2, 3))
exhaustive = pytest.mark.exhaustive


def covering(default: list[Any], *values: Iterable[Any]) -> list[Any]:
    """Return all combinations of values; all but the default ones are marked as exhaustive."""
    return [
        pytest.param(*case, marks=[] if case in default else exhaustive)
        for case in itertools.product(*values)
    ]


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: torch.randn(count, generator=generator).to(dtype) for name, count in COUNTS.items()
    }


def plan_for(hosts: Hosts, topology: str, codec_name: str) -> SyncPlan:
    """Return a plan that compresses large gradients, and cuts the largest one."""
    specs = [GradientSpec(name=name, count=count) for name, count in COUNTS.items()]
    choices = [
        CodecChoice(
            codec=codec_name if spec.count > 100 else RAW,
            partitions=3 if spec.count > 10_000 else 1,
        )
        for spec in specs
    ]
    plan = make_plan(specs, choices, world_size=len(hosts), topology=topology, alignment=4096)
    return over_hosts(plan, hosts)


def codecs_of(name: str) -> dict[str, GradientCodec]:
    chosen = codec(name)
    return {name: chosen} if isinstance(chosen, GradientCodec) else {}


def synchronise(
    context: RankContext,
    hosts: Hosts,
    topology: str,
    codec_name: str,
    dtype: torch.dtype = torch.float32,
    mode: str = "none",
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the means of each step, and the sum of this rank's residuals by gradient.

    Args:
        context: This rank.
        hosts: Ranks of each host.
        topology: Topology of the leaders.
        codec_name: Codec of the large gradients.
        dtype: Dtype of the gradients.
        mode: Way to send; see `MODES`.
    """
    plan = plan_for(hosts, topology, codec_name)
    with open_sync(context, plan, codecs_of(codec_name), mode=mode) as opened:
        means = []
        for step in range(STEPS):
            own = gradients(context.rank, step, dtype)
            opened.sync.run(step, own)
            means.append(own)
        residuals: dict[str, Tensor] = {}
        for (name, start, stop, _), state in opened.sync.states.by_key.items():
            if RESIDUAL in state:
                total = residuals.setdefault(name, torch.zeros(COUNTS[name]))
                total[start:stop] += state[RESIDUAL]
    return means, residuals


@pytest.mark.parametrize(
    ("topology", "hosts", "dtype"),
    covering(
        [("ps", FOUR, torch.float32), ("ring", THREE, torch.bfloat16)],
        ("ps", "ring"),
        (THREE, FOUR),
        (torch.float32, torch.bfloat16),
    ),
)
def test_uncompressed_means_are_sums_of_the_hosts_sums(
    pool: RankPool, topology: str, hosts: Hosts, dtype: torch.dtype
) -> None:
    """A host adds in the order of its ranks, and a topology in the order of the hosts."""
    ranks = sum(map(len, hosts))
    results = pool.run(synchronise, ranks, hosts, topology, RAW, dtype)
    for step in range(STEPS):
        parts = [gradients(rank, step, dtype) for rank in range(ranks)]
        for unit in plan_for(hosts, topology, RAW).units:
            where = slice(unit.start, unit.stop)
            sums = []
            for host in hosts:
                sums.append(parts[host[0]][unit.gradient][where].clone())
                for rank in host[1:]:
                    sums[-1] += parts[rank][unit.gradient][where]
            first = [host[0] for host in hosts].index(unit.owner) if topology == "ring" else 0
            total, *others = sums[first:] + sums[:first]
            for other in others:
                total += other
            for means, _ in results:
                assert torch.equal(means[step][unit.gradient][where], total * (1 / ranks))


@pytest.mark.parametrize(
    ("topology", "codec_name", "hosts"),
    covering(
        [("ps", "tbq", THREE), ("ring", "onebit", FOUR)],
        ("ps", "ring"),
        ("tbq", "onebit", "int8"),
        (THREE, FOUR),
    ),
)
def test_nothing_is_lost_and_only_leaders_keep_residuals(
    pool: RankPool, topology: str, codec_name: str, hosts: Hosts
) -> None:
    ranks = sum(map(len, hosts))
    results = pool.run(synchronise, ranks, hosts, topology, codec_name)
    leaders = {host[0] for host in hosts}
    for rank, (_, residuals) in enumerate(results):
        assert bool(residuals) == (rank in leaders)
    for key in COUNTS:
        given = sum(
            gradients(rank, step)[key].double() for step in range(STEPS) for rank in range(ranks)
        )
        means = [torch.stack([m[key] for m in steps]) for steps, _ in results]
        assert all(torch.equal(means[0], other) for other in means[1:])
        total = ranks * means[0].double().sum(0)
        total += sum(residuals[key].double() for _, residuals in results if key in residuals)
        torch.testing.assert_close(total, given, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("topology", "mode"),
    covering([("ps", "replay"), ("ring", "always")], ("ps", "ring"), ("always", "replay")),
)
def test_a_coordinator_changes_no_bit(pool: RankPool, topology: str, mode: str) -> None:
    plain = pool.run(synchronise, 3, THREE, topology, "tbq")
    coordinated = pool.run(synchronise, 3, THREE, topology, "tbq", mode=mode)
    for (means, _), (expected, _) in zip(coordinated, plain, strict=True):
        for step in range(STEPS):
            assert all(torch.equal(means[step][key], expected[step][key]) for key in COUNTS)


def own_residuals(opened: OpenSync) -> dict[Any, Tensor]:
    """Return copies of the residuals of this rank's own gradients, or of its host's sums."""
    return {
        key: state[RESIDUAL].clone()
        for key, state in opened.sync.states.by_key.items()
        if key[3] is Part.GRADIENT
    }


def synchronise_with_idle(
    context: RankContext, idle: list[int]
) -> tuple[dict[str, Tensor], dict[Any, Tensor], dict[Any, Tensor]]:
    """Return the means of a step in which some ranks have no samples, and `own_residuals` before
    and after it."""
    with open_sync(context, plan_for(THREE, "ps", "tbq"), codecs_of("tbq")) as opened:
        opened.sync.run(0, gradients(context.rank, 0))
        before, own = own_residuals(opened), gradients(context.rank, 1)
        has_data = context.rank not in idle
        if not has_data:
            own = {key: torch.zeros_like(value) for key, value in own.items()}
        done: list[BaseException | None] = []
        finished = threading.Event()

        def on_done(error: BaseException | None) -> None:
            done.append(error)
            finished.set()

        opened.sync.start(1, own, on_done, has_data=has_data)
        assert finished.wait(60)
        assert done == [None]
        return own, before, own_residuals(opened)


@pytest.mark.parametrize(
    "idle", [[0], [0, 2], pytest.param([2], marks=exhaustive), pytest.param([1], marks=exhaustive)]
)
def test_a_host_without_samples_keeps_its_residuals(pool: RankPool, idle: list[int]) -> None:
    """A host has samples if one of its ranks has some."""
    results = pool.run(synchronise_with_idle, 3, idle)
    for key in COUNTS:
        assert all(torch.equal(results[0][0][key], means[key]) for means, _, _ in results)
    for host in THREE:
        _, before, after = results[host[0]]
        assert before
        is_same = all(torch.equal(before[key], after[key]) for key in before)
        assert is_same == (set(host) <= set(idle))


def test_an_empty_payload_adds_no_bytes_to_a_message() -> None:
    """A rank without samples sends one to the leader of its host."""
    gradient = torch.zeros(0)
    _, table, message = message_of(0, [Payload(0, Part.HOST, gradient)])
    assert unpacked(table) == [(0, int(Part.HOST), 0)]
    assert message.numel() == 0


def lose_rank(context: RankContext, victim: int) -> str:
    """Return the error of this rank in a step before which another rank was killed."""
    with open_sync(context, plan_for(FOUR, "ps", "tbq"), codecs_of("tbq"), timeout=30) as opened:
        opened.sync.run(0, gradients(context.rank, 0))
        dist.barrier()
        if context.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            opened.sync.run(1, gradients(context.rank, 1))
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("victim", [3, pytest.param(1, marks=exhaustive)])
def test_all_survivors_name_a_killed_rank(pool: RankPool, victim: int) -> None:
    """Rank 1 leads the host of rank 3, which sends to it only."""
    outcomes = pool.run_expecting_errors(lose_rank, 4, victim, keep=True)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error_type is None, outcome.traceback
            assert f"rank {victim}" in outcome.value
