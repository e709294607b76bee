"""Ranks in one process compute what real ranks compute, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.virtual_ranks import VirtualRanks
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from tests.support.linear_loss import SHAPES, LinearLoss, random_gradients
from tests.support.rank_pool import RankContext, RankPool

STEPS = 3


def real_means(
    context: RankContext, algorithm: str, options: dict[str, Any] | None
) -> list[dict[str, Tensor]]:
    context.init_process_group()
    model = LinearLoss()
    state = GradientSyncState(
        algorithm=algorithm,
        codec_options=options,
        topology="ps",
        coordinator="none",
        min_bytes=2000,
    )
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.03)
    wrapped.register_comm_hook(state, compressed_hook)
    means = []
    for step in range(STEPS):
        model.zero_grad()
        wrapped(random_gradients(context.rank, step)).backward()
        means.append({name: p.grad.clone() for name, p in model.named_parameters()})
    state.close()
    return means


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("raw", None),
        ("onebit", None),
        ("tbq", None),
        ("qsgd", None),
        ("dgc", {"ratio": 0.1, "momentum": 0.9}),
    ],
)
def test_the_means_are_those_of_real_ranks(
    pool: RankPool, algorithm: str, options: dict[str, Any] | None
) -> None:
    world_size = 3
    ranks = pool.run(real_means, world_size, algorithm, options)
    virtual = VirtualRanks(
        dict(LinearLoss().named_parameters()), world_size, algorithm, options, min_bytes=2000
    )
    for step in range(STEPS):
        means = virtual.mean([random_gradients(rank, step) for rank in range(world_size)])
        for real in ranks:
            assert all(torch.equal(real[step][name], means[name]) for name in SHAPES)
