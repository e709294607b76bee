"""Ranks plan together: they get one decision, and train with its plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dlres.core.comm.channel_ends import LONGER_THAN_ANY_RUN
from lightning_dlres.core.comm.mailbox import Mailbox
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.planning import (
    SyncPlanningOptions,
    codecs_for_auto,
    is_adam_like,
    plan_synchronisation,
)
from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.plan.decision import SyncDecision
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.support.rank_pool import RankContext, RankPool

COUNTS = {"weight": 90_000, "bias": 10, "none": 0}


def mailbox_of(context: RankContext) -> Mailbox:
    context.init_process_group()
    group = dist.new_group(backend="gloo", timeout=LONGER_THAN_ANY_RUN)
    assert isinstance(group, dist.ProcessGroup)
    names = [f"rank {rank}" for rank in range(context.world_size)]
    return Mailbox(group, context.rank, names, timeout=20.0, check=lambda: None, tracer=Tracer())


def plan(context: RankContext, options: dict[str, Any]) -> tuple[SyncDecision, float]:
    """Return the decision, and the error of the mean that its plan computes."""
    mailbox = mailbox_of(context)
    specs = [GradientSpec(name=name, count=count) for name, count in COUNTS.items()]
    codecs = codecs_for_auto()
    decision = plan_synchronisation(specs, codecs, mailbox, SyncPlanningOptions(**options))
    error = 0.0
    if decision.plan is not None:
        synchroniser = GradientSynchroniser(decision.plan, codecs, mailbox, Tracer())
        gradients = {
            name: torch.full((count,), 1.0 + context.rank) for name, count in COUNTS.items()
        }
        synchroniser.run(0, gradients)
        mean = (1 + context.world_size) / 2
        error = max(float((gradients[name] - mean).abs().max()) for name in ("weight", "bias"))
        dist.barrier()
        synchroniser.close()
    mailbox.close(orderly=True)
    dist.barrier()
    return decision, error


def plan_again(context: RankContext) -> list[SyncDecision]:
    """Return decisions before and after a step."""
    mailbox = mailbox_of(context)
    specs, options = [GradientSpec(name="weight", count=9000)], SyncPlanningOptions(algorithm="raw")
    decisions = [plan_synchronisation(specs, {}, mailbox, options)]
    assert decisions[0].plan is not None
    synchroniser = GradientSynchroniser(decisions[0].plan, {}, mailbox, Tracer())
    synchroniser.run(0, {"weight": torch.ones(9000)})
    decisions.append(plan_synchronisation(specs, {}, mailbox, options))
    dist.barrier()
    synchroniser.close()
    mailbox.close(orderly=True)
    dist.barrier()
    return decisions


def test_a_new_plan_may_be_made_between_two_steps(pool: RankPool) -> None:
    one, other = pool.run(plan_again, 2)
    assert one == other
    assert one[0].costs != one[1].costs


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_take_the_decision_of_rank_0(pool: RankPool, world_size: int) -> None:
    (first, _), *others = pool.run(plan, world_size, {})
    assert all(decision == first for decision, _ in others)
    assert {contender.algorithm for contender in first.contenders} == {
        "none",
        "raw",
        "fp16",
        "bf16",
        "int8",
    }
    assert {contender.topology for contender in first.contenders} == {"", "ps", "ring"}


def test_every_codec_of_auto_is_a_candidate_for_sgd(pool: RankPool) -> None:
    (decision, _), _ = pool.run(plan, 2, {"is_adam_like": False, "topology": "ps"})
    assert {"fp16", "bf16", "int8"} <= {contender.algorithm for contender in decision.contenders}
    assert {contender.topology for contender in decision.contenders} == {"", "ps"}


@pytest.mark.parametrize("algorithm", ["raw", "int8"])
def test_a_given_algorithm_is_not_replaced(pool: RankPool, algorithm: str) -> None:
    results = pool.run(plan, 2, {"algorithm": algorithm})
    for decision, error in results:
        assert decision.algorithm == algorithm
        assert not decision.is_off
        assert error < 1e-2


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([torch.optim.SGD], False),
        ([torch.optim.SGD, torch.optim.SGD], False),
        ([torch.optim.AdamW], True),
        ([torch.optim.SGD, torch.optim.Adam], True),
        ([torch.optim.RMSprop], True),
        # Nothing is known.
        ([], True),
    ],
)
def test_only_sgd_is_known_to_suit_one_and_two_bits(
    kinds: list[type[torch.optim.Optimizer]], expected: bool
) -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    optimizers = [kind(parameters, lr=0.1) for kind in kinds]  # type: ignore[call-arg]
    assert is_adam_like(optimizers) == expected
