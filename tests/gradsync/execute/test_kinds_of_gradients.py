"""Complex and sparse gradients of DistributedDataParallel, beside dense real ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.optimizers import OneBitAdam, momentum_hook
from tests.support.rank_pool import RankContext, RankPool

STEPS = 6


class Model(nn.Module):
    """A complex layer with two parameters of different size, and an embedding."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(20, 8, sparse=is_sparse)
        self.inner = nn.Parameter(0.5 * torch.randn(8, 5, dtype=torch.complex64))
        self.outer = nn.Parameter(0.5 * torch.randn(5, 16, dtype=torch.complex64))
        self.head = nn.Linear(16, 1)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.embedding(indices).to(torch.complex64)
        return self.head((x @ self.inner @ self.outer).abs())


def train(
    context: RankContext, options: dict[str, Any] | None, *, is_sparse: bool, is_named: bool = True
) -> dict[str, Tensor]:
    """Return the weights after some steps; `options` of the hook's state, or None for plain DDP."""
    context.init_process_group()
    model = Model(is_sparse=is_sparse)
    wrapped = DistributedDataParallel(model)
    state = None
    if options is not None:
        state = GradientSyncState(**{"topology": "ps", "coordinator": "none", **options})
        if is_named:
            state.name_parameters(model.named_parameters())
        wrapped.register_comm_hook(state, compressed_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + context.rank)
        indices = torch.randint(20, (6,), generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(indices), indices[:, None] / 20).backward()
        optimizer.step()
    if state is not None:
        state.close()
    dist.barrier()
    return copy.deepcopy(model.state_dict())


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[key] - other[key]).abs().max()) for key in one)


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("topology", ["ps", "ring"])
def test_uncompressed_training_is_near_that_of_ddp(
    pool: RankPool, topology: str, is_sparse: bool, is_named: bool
) -> None:
    plain = pool.run(train, 3, None, is_sparse=is_sparse)
    options = {"algorithm": "raw", "topology": topology}
    ours = pool.run(train, 3, options, is_sparse=is_sparse, is_named=is_named)
    assert all(equal(ours[0], other) for other in ours[1:])
    assert distance(plain[0], ours[0]) < 1e-6


@pytest.mark.parametrize("coordinator", ["none", "replay"])
def test_compressed_training_stays_near_that_of_ddp(pool: RankPool, coordinator: str) -> None:
    options = {"algorithm": "int8", "min_bytes": 0, "coordinator": coordinator}
    plain = pool.run(train, 2, None, is_sparse=True)
    ours = pool.run(train, 2, options, is_sparse=True)
    assert equal(*ours)
    assert 0 < distance(plain[0], ours[0]) < 4e-3


def error_of_sparse_momentum(context: RankContext) -> str:
    context.init_process_group()
    model = nn.Embedding(20, 8, sparse=True)
    optimizer = OneBitAdam(model.parameters())
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(optimizer.sync, momentum_hook)
    try:
        wrapped(torch.tensor([context.rank])).sum().backward()
    except ConfigError as error:
        return str(error)
    return ""


def test_one_bit_adam_refuses_sparse_gradients(pool: RankPool) -> None:
    for message in pool.run(error_of_sparse_momentum, 2):
        assert "must be dense with OneBitAdam" in message
        assert "sparse=False" in message
