"""Ranks hold the same mean of their gradients, and nothing is lost over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.codecs import codec
from lightning_dlres.codecs.gradient import RESIDUAL, GradientCodec
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.coordination import CoordinatorLink
from lightning_dlres.gradsync.execute.session import TRANSPORTS
from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.support.examples import checkered
from tests.support.rank_pool import RankContext, RankPool

COUNTS = {"scalar": 1, "none": 0, "bias": 10, "weight": 9000, "large": 30_000}
STEPS = 4
BIASED = ("onebit", "tbq", "int8", "fp8", "fp16", "bf16", "graddrop", "dgc")


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: torch.randn(count, generator=generator).to(dtype) for name, count in COUNTS.items()
    }


def plan_for(world_size: int, topology: str, name: str, has_many_owners: bool = True) -> SyncPlan:
    specs = [GradientSpec(name=key, count=count) for key, count in COUNTS.items()]
    is_divisible = name == RAW or codec(name).is_divisible  # type: ignore[attr-defined]
    choices = [
        # Small gradients stay raw, as the cost model would decide.
        CodecChoice(
            codec=name if spec.count > 100 else RAW,
            partitions=3 if is_divisible and spec.count > 10_000 else 1,
        )
        for spec in specs
    ]
    shares = None if has_many_owners else [1.0, *[0.0] * (world_size - 1)]
    return make_plan(
        specs, choices, world_size=world_size, topology=topology, alignment=4096, shares=shares
    )


@contextmanager
def synchronisation(
    context: RankContext,
    topology: str,
    name: str,
    *,
    coordinated: bool = False,
    replay_from: int | None = None,
    has_many_owners: bool = True,
    transport: str = "gloo",
) -> Iterator[GradientSynchroniser]:
    context.init_process_group()
    group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    assert isinstance(group, dist.ProcessGroup)
    names = [f"rank {rank}" for rank in range(context.world_size)]
    mailbox = TRANSPORTS[transport](
        group, context.rank, names, timeout=20.0, check=lambda: None, tracer=Tracer()
    )
    chosen = codec(name)
    codecs = {name: chosen} if isinstance(chosen, GradientCodec) else {}
    plan = plan_for(context.world_size, topology, name, has_many_owners)
    link = CoordinatorLink(mailbox) if coordinated else None
    sync = GradientSynchroniser(
        plan, codecs, mailbox, Tracer(), coordinator=link, replay_from=replay_from
    )
    yield sync
    dist.barrier()
    sync.close()
    mailbox.close(orderly=True)
    dist.barrier()


def synchronise(
    context: RankContext,
    topology: str,
    name: str,
    dtype: torch.dtype,
    **options: Any,
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the decoded means of each step, and the errors that are kept."""
    with synchronisation(context, topology, name, **options) as sync:
        means = []
        for step in range(STEPS):
            own = gradients(context.rank, step, dtype)
            sync.run(step, own)
            means.append(own)
        errors = {key: torch.zeros(count) for key, count in COUNTS.items()}
        for (key, start, stop, _), state in sync.states.by_key.items():
            if RESIDUAL in state:
                errors[key][start:stop] += state[RESIDUAL]
    return means, errors


@pytest.mark.parametrize(
    ("topology", "world_size", "dtype"),
    checkered(["ps", "ring"], [1, 2, 3, 4], [torch.float32, torch.bfloat16]),
)
def test_uncompressed_means_are_sums_in_the_order_of_the_ranks(
    pool: RankPool, topology: str, world_size: int, dtype: torch.dtype
) -> None:
    results = pool.run(synchronise, world_size, topology, RAW, dtype)
    owners = {
        (unit.gradient, unit.start): (unit.owner, unit.stop)
        for unit in plan_for(world_size, topology, RAW).units
    }
    for step in range(STEPS):
        parts = [gradients(rank, step, dtype) for rank in range(world_size)]
        for (key, start), (owner, stop) in owners.items():
            # A ring begins at the owner of the unit.
            first = owner if topology == "ring" else 0
            order = [(first + i) % world_size for i in range(world_size)]
            total = parts[order[0]][key][start:stop].clone()
            for rank in order[1:]:
                total += parts[rank][key][start:stop]
            for means, _ in results:
                assert torch.equal(means[step][key][start:stop], total * (1 / world_size))


@pytest.mark.parametrize(
    ("topology", "name", "world_size"), checkered(["ps", "ring"], BIASED, [2, 3])
)
def test_nothing_is_lost_in_two_way_compression(
    pool: RankPool, topology: str, name: str, world_size: int
) -> None:
    """N times the means, and the errors kept at all ranks and for the sums, are all gradients."""
    results = pool.run(synchronise, world_size, topology, name, torch.float32)
    for key in COUNTS:
        given = sum(
            gradients(rank, step)[key].double()
            for step in range(STEPS)
            for rank in range(world_size)
        )
        means = [torch.stack([m[key] for m in steps]) for steps, _ in results]
        assert all(torch.equal(means[0], other) for other in means[1:])
        total = world_size * means[0].double().sum(0)
        total += sum(errors[key].double() for _, errors in results)
        torch.testing.assert_close(total, given, rtol=0, atol=1e-4)


@pytest.mark.parametrize("topology", ["ps", "ring"])
@pytest.mark.parametrize("name", ["qsgd", "terngrad", "tbq"])
def test_four_ranks_hold_the_same_bits(pool: RankPool, topology: str, name: str) -> None:
    results = pool.run(synchronise, 4, topology, name, torch.bfloat16)
    for means, _ in results[1:]:
        for step in range(STEPS):
            assert all(torch.equal(means[step][k], results[0][0][step][k]) for k in COUNTS)


@pytest.mark.parametrize(
    ("topology", "world_size", "replay_from"), checkered(["ps", "ring"], [1, 2, 4], [None, 1, 2])
)
def test_a_coordinator_changes_no_bit(
    pool: RankPool, topology: str, world_size: int, replay_from: int | None
) -> None:
    job = synchronise, world_size, topology, "tbq", torch.float32
    for (means, errors), (expected, expected_errors) in zip(
        pool.run(*job, coordinated=True, replay_from=replay_from), pool.run(*job), strict=True
    ):
        for step in range(STEPS):
            assert all(torch.equal(means[step][key], expected[step][key]) for key in COUNTS)
        assert all(torch.equal(errors[key], expected_errors[key]) for key in COUNTS)


@pytest.mark.parametrize("topology", ["ps", "ring"])
def test_ranks_that_send_nothing_at_first_repeat_plans(pool: RankPool, topology: str) -> None:
    """One rank owns all units. It waits for all others (PS), or they wait for it (ring)."""
    job = synchronise, 3, topology, "tbq", torch.float32
    runs = [
        pool.run(*job, has_many_owners=False, coordinated=coordinated, replay_from=1)
        for coordinated in (True, False)
    ]
    for (means, _), (expected, _) in zip(*runs, strict=True):
        for step in range(STEPS):
            assert all(torch.equal(means[step][key], expected[step][key]) for key in COUNTS)


REPLAYED = {"coordinated": True, "replay_from": 1}


@pytest.mark.parametrize(
    ("topology", "world_size", "name", "dtype", "options"),
    [
        ("ps", 2, RAW, torch.float32, {}),
        ("ring", 4, "onebit", torch.float32, {}),
        ("ps", 3, "tbq", torch.float32, REPLAYED),
        pytest.param("ring", 3, RAW, torch.bfloat16, {}, marks=pytest.mark.exhaustive),
        pytest.param("ps", 4, "onebit", torch.float32, {}, marks=pytest.mark.exhaustive),
        pytest.param("ring", 3, "tbq", torch.float32, REPLAYED, marks=pytest.mark.exhaustive),
    ],
)
def test_the_transport_changes_no_bit(
    pool: RankPool,
    topology: str,
    world_size: int,
    name: str,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    job = synchronise, world_size, topology, name, dtype
    for (means, errors), (expected, expected_errors) in zip(
        pool.run(*job, transport="zmq", **options), pool.run(*job, **options), strict=True
    ):
        for step in range(STEPS):
            assert all(torch.equal(means[step][key], expected[step][key]) for key in COUNTS)
        assert all(torch.equal(errors[key], expected_errors[key]) for key in COUNTS)


def plans_of_a_run(
    context: RankContext, topology: str, replay_from: int | None
) -> list[tuple[int, int, int, int, int]]:
    """Return (source, destination, step, unit, part) of each transfer that was planned."""
    with synchronisation(
        context, topology, "tbq", coordinated=True, replay_from=replay_from
    ) as sync:
        for step in range(STEPS):
            sync.run(step, gradients(context.rank, step))
        # This rank may finish before the others have sent their last payloads.
        dist.barrier()
        assert sync.coordinator is not None
        return [(p.source, p.destination, *e) for p in sync.coordinator.log for e in p.entries]


@pytest.mark.parametrize("topology", ["ps", "ring"])
def test_the_coordinator_plans_every_transfer_once(pool: RankPool, topology: str) -> None:
    planned, *others = pool.run(plans_of_a_run, 3, topology, None)
    assert others == [[], []]
    # Every unit has two transfers to or from each rank but one.
    units = len(plan_for(3, topology, "tbq").units)
    assert len(planned) == len(set(planned)) == 2 * units * 4
    assert {step for _, _, step, _, _ in planned} == {STEPS - 2, STEPS - 1}
    assert all(source != destination for source, destination, *_ in planned)


def test_the_coordinator_is_not_asked_while_a_plan_is_repeated(pool: RankPool) -> None:
    planned, *_ = pool.run(plans_of_a_run, 3, "ps", 2)
    assert {step for _, _, step, _, _ in planned} == {0, 1}
