"""Residuals of gradients and of sums: all bits are those of a loop over ranks in one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from lightning_dlres.codecs.gradient import (
    DGC,
    RESIDUAL,
    BlockwiseInt8,
    GradientCodec,
    OneBit,
    State,
    ThresholdQuantisation,
)
from lightning_dlres.gradsync.plan.graph import Part
from lightning_dlres.gradsync.plan.plan import CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec, SyncUnit
from tests.support.gradient_sync import OpenSync, open_sync
from tests.support.rank_pool import RankContext, RankPool

CPU = torch.device("cpu")
RANKS, STEPS = 3, 5
COUNTS = {"scalar": 1, "bias": 300, "weight": 9000, "large": 20_000}
CODECS: dict[str, GradientCodec] = {
    "tbq": ThresholdQuantisation(),
    "onebit": OneBit(),
    "int8": BlockwiseInt8(),
    "dgc": DGC(ratio=0.01, momentum=0.9),
}
# Ranks without samples, as (rank, step). Rank 1 is in the middle of some rings.
WITHOUT_DATA = {(1, 2), (1, 3), (0, 4)}


def codec_for(name: str, topology: str) -> GradientCodec:
    """Return a codec; on a ring one without momentum, which rings cannot have."""
    return DGC(ratio=0.01) if (name, topology) == ("dgc", "ring") else CODECS[name]


def plan_for(topology: str, name: str) -> SyncPlan:
    specs = [GradientSpec(name=key, count=count) for key, count in COUNTS.items()]
    divisible = codec_for(name, topology).is_divisible
    choices = [
        CodecChoice(codec=name, partitions=3 if divisible and spec.count > 10_000 else 1)
        for spec in specs
    ]
    return make_plan(specs, choices, world_size=RANKS, topology=topology, alignment=4096)


def gradients(rank: int, step: int, without_data: Collection[tuple[int, int]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    factor = 0.0 if (rank, step) in without_data else 1.0
    return {key: factor * torch.randn(n, generator=generator) for key, n in COUNTS.items()}


@dataclass
class Reference:
    """Two-way compression of all ranks in one process, unit by unit."""

    codec: GradientCodec
    topology: str
    keeps_own: bool = True
    keeps_sum: bool = True
    states: dict[tuple[str, int, int, Part], State] = field(default_factory=dict)

    def mean(self, unit: SyncUnit, values: list[Tensor], has_data: list[bool]) -> Tensor:
        parts = [value[unit.start : unit.stop].clone() for value in values]
        if self.topology == "ring":
            order = [(unit.owner + i) % RANKS for i in range(RANKS)]
            total = parts[order[0]]
            for i, rank in enumerate(order[1:]):
                sender = order[i]
                is_idle = not i and not has_data[sender]
                payload = self._encode(unit, sender, Part.GRADIENT, total, is_idle)
                total = self._decode(payload, torch.empty(unit.count)).add_(parts[rank])
            completes = order[-1]
        else:
            total = torch.zeros(unit.count)
            for rank, own in enumerate(parts):
                if rank == unit.owner and not self.codec.transforms_gradient:
                    total += own
                else:
                    payload = self._encode(unit, rank, Part.GRADIENT, own, not has_data[rank])
                    total += self._decode(payload, torch.empty(unit.count))
            completes = unit.owner
        payload = self._encode(unit, completes, Part.SUM, total, False)
        return self._decode(payload, torch.empty(unit.count), 1 / RANKS)

    def _encode(
        self, unit: SyncUnit, rank: int, part: Part, values: Tensor, is_idle: bool
    ) -> Tensor:
        key = unit.gradient, unit.start, rank, part
        if key not in self.states:
            is_sum = part is Part.SUM
            self.states[key] = self.codec.new_state(unit.count, CPU, is_aggregator=is_sum)
        state = self.states[key]
        payload = torch.empty(self.codec.payload_bytes(unit.count), dtype=torch.uint8)
        if is_idle:
            self.codec.compress(values, self.codec.new_state(unit.count, CPU), payload)
            return payload
        self.codec.compress(values, state, payload)
        if not (self.keeps_sum if part is Part.SUM else self.keeps_own):
            state[RESIDUAL].zero_()
        return payload

    def _decode(self, payload: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        self.codec.expand(payload, out, scale=scale)
        return out

    def residual(self, name: str) -> Tensor:
        """Return the sum of all residuals of a gradient."""
        total = torch.zeros(COUNTS[name], dtype=torch.float64)
        for (key, start, _, _), state in self.states.items():
            if key == name:
                total[start : start + state[RESIDUAL].numel()] += state[RESIDUAL]
        return total


def synchronise(
    context: RankContext,
    topology: str,
    name: str,
    without_data: Collection[tuple[int, int]] = (),
    *,
    in_groups: bool = False,
    has_error_feedback: bool = True,
    has_sum_feedback: bool = True,
) -> list[dict[str, Tensor]]:
    means = []
    with open_sync(
        context,
        plan_for(topology, name),
        {name: codec_for(name, topology)},
        has_error_feedback=has_error_feedback,
        has_sum_feedback=has_sum_feedback,
    ) as opened:
        for step in range(STEPS):
            own = gradients(context.rank, step, without_data)
            groups = groups_of(context.rank, step) if in_groups else [list(own)]
            has_data = (context.rank, step) not in without_data
            start_groups(opened, step, [{key: own[key] for key in g} for g in groups], has_data)
            means.append(own)
    return means


def groups_of(rank: int, step: int) -> list[list[str]]:
    """Return the gradients in groups that change with the step, in an order of this rank."""
    keys = list(COUNTS)
    shifted = keys[step % len(keys) :] + keys[: step % len(keys)]
    size = 1 + step % (len(keys) - 1)
    groups = [shifted[i : i + size] for i in range(0, len(shifted), size)]
    return groups[::-1] if (rank + step) % 2 else groups


def start_groups(
    opened: OpenSync, step: int, groups: list[dict[str, Tensor]], has_data: bool
) -> None:
    """Start groups one after the other, as DistributedDataParallel does with buckets."""
    finished = threading.Semaphore(0)
    for group in groups:
        opened.sync.start(step, group, lambda error: finished.release(), has_data=has_data)
    for _ in groups:
        assert finished.acquire(timeout=20.0)
    assert opened.sync.failure is None


def check(
    results: list[list[dict[str, Tensor]]],
    reference: Reference,
    name: str,
    without_data: Collection[tuple[int, int]] = (),
) -> None:
    """Compare the means of all ranks with those of the reference."""
    plan = plan_for(reference.topology, name)
    for step in range(STEPS):
        given = [gradients(rank, step, without_data) for rank in range(RANKS)]
        has_data = [(rank, step) not in without_data for rank in range(RANKS)]
        for unit in plan.units:
            mean = reference.mean(unit, [g[unit.gradient] for g in given], has_data)
            for means in results:
                assert torch.equal(means[step][unit.gradient][unit.start : unit.stop], mean)


def check_conservation(
    results: list[list[dict[str, Tensor]]],
    reference: Reference,
    without_data: Collection[tuple[int, int]] = (),
) -> None:
    """N times the means and all residuals are the gradients."""
    for key in COUNTS:
        total = RANKS * sum(means[key].double() for means in results[0]) + reference.residual(key)
        given = sum(
            gradients(rank, step, without_data)[key].double()
            for rank, step in itertools.product(range(RANKS), range(STEPS))
        )
        torch.testing.assert_close(total, given, rtol=0, atol=1e-4)


FLAGS = [(True, True), (True, False), (False, True), (False, False)]
# Cases that run by default.
DROPPING = [("tbq", True, False), ("tbq", False, True), ("dgc", False, False)]


@pytest.mark.parametrize("topology", ["ps", "ring"])
@pytest.mark.parametrize(
    ("name", "keeps_own", "keeps_sum"),
    [
        pytest.param(
            name,
            *flags,
            marks=[] if (name, *flags) in DROPPING else pytest.mark.exhaustive,
        )
        for name in CODECS
        for flags in FLAGS
    ],
)
def test_only_the_errors_without_feedback_are_dropped(
    pool: RankPool, topology: str, name: str, keeps_own: bool, keeps_sum: bool
) -> None:
    """Momentum and thresholds stay."""
    results = pool.run(
        synchronise,
        RANKS,
        topology,
        name,
        has_error_feedback=keeps_own,
        has_sum_feedback=keeps_sum,
    )
    check(results, Reference(codec_for(name, topology), topology, keeps_own, keeps_sum), name)


@pytest.mark.parametrize("topology", ["ps", "ring"])
@pytest.mark.parametrize(
    "name", ["onebit", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("tbq", "int8"))]
)
def test_groups_that_change_with_the_step_change_no_bit(
    pool: RankPool, topology: str, name: str
) -> None:
    results = pool.run(synchronise, RANKS, topology, name, in_groups=True)
    reference = Reference(codec_for(name, topology), topology)
    check(results, reference, name)
    check_conservation(results, reference)


@pytest.mark.parametrize("topology", ["ps", "ring"])
@pytest.mark.parametrize(
    "name", ["tbq", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("onebit", "dgc"))]
)
def test_ranks_without_data_leave_their_residuals_and_lose_nothing_of_the_others(
    pool: RankPool, topology: str, name: str
) -> None:
    """In a ring, such a rank passes on the gradients of others, and keeps the error of that."""
    results = pool.run(synchronise, RANKS, topology, name, WITHOUT_DATA)
    reference = Reference(codec_for(name, topology), topology)
    check(results, reference, name, WITHOUT_DATA)
    if name != "dgc":
        check_conservation(results, reference, WITHOUT_DATA)
