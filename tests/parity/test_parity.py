"""Training through the pipeline equals single-device training: every logged value of every rank,
and the final weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from tests.support.parity import (
    ParityCase,
    assert_partitioned,
    assert_same_training,
    plain_outcome,
    steps_in,
    train_on_rank,
)
from tests.support.rank_pool import RankPool

FACTORS: dict[str, tuple[Any, ...]] = {
    "network": ("mlp", "cnn", "gpt", "gpt_list"),
    "optimizer": ("sgd", "adamw"),
    "layout": ((2, 1), (3, 1), (2, 2)),
    "schedule": ("gpipe", "1f1b"),
    "accumulate": (1, 3),
    "clip": (0.0, 0.5),
    "data": ("plain", "ragged", "shuffled"),
    "parameters": ("all", "frozen", "tied"),
}


def make_case(values: dict[str, Any]) -> ParityCase:
    """Turn one value per factor into a case."""
    stages, replicas = values["layout"]
    return ParityCase(
        network=values["network"],
        optimizer=values["optimizer"],
        stages=stages,
        replicas=replicas,
        schedule=values["schedule"],
        accumulate=values["accumulate"],
        clip=values["clip"],
        ragged=values["data"] == "ragged",
        shuffle=values["data"] == "shuffled",
        workers=2 if values["data"] == "shuffled" else 0,
        frozen=values["parameters"] == "frozen",
        tied=values["parameters"] == "tied",
        double=values["optimizer"] == "sgd" and values["accumulate"] == 1,
    )


def every_combination() -> list[dict[str, Any]]:
    """Return all combinations of the factors' values."""
    return [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]


def pairwise_cover() -> list[dict[str, Any]]:
    """Return few combinations in which every pair of values of two factors occurs (greedy)."""
    candidates = every_combination()
    pairs = [{(a, row[a], b, row[b]) for a, b in combinations(FACTORS, 2)} for row in candidates]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(candidates)), key=lambda i: len(pairs[i] & missing))
        chosen.append(candidates[best])
        missing -= pairs[best]
    return chosen


def name_of(values: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "") for value in values.values())


def check(pool: RankPool, case: ParityCase) -> None:
    expected = plain_outcome(pool, case)
    found = pool.run(train_on_rank, case.world_size, case, timeout=120)
    assert steps_in(expected.history) >= 20
    assert_partitioned(case, found)
    assert_same_training(found, expected, 1e-10 if case.double else 1e-5)


@pytest.mark.parametrize("values", pairwise_cover(), ids=name_of)
def test_pairs_of_options_equal_single_device(pool: RankPool, values: dict[str, Any]) -> None:
    check(pool, make_case(values))


@pytest.mark.exhaustive
@pytest.mark.parametrize("values", every_combination(), ids=name_of)
def test_all_options_equal_single_device(pool: RankPool, values: dict[str, Any]) -> None:
    check(pool, make_case(values))


def test_the_pairwise_choice_covers_all_pairs() -> None:
    cover = pairwise_cover()
    for (a, values), (b, others) in combinations(FACTORS.items(), 2):
        for value, other in product(values, others):
            assert any(row[a] == value and row[b] == other for row in cover)


@pytest.mark.parametrize(
    ("network", "schedule"),
    [
        ("mlp", "gpipe"),
        ("gpt", "1f1b"),
        pytest.param("mlp", "1f1b", marks=pytest.mark.exhaustive),
        pytest.param("gpt", "gpipe", marks=pytest.mark.exhaustive),
    ],
)
def test_dropout_does_not_depend_on_the_plan(pool: RankPool, network: str, schedule: str) -> None:
    one = ParityCase(
        network=network, stages=1, dropout=0.3, schedule=schedule, shuffle=True, epochs=1
    )
    (expected,) = pool.run(train_on_rank, 1, one)
    for stages, replicas in [(2, 1), (3, 1), (2, 2)]:
        case = replace(one, stages=stages, replicas=replicas)
        found = pool.run(train_on_rank, case.world_size, case)
        assert_same_training(found, expected, 1e-5)
