"""Residuals of a checkpoint go to the elements that they belong to, or are dropped."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from tests.support.rank_pool import RankContext, RankPool

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def train(
    context: RankContext,
    memory_format: str,
    algorithm: str,
    steps: int,
    loaded: list[dict[str, Any]] | None = None,
) -> tuple[dict[str, Any], torch.Tensor, list[str]]:
    """Return the state, the sum of the steps' mean gradients of a convolution, and warnings.

    In each step the gradient of this rank is that of the same batch and of the same weights.

    Args:
        context: This rank.
        memory_format: Key of `FORMATS`.
        algorithm: Algorithm of the hook.
        steps: Number of steps.
        loaded: States of all ranks to continue from.
    """
    context.init_process_group()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(96, 2))
    model.to(memory_format=FORMATS[memory_format])
    state = GradientSyncState(algorithm=algorithm, min_bytes=0, topology="ps", coordinator="none")
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, compressed_hook)
    if loaded is not None:
        state.load_state_dicts(loaded)
    x = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(context.rank))
    total = torch.zeros(6, 4, 3, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model.zero_grad()
            wrapped(x).square().mean().backward()
            assert model[0].weight.grad is not None
            total += model[0].weight.grad
    texts = [str(one.message) for one in caught if "residuals" in str(one.message)]
    saved = state.state_dict()
    state.close()
    return saved, total, texts


@pytest.mark.parametrize("before", FORMATS)
@pytest.mark.parametrize("after", FORMATS)
def test_residuals_stay_with_their_elements(pool: RankPool, before: str, after: str) -> None:
    """The last step adds what was left unsent, so with all residuals the sums are equal."""
    first = pool.run(train, 2, before, "tbq", 3)
    second = pool.run(train, 2, after, "none", 1, [saved for saved, _, _ in first])
    plain = pool.run(train, 2, before, "raw", 4)
    sent, expected = first[0][1] + second[0][1], plain[0][1]
    is_equal = torch.allclose(sent, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert is_equal == (before == after)
    for _, _, texts in second:
        if before == after:
            assert not texts
        else:
            assert "'0.weight'" in texts[0]
            assert "another memory format" in texts[0]
            assert "'2.weight'" not in texts[0]


def warnings_of_powersgd(context: RankContext, before: str, after: str) -> list[str]:
    """Return the warnings of a run that continues with another memory format."""
    context.init_process_group()
    states: list[Any] = [None] * context.world_size
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for memory_format in (before, after):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32 * 16, 2))
            model.to(memory_format=FORMATS[memory_format])
            state = GradientSyncState(
                algorithm="powersgd", codec_options={"start_step": 2}, timeout=20
            )
            state.name_parameters(model.named_parameters())
            if states[0] is not None:
                state.load_state_dicts(states)
            wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
            wrapped.register_comm_hook(state, compressed_hook)
            for step in range(4):
                generator = torch.Generator().manual_seed(10 * step + context.rank)
                model.zero_grad()
                wrapped(torch.randn(2, 16, 6, 6, generator=generator)).square().mean().backward()
            dist.all_gather_object(states, state.state_dict())
            state.close()
    return [str(one.message) for one in caught if "memory format" in str(one.message)]


def test_errors_of_powersgd_are_dropped_with_another_memory_format(pool: RankPool) -> None:
    for texts in pool.run(warnings_of_powersgd, 2, "channels_last", "contiguous"):
        assert all("['0.weight'] were dropped" in text for text in texts)
        assert texts
    for texts in pool.run(warnings_of_powersgd, 2, "channels_last", "channels_last"):
        assert texts == []
