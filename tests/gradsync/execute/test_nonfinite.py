"""Values that are not finite reach all ranks and no residual, also when an optimizer skips the
step, and values near the largest float do no harm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dlres.codecs import codec
from lightning_dlres.codecs.gradient import RESIDUAL, GradientCodec
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.support.gradient_sync import open_sync
from tests.support.rank_pool import RankContext, RankPool

BLOCK = 4096
COUNTS = {"scalar": 1, "none": 0, "bias": 300, "weight": 9000, "large": 20_000}
DTYPES = {"bias": torch.bfloat16, "large": torch.float16}
BIASED = ("onebit", "tbq", "int8", "fp8", "fp16", "bf16", "graddrop", "dgc")
ALWAYS_TESTED = ("tbq", RAW, "onebit", "fp16", "graddrop", "qsgd", "terngrad")
CODECS = (*ALWAYS_TESTED, *(name for name in BIASED if name not in ALWAYS_TESTED))
# Codecs by what becomes NaN together: an element, a block, or (all others) a whole unit.
BY_ELEMENT, BY_BLOCK = (RAW, "tbq", "fp16", "bf16"), ("onebit", "int8", "fp8", "qsgd")
# A position of each gradient that is not finite: the ends of a gradient and of a block.
POSITIONS = {"scalar": 0, "bias": 299, "weight": 4096, "large": 8191}
# Rank, step, gradient and position of bad values.
Bad = dict[tuple[int, int, str, int], float]


def codecs_of(name: str) -> dict[str, GradientCodec]:
    chosen = codec(name)
    return {name: chosen} if isinstance(chosen, GradientCodec) else {}


def plan_for(world_size: int, topology: str, name: str) -> SyncPlan:
    specs = [GradientSpec(name=key, count=count) for key, count in COUNTS.items()]
    is_divisible = name == RAW or codecs_of(name)[name].is_divisible
    choices = [
        CodecChoice(codec=name, partitions=3 if is_divisible and spec.count > 10_000 else 1)
        for spec in specs
    ]
    return make_plan(specs, choices, world_size=world_size, topology=topology, alignment=BLOCK)


def gradients(rank: int, step: int, bad: Bad, mixed: bool) -> dict[str, Tensor]:
    """Return the gradients of a rank, in several dtypes if they are mixed."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = {
        name: torch.randn(count, generator=generator).to(
            DTYPES.get(name, torch.float32) if mixed else torch.float32
        )
        for name, count in COUNTS.items()
    }
    for (owner, when, name, position), value in bad.items():
        if (owner, when) == (rank, step):
            values[name][position] = value
    return values


def synchronise(
    context: RankContext, topology: str, name: str, steps: int, bad: Bad, *, mixed: bool
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the means of all steps, and the residuals after them.

    As with a gradient scaler, a step whose means are not all finite is undone, unless dtypes are
    mixed, and the scale changes after it.
    """
    plan, scale = plan_for(context.world_size, topology, name), 2.0**10
    with open_sync(context, plan, codecs_of(name), keeps_previous=not mixed) as opened:
        means = []
        for step in range(steps):
            own = gradients(context.rank, step, bad, mixed)
            if mixed:
                opened.sync.run(step, own)
            else:
                own = {key: value * scale for key, value in own.items()}
                opened.sync.run(step, own, loss_scale=scale)
                own = {key: value / scale for key, value in own.items()}
                if not all(value.isfinite().all() for value in own.values()):
                    opened.sync.undo_step()
                    scale /= 2
            means.append(own)
            for state in opened.sync.states.by_key.values():
                assert all(tensor.isfinite().all() for tensor in state.values()), step
        residuals = {key: torch.zeros(count) for key, count in COUNTS.items()}
        for (key, start, stop, _), state in opened.sync.states.by_key.items():
            if RESIDUAL in state:
                residuals[key][start:stop] += state[RESIDUAL]
    return means, residuals


def not_finite(plan: SyncPlan, name: str) -> dict[str, Tensor]:
    """Return masks of the elements that become NaN because of those in `POSITIONS`."""
    masks = {key: torch.zeros(count, dtype=torch.bool) for key, count in COUNTS.items()}
    for key, position in POSITIONS.items():
        for unit in plan.units_of(key):
            if unit.start <= position < unit.stop:
                if name in BY_ELEMENT:
                    masks[key][position] = True
                elif name in BY_BLOCK:
                    first = position - (position - unit.start) % BLOCK
                    masks[key][first : min(first + BLOCK, unit.stop)] = True
                else:
                    masks[key][unit.start : unit.stop] = True
    return masks


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def cases(names: Sequence[str], others: Sequence[Any], default: int) -> list[Any]:
    """Return all pairs with a topology and one of `others`; most of them are exhaustive.

    The first `default` names have one pair each that always runs.
    """
    pairs = [(topology, other) for other in others for topology in ("ps", "ring")]
    return [
        pytest.param(
            *pair,
            name,
            marks=[] if number % len(pairs) == i and number < default else pytest.mark.exhaustive,
        )
        for number, name in enumerate(names)
        for i, pair in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("topology", "world_size", "name"), cases(CODECS, [2, 3], default=len(ALWAYS_TESTED))
)
def test_values_that_are_not_finite_reach_all_ranks_and_no_residual(
    pool: RankPool, topology: str, world_size: int, name: str
) -> None:
    """All other elements, those of the next step included, are finite."""
    values = [math.nan, math.inf, -math.inf, math.nan]
    bad = {
        (index % world_size, 1, key, position): value
        for index, ((key, position), value) in enumerate(
            zip(POSITIONS.items(), values, strict=True)
        )
    }
    results = pool.run(synchronise, world_size, topology, name, 3, bad, mixed=True)
    masks = not_finite(plan_for(world_size, topology, name), name)
    for means, _ in results:
        for step, means_of_step in enumerate(means):
            for key, mean in means_of_step.items():
                assert mean.dtype == DTYPES.get(key, torch.float32)
                expected = masks[key] if step == 1 else torch.zeros_like(masks[key])
                assert torch.equal(~mean.isfinite(), expected), (key, step)
                assert same_bits(mean, results[0][0][step][key])


@pytest.mark.parametrize(("topology", "ranks", "name"), cases(BIASED, [3], default=3))
def test_nothing_is_lost_where_steps_overflow(
    pool: RankPool, topology: str, ranks: int, name: str
) -> None:
    """N times the means of the other steps, and all residuals, are the gradients of these steps."""
    steps, skipped = 7, (0, 2, 3, 5)
    bad = {
        (0, 0, "weight", 5000): math.inf,
        (1, 2, "large", 3): math.nan,
        (2, 3, "bias", 7): -math.inf,
        (0, 5, "large", 19_999): math.inf,
    }
    results = pool.run(synchronise, ranks, topology, name, steps, bad, mixed=False)
    kept_steps = [step for step in range(steps) if step not in skipped]
    for key in COUNTS:
        given = sum(
            gradients(r, s, bad, False)[key].double() for s in kept_steps for r in range(ranks)
        )
        total = sum(ranks * results[0][0][step][key].double() for step in kept_steps)
        total += sum(residuals[key].double() for _, residuals in results)
        torch.testing.assert_close(total, given, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("topology", "value", "name"), cases(CODECS, [3e38, 1e38], default=2))
def test_huge_values_are_the_same_on_all_ranks_and_leave_finite_states(
    pool: RankPool, topology: str, value: float, name: str
) -> None:
    """Three times 3e38 is no float. Many steps of it overflow the residual, too."""
    bad = {
        (rank, step, "weight", position): value
        for rank in range(3)
        for step in (1, 2, 3)
        for position in (0, 1, 4095, 8999)
    }
    bad |= {(rank, 2, "scalar", 0): -value for rank in range(3)}
    results = pool.run(synchronise, 3, topology, name, 5, bad, mixed=True)
    for means, _ in results:
        for step, means_of_step in enumerate(means):
            for key, mean in means_of_step.items():
                assert same_bits(mean, results[0][0][step][key])
                if key in DTYPES or step == 0:
                    assert mean.isfinite().all()
