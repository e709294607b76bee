"""Codecs that accumulate momentum on each rank, also on the rank that merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.codecs.gradient.dgc import DGC
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from tests.support.linear_loss import SHAPES, LinearLoss, random_gradients
from tests.support.rank_pool import RankContext, RankPool

STEPS = 4


def train(context: RankContext, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Synchronise gradients that are equal on all ranks; return the means of each step."""
    context.init_process_group()
    model = LinearLoss()
    state = GradientSyncState(
        algorithm="dgc", codec_options=options, topology="ps", coordinator="none", min_bytes=0
    )
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, compressed_hook)
    means = []
    for step in range(STEPS):
        model.zero_grad()
        wrapped(random_gradients(0, step)).backward()
        means.append({name: p.grad.clone() for name, p in model.named_parameters()})
    state.close()
    return means


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"clip": 0.5}])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_transforms_its_gradient(
    pool: RankPool, options: dict[str, Any], world_size: int
) -> None:
    """All ranks have equal gradients, so one local codec predicts the mean, whichever rank merges.

    The rank that merges must also encode its own gradient: momentum changes it.
    """
    options = {"ratio": 0.05, **options}
    ranks = pool.run(train, world_size, options)
    codec = DGC(**options)
    for name, shape in SHAPES.items():
        count = torch.Size(shape).numel()
        own = codec.new_state(count, torch.device("cpu"))
        aggregator = codec.new_state(count, torch.device("cpu"), is_aggregator=True)
        for step in range(STEPS):
            payload = torch.empty(codec.payload_bytes(count), dtype=torch.uint8)
            total, mean = torch.empty(count), torch.empty(count)
            codec.compress(random_gradients(0, step)[name].view(-1), own, payload)
            for rank in range(world_size):
                codec.expand(payload, total, accumulate=rank > 0)
            codec.compress(total, aggregator, payload)
            codec.expand(payload, mean, scale=1 / world_size)
            for means in ranks:
                torch.testing.assert_close(means[step][name].view(-1), mean, rtol=0, atol=0)


def test_a_ring_is_refused() -> None:
    with pytest.raises(ConfigError, match="topology must be 'ps' for a codec with momentum"):
        GradientSyncState(algorithm="dgc", codec_options={"momentum": 0.9}, topology="ring")
