"""Gradients are summed over the ranks that hold a parameter, while backward still runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dlres.core.trace import Tracer
from lightning_dlres.pipeline.execute.gradients import GradientSync, make_groups
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.pipeline.plan.plan import PipelinePlan, consecutive_replicas
from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer
from lightning_dlres.pipeline.stage.stage import Stage
from tests.support.rank_pool import RankContext, RankPool

SECONDS = 20.0
CPU = torch.device("cpu")
Replicas = tuple[tuple[int, ...], ...]


class Model(nn.Module):
    """A model of four layers, and one parameter outside of them.

    The first and the last layer share a weight.
    """

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3), nn.Linear(3, 3)
        )
        if tied:
            self.net[3].weight = self.net[0].weight
        self.net[2].bias.requires_grad_(False)
        self.outer = nn.Parameter(torch.zeros(2))


def layers_of(model: Model) -> ModelLayers:
    names = tuple(f"net.{index}" for index in range(len(model.net)))
    return ModelLayers(model, names, tuple(model.net))


def make_sync(
    context: RankContext, model: Model, plan: PipelinePlan, bucket_bytes: int = 4 << 20
) -> tuple[GradientSync, list[nn.Parameter], Tracer]:
    """Return a rank's sync, the trainable parameters that it holds, and its tracer."""
    context.init_process_group()
    layers, tracer = layers_of(model), Tracer()
    owners = layers.owners(plan)
    _, stage = plan.position(context.rank)
    own = layers.trainable(plan.layers_of(stage))
    groups = make_groups(plan, owners, timedelta(seconds=SECONDS))
    sync = GradientSync(
        own,
        layers.non_pipelined_parameters(),
        owners=owners,
        groups=groups,
        stage=stage,
        timeout=SECONDS,
        check=lambda: None,
        tracer=tracer,
        bucket_bytes=bucket_bytes,
    )
    held = list(dict.fromkeys([p for ps in own for p in ps] + layers.non_pipelined_parameters()))
    return sync, held, tracer


def gradient(parameter: nn.Parameter, name: str, rank: int) -> Tensor:
    """Return a rank's gradient of small integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(len(name) * 31 + sum(map(ord, name)) + 1000 * rank)
    return torch.randint(-9, 9, parameter.shape, generator=generator).to(parameter.dtype)


def sum_gradients(
    context: RankContext, replicas: Replicas, split: tuple[int, ...], bucket_bytes: int, skip: Any
) -> dict[str, Tensor | None]:
    """Return the sums of a second step by parameter; `skip` holds (rank, name) without gradient."""
    model = Model()
    plan = PipelinePlan(replicas=replicas, split=split)
    sync, held, _ = make_sync(context, model, plan, bucket_bytes)
    names = {p: name for name, p in model.named_parameters()}
    totals: dict[str, Tensor | None] = {}
    for step in range(2):
        buffer = GradientBuffer()
        for p in held:
            if (context.rank, names[p]) not in skip:
                buffer.add(p, gradient(p, names[p], context.rank) * (step + 1))
        _, stage = plan.position(context.rank)
        for position in reversed(range(split[stage])):
            sync.layer_done(position, buffer)
        sync.finish(buffer)
        totals = {names[p]: buffer.gradients.get(p) for p in held}
        assert set(buffer.gradients) <= set(held)
    return totals


def expected_sum(
    name: str, holders: Sequence[int], skip: frozenset[tuple[int, str]]
) -> Tensor | None:
    parameter = dict(Model().named_parameters())[name]
    parts = [gradient(parameter, name, r) * 2 for r in holders if (r, name) not in skip]
    return sum(parts[1:], start=parts[0]) if parts else None


def assert_sums(
    pool: RankPool,
    replicas: Replicas,
    split: tuple[int, ...],
    bucket_bytes: int = 4 << 20,
    skip: frozenset[tuple[int, str]] = frozenset(),
) -> None:
    world = sum(map(len, replicas))
    results = pool.run(sum_gradients, world, replicas, split, bucket_bytes, skip)
    for name in {name for result in results for name in result}:
        holders = [rank for rank in range(world) if name in results[rank]]
        expected = expected_sum(name, holders, skip)
        for rank in holders:
            total = results[rank][name]
            assert (total is None) == (expected is None), (name, rank)
            assert total is None or torch.equal(total, expected), (name, rank)
            assert total is None or total.dtype == expected.dtype


@pytest.mark.parametrize("bucket_bytes", [1, 40, 4 << 20])
def test_replicas_sum_their_gradients(pool: RankPool, bucket_bytes: int) -> None:
    assert_sums(pool, ((0,), (1,)), (4,), bucket_bytes)


def test_stages_sum_gradients_of_shared_parameters(pool: RankPool) -> None:
    assert_sums(pool, ((0, 1),), (2, 2))
    assert_sums(pool, ((1, 0),), (1, 3))
    assert_sums(pool, ((0, 1, 2),), (1, 2, 1))


def test_replicas_of_several_stages_sum_their_gradients(pool: RankPool) -> None:
    assert_sums(pool, consecutive_replicas(4, 2), (1, 3), bucket_bytes=40)


@pytest.mark.parametrize(
    "skip",
    [
        {(0, "net.0.weight"), (1, "net.1.bias")},
        {(0, "net.1.weight"), (1, "net.1.weight"), (0, "outer"), (1, "outer")},
        {(1, f"net.{i}.{n}") for i in range(4) for n in ("weight", "bias")} | {(1, "outer")},
    ],
    ids=["on one rank", "on all ranks", "a replica without a micro-batch"],
)
def test_missing_gradients_count_as_zero(pool: RankPool, skip: set[tuple[int, str]]) -> None:
    assert_sums(pool, ((0,), (1,)), (4,), 40, frozenset(skip))
    assert_sums(pool, ((0, 1),), (2, 2), skip=frozenset(skip))


def sync_used_outside(context: RankContext) -> Tensor:
    """Return the sum for a weight that gets a gradient after backward has passed its layer."""
    model = Model(tied=False)
    model.again = model.net[0]
    sync, _, _ = make_sync(context, model, PipelinePlan(replicas=((0,), (1,)), split=(4,)))
    buffer, weight = GradientBuffer(), model.net[0].weight
    buffer.add(weight, torch.ones_like(weight))
    sync.layer_done(0, buffer)
    buffer.add(weight, torch.full_like(weight, 10.0 * (1 + context.rank)))
    sync.finish(buffer)
    return buffer.gradients[weight]


def test_a_layer_that_is_also_used_outside_is_sent_last(pool: RankPool) -> None:
    for total in pool.run(sync_used_outside, 2):
        assert torch.equal(total, torch.full((3, 3), 32.0))


def sync_alone(context: RankContext) -> None:
    model = Model()
    sync, held, tracer = make_sync(context, model, PipelinePlan(replicas=((0,),), split=(4,)))
    buffer = GradientBuffer()
    gradients = {p: torch.ones_like(p) for p in held}
    for p, g in gradients.items():
        buffer.add(p, g)
    for position in reversed(range(4)):
        sync.layer_done(position, buffer)
    sync.finish(buffer)
    assert all(buffer.gradients[p] is g for p, g in gradients.items()), "nothing is copied"
    assert not tracer.spans()


def test_a_single_rank_sends_nothing(pool: RankPool) -> None:
    pool.run(sync_alone, 1)


def record_overlap(context: RankContext) -> dict[int, tuple[int, int, int]]:
    """Return times in nanoseconds by the size of a bucket in bytes.

    The times are the start and the end of its all-reduce, and the start of the lowest layer's
    backward.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(16, 32)]
    model = nn.ModuleDict({"net": nn.Sequential(*layers)})
    plan = PipelinePlan(replicas=((0,), (1,)), split=(3,))
    context.init_process_group()
    model_layers = ModelLayers(model, ("net.0", "net.1", "net.2"), tuple(layers))
    owners, tracer = model_layers.owners(plan), Tracer()
    groups = make_groups(plan, owners, timedelta(seconds=SECONDS))
    parameters = model_layers.trainable(range(3))
    sync = GradientSync(
        parameters,
        [],
        owners=owners,
        groups=groups,
        stage=0,
        timeout=SECONDS,
        check=lambda: None,
        tracer=tracer,
        bucket_bytes=1,
    )
    lowest_began = 0

    def lowest(x: Tensor) -> Tensor:
        class RecordBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                return y.clone()

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                nonlocal lowest_began
                lowest_began = time.perf_counter_ns()
                return g

        return RecordBackward.apply(layers[0](x))

    stage = Stage(
        [lowest, *layers[1:]],
        parameters,
        first_layer=0,
        device=CPU,
        context=nullcontext,
        by_layer=True,
    )
    stage.forward(0, torch.randn(4, 8), 1)
    buffer = GradientBuffer()
    stage.backward(
        0, [torch.ones(4, 32)], buffer, lambda position: sync.layer_done(position, buffer)
    )
    sync.finish(buffer)
    spans = [span for span in tracer.spans() if span.name == "all-reduce"]
    assert all(span.category == "sync" for span in spans)
    return {int(s.args["nbytes"] or 0): (s.start_ns, s.end_ns, lowest_began) for s in spans}


def test_upper_layers_are_sent_while_lower_ones_compute(pool: RankPool) -> None:
    for result in pool.run(record_overlap, 2):
        sizes = [32 * 16 * 4, 32 * 4, 16 * 8 * 4, 8 * 8 * 4]
        assert sorted(result) == sorted(sizes), "a bucket for each parameter"
        *upper, lowest = (result[size] for size in sizes)
        for start, end, lowest_start in upper:
            assert start < lowest_start
            assert start <= end
        assert lowest[0] > lowest[2], "the lowest layer's gradient is sent after its backward"


def sync_twice(context: RankContext) -> bool:
    """Return True if a step without gradients keeps none of the step before."""
    model = Model(tied=False)
    plan = PipelinePlan(replicas=((0,), (1,)), split=(4,))
    sync, held, _ = make_sync(context, model, plan)
    first, second = GradientBuffer(), GradientBuffer()
    for p in held:
        first.add(p, torch.ones_like(p))
    sync.finish(first)
    sync.finish(second)
    return not second.gradients


def test_gradients_of_one_step_are_not_in_the_next(pool: RankPool) -> None:
    assert pool.run(sync_twice, 2) == [True, True]


def make_all_groups(context: RankContext) -> list[tuple[tuple[int, ...], list[int]]]:
    context.init_process_group()
    plan = PipelinePlan(replicas=consecutive_replicas(4, 2), split=(1, 3))
    owners = layers_of(Model()).owners(plan)
    groups = make_groups(plan, owners, timedelta(seconds=SECONDS))
    return [(stages, dist.get_process_group_ranks(group)) for stages, group in groups.items()]


def test_groups_are_the_ranks_that_hold_a_parameter(pool: RankPool) -> None:
    both = ((0, 1), [0, 1, 2, 3])
    for rank, groups in enumerate(pool.run(make_all_groups, 4)):
        own = ((0,), [0, 2]) if rank in (0, 2) else ((1,), [1, 3])
        assert sorted(groups) == sorted([own, both])
