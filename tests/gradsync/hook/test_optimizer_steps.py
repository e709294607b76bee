"""An overflow undoes all backwards of an optimizer's step, and no more."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.codecs.gradient import RESIDUAL
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from tests.support.rank_pool import RankContext, RankPool

# Steps of the optimizer, backwards of each step, and elements of the parameter.
STEPS, BACKWARDS, COUNT = 5, 3, 9000


class GivenGradient(nn.Module):
    """Module with one parameter, whose gradient is the input of `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(COUNT))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def train(
    context: RankContext, algorithm: str, overflows: Sequence[tuple[int, int]], steps: Sequence[int]
) -> Tensor:
    """Return the weights after some steps, each with several synchronised backwards.

    Args:
        context: This rank.
        algorithm: Codec of the gradients.
        overflows: Pairs of a step and one of its backwards, in which rank 0 has an infinite
            gradient.
        steps: Numbers of the steps, which choose the gradients.
    """
    context.init_process_group()
    model = GivenGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    state = GradientSyncState(
        algorithm=algorithm,
        topology="ps",
        coordinator="none",
        min_bytes=0,
        optimizers=[optimizer],
        keeps_previous=True,
    )
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, compressed_hook)
    for step in steps:
        optimizer.zero_grad()
        for part in range(BACKWARDS):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + context.rank)
            gradient = torch.randn(COUNT, generator=generator)
            if (step, part) in overflows and context.rank == 0:
                gradient[5] = math.inf
            state.loss_scale = scaler.get_scale()
            scaler.scale(wrapped(gradient)).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            state.undo_step()
    state.close()
    return model.weight.detach().clone()


@pytest.mark.parametrize("part", range(BACKWARDS))
@pytest.mark.parametrize("algorithm", ["tbq", pytest.param("onebit", marks=pytest.mark.exhaustive)])
def test_all_backwards_of_a_skipped_step_leave_no_trace(
    pool: RankPool, algorithm: str, part: int
) -> None:
    """Residuals return to their values from before the step's first backward."""
    overflows = [(0, part), (2, part), (3, part)]
    skipped = {step for step, _ in overflows}
    ours, other = pool.run(train, 2, algorithm, overflows, range(STEPS))
    assert torch.equal(ours, other)
    taken = [step for step in range(STEPS) if step not in skipped]
    expected, _ = pool.run(train, 2, algorithm, [], taken)
    assert ours.isfinite().all()
    assert torch.equal(ours, expected)


def lost_after_partial_skips(context: RankContext) -> float:
    """Return the largest part of the gradients that is lost when one of two optimizers skips.

    One backward serves both optimizers. Those of "b" skip every second step.
    """
    context.init_process_group()
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(COUNT)) for name in "ab"})
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in model.values()]
    state = GradientSyncState(
        algorithm="tbq",
        topology="ps",
        coordinator="none",
        min_bytes=0,
        optimizers=optimizers,
        keeps_previous=True,
    )
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(TwoGradients(model))
    wrapped.register_comm_hook(state, compressed_hook)
    own = {name: torch.zeros(COUNT) for name in model}
    for step in range(STEPS):
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + context.rank)
        gradients = {name: torch.randn(COUNT, generator=generator) for name in model}
        wrapped(gradients).backward()
        optimizers[0].step()
        own["a"] += gradients["a"]
        if step % 2:
            state.undo_step(optimizers[1].param_groups[0]["params"])
        else:
            optimizers[1].step()
            own["b"] += gradients["b"]
    for entry in state.state_dict()["units"]:
        part = own[entry["gradient"]][entry["start"] : entry["stop"]]
        part -= entry["tensors"][RESIDUAL]
    state.close()
    errors = []
    for name, parameter in model.items():
        dist.all_reduce(own[name])
        errors.append((own[name] + context.world_size * parameter.detach()).abs().max())
    return float(max(errors))


class TwoGradients(nn.Module):
    """Module whose gradients are its inputs, by name."""

    def __init__(self, parameters: nn.ParameterDict) -> None:
        super().__init__()
        self.parameters_by_name = parameters

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum(
            ((self.parameters_by_name[name] * g).sum() for name, g in gradients.items()),
            torch.zeros(()),
        )


def test_a_skip_of_one_optimizer_leaves_the_residuals_of_the_other(pool: RankPool) -> None:
    assert max(pool.run(lost_after_partial_skips, 2)) < 1e-4
