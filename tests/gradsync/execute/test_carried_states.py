"""Residuals under a new plan: each rank keeps their sum, whatever states take them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightning_dlres.codecs.gradient import RESIDUAL
from lightning_dlres.gradsync.execute.carried_states import carried_states
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.execute.unit_graphs import unit_graph
from lightning_dlres.gradsync.plan.graph import TaskKind
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.gradsync.plan.costs_for_tests import codecs_by_name

# Elements of each gradient.
COUNTS = {"large": 30_000, "weight": 9000, "bias": 10}
CPU = torch.device("cpu")
CODECS = codecs_by_name("int8", "tbq", "qsgd")
RANKS = 3


def plan(topology: str, codecs: tuple[str, str, str], partitions: int) -> SyncPlan:
    """Return a plan with the codec of each gradient, which cuts all but the smallest one."""
    specs = [GradientSpec(name=name, count=count) for name, count in COUNTS.items()]
    choices = [
        CodecChoice(codec=codec, partitions=partitions if spec.count > 10 else 1)
        for spec, codec in zip(specs, codecs, strict=True)
    ]
    return make_plan(specs, choices, world_size=RANKS, topology=topology, alignment=4096)


PLANS: dict[str, SyncPlan | None] = {
    "all-reduce": None,
    "ps": plan("ps", ("int8", "int8", "int8"), 3),
    "ps, other cut": plan("ps", ("int8", "int8", RAW), 2),
    "ring": plan("ring", ("int8", "int8", "int8"), 3),
    "ring, other codecs": plan("ring", ("tbq", "qsgd", "int8"), 1),
}


def states_of(old: SyncPlan, rank: int) -> CodecStates:
    """Return the states of a rank under a plan, with random residuals."""
    states, generator = CodecStates(), torch.Generator().manual_seed(rank)
    for unit in old.units:
        for task in unit_graph(old, unit, rank, CODECS):
            if unit.codec != RAW and task.kind is TaskKind.ENCODE:
                state = states.of(unit, task.part, CODECS[unit.codec], CPU)
                if RESIDUAL in state:
                    state[RESIDUAL].normal_(generator=generator)
    return states


def total(states: CodecStates, unsent: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums of all residuals and unsent values: float64[elements] by gradient."""
    sums = {name: torch.zeros(count, dtype=torch.float64) for name, count in COUNTS.items()}
    for (name, start, stop, _), state in states.by_key.items():
        if RESIDUAL in state:
            sums[name][start:stop] += state[RESIDUAL]
    for name, values in unsent.items():
        sums[name] += values
    return sums


@pytest.mark.parametrize(
    ("before", "after"), [pair for pair in itertools.product(PLANS, PLANS) if PLANS[pair[0]]]
)
def test_each_rank_keeps_the_sum_of_its_residuals(before: str, after: str) -> None:
    old, new = PLANS[before], PLANS[after]
    assert old is not None
    for rank in range(RANKS):
        states = states_of(old, rank)
        expected = total(states, {})
        carried, unsent = carried_states(states, old, new, CODECS, rank, CPU)
        got = total(carried, unsent)
        for name in COUNTS:
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-6)
        if new is not None:
            # Only a place where the rank encodes may have a state.
            encoded = {
                (unit.gradient, unit.start, unit.stop, task.part)
                for unit in new.units
                for task in unit_graph(new, unit, rank, CODECS)
                if task.kind is TaskKind.ENCODE
            }
            assert carried.by_key.keys() <= encoded
        else:
            assert not carried.by_key


def test_all_ranks_save_residuals_of_the_same_gradients() -> None:
    """All ranks gather them for a checkpoint, also a rank that has encoded nothing."""
    old = PLANS["ps"]
    assert old is not None
    for states in (CodecStates(), states_of(old, 0)):
        _, unsent = carried_states(states, old, None, CODECS, 0, CPU)
        assert {name: values.numel() for name, values in unsent.items()} == COUNTS


def test_states_of_unchanged_units_are_the_same_tensors() -> None:
    old = PLANS["ring"]
    assert old is not None
    states = states_of(old, 1)
    before = dict(states.by_key)
    carried, unsent = carried_states(states, old, old, CODECS, 1, CPU)
    assert not unsent
    assert before.keys() == carried.by_key.keys()
    assert all(carried.by_key[key] is state for key, state in before.items())
