"""`OneBitAdam` on virtual ranks computes what it computes on real ranks, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.virtual_momentum import MomentumRanks
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.optimizers import MomentumSync, OneBitAdam, momentum_hook
from tests.support.linear_loss import LinearLoss, random_gradients
from tests.support.rank_pool import RankContext, RankPool

OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "freeze_step": 2}
STEPS = 5
# gloo adds the gradients of two ranks in any order with the same result.
WORLD_SIZE = 2


def real_parameters(context: RankContext) -> dict[str, Tensor]:
    context.init_process_group()
    torch.manual_seed(0)
    model = LinearLoss()
    sync = MomentumSync(min_bytes=0)
    optimizer = OneBitAdam(model.parameters(), sync=sync, **OPTIONS)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(sync, momentum_hook)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(random_gradients(context.rank, step)).backward()
        optimizer.step()
    sync.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def started() -> tuple[LinearLoss, MomentumRanks]:
    torch.manual_seed(0)
    model = LinearLoss()
    return model, MomentumRanks(model, WORLD_SIZE, "onebit", OPTIONS)


def test_the_parameters_are_those_of_real_ranks(pool: RankPool) -> None:
    model, ranks = started()
    for step in range(STEPS):
        ranks.step([random_gradients(rank, step) for rank in range(WORLD_SIZE)])
    assert ranks.optimizers[0].is_frozen
    for real in pool.run(real_parameters, WORLD_SIZE):
        for name, parameter in model.named_parameters():
            assert torch.equal(real[name], parameter), name


@pytest.mark.parametrize("step", [0, 3])
def test_an_overflow_on_one_rank_skips_the_step_of_all(step: int) -> None:
    model, ranks = started()
    for earlier in range(step):
        ranks.step([random_gradients(rank, earlier) for rank in range(WORLD_SIZE)])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = [random_gradients(rank, step) for rank in range(WORLD_SIZE)]
    next(iter(own[1].values())).view(-1)[0] = math.inf
    ranks.step(own)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_the_error_of_one_rank_ends_the_step_of_all() -> None:
    _, ranks = started()
    for step in range(3):
        ranks.step([random_gradients(rank, step) for rank in range(WORLD_SIZE)])
    own = [random_gradients(rank, 3) for rank in range(WORLD_SIZE)]
    name = next(iter(own[1]))
    own[1][name] = own[1][name].to_sparse()
    with pytest.raises(ConfigError, match="gradients must be dense"):
        ranks.step(own)
