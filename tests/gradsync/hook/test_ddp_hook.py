"""Training with the communication hook, compared with DistributedDataParallel without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.codecs.gradient import RESIDUAL
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from tests.support.rank_pool import RankContext, RankPool

STEPS = 6


class Model(nn.Module):
    """Layers of several sizes, and a convolution in channels-last memory.

    Args:
        has_unused: True adds a layer that `forward` does not use.
    """

    def __init__(self, has_unused: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.hidden = nn.Linear(8 * 36, 64)
        self.head = nn.Linear(64, 1)
        self.unused = nn.Linear(3, 3) if has_unused else None

    def forward(self, x: Tensor) -> Tensor:
        features = self.convolution(x.to(memory_format=torch.channels_last)).relu()
        return self.head(self.hidden(features.flatten(1)).relu())


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 3, 8, 8, generator=generator)
    return x, x.mean((1, 2, 3))[:, None]


def train(
    context: RankContext,
    options: dict[str, Any] | None,
    *,
    has_unused: bool = False,
    accumulate: int = 1,
    **ddp: Any,
) -> dict[str, Tensor]:
    """Return the weights after `STEPS` steps.

    Args:
        context: This rank.
        options: Options of the hook's state; None for plain DDP.
        has_unused: True adds a layer that no step uses.
        accumulate: Backwards of each step, of which only the last one synchronises.
        ddp: Options of DDP.
    """
    context.init_process_group()
    model = Model(has_unused)
    # Small buckets, so that there are several.
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=0.03, find_unused_parameters=has_unused, **ddp
    )
    state = None
    if options is not None:
        state = GradientSyncState(**{"topology": "ps", "coordinator": "none", **options})
        state.name_parameters(model.named_parameters())
        wrapped.register_comm_hook(state, compressed_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, y = batch(context.rank, step * accumulate + part)
            wrapped.require_backward_grad_sync = part == accumulate - 1
            nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    weights = copy.deepcopy(model.state_dict())
    if state is not None:
        if state.synchroniser is not None:
            # Codecs have states under the parameters' names, with residuals that are finite.
            for key, saved in state.synchroniser.states.by_key.items():
                assert key[0] in weights
                assert RESIDUAL not in saved or saved[RESIDUAL].isfinite().all()
        state.close()
    dist.barrier()
    return weights


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of two weights."""
    return max(float((one[key] - other[key]).abs().max()) for key in one)


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_an_algorithm_training_is_that_of_ddp(pool: RankPool, world_size: int) -> None:
    plain = pool.run(train, world_size, None)
    hooked = pool.run(train, world_size, {"algorithm": "none"})
    assert all(map(equal, plain, hooked))


@pytest.mark.parametrize("topology", ["ps", "ring"])
@pytest.mark.parametrize("case", ["plain", "static_graph", "unused", "no_sync", "views"])
def test_uncompressed_training_is_near_that_of_ddp(
    pool: RankPool, topology: str, case: str
) -> None:
    """Sums in another order differ by rounding."""
    options: dict[str, Any] = {
        "plain": {},
        "static_graph": {"static_graph": True},
        "unused": {"has_unused": True},
        "no_sync": {"accumulate": 2},
        "views": {"gradient_as_bucket_view": True},
    }[case]
    plain = pool.run(train, 3, None, **options)
    ours = pool.run(train, 3, {"algorithm": "raw", "topology": topology}, **options)
    assert all(equal(ours[0], other) for other in ours[1:])
    assert distance(plain[0], ours[0]) < 1e-6


@pytest.mark.parametrize(
    ("algorithm", "tolerance"),
    [("fp16", 1e-3), ("bf16", 4e-3), ("int8", 4e-3), ("fp8", 0.02), ("tbq", 0.2), ("onebit", 0.2)],
)
def test_compressed_training_stays_near_that_of_ddp(
    pool: RankPool, algorithm: str, tolerance: float
) -> None:
    plain = pool.run(train, 2, None)
    ours = pool.run(train, 2, {"algorithm": algorithm, "min_bytes": 0})
    assert equal(*ours)
    assert 0 < distance(plain[0], ours[0]) < tolerance


@pytest.mark.parametrize("coordinator", ["always", "replay"])
def test_a_coordinator_changes_no_weight(pool: RankPool, coordinator: str) -> None:
    options = {"algorithm": "tbq", "min_bytes": 0}
    expected = pool.run(train, 3, options)
    assert all(map(equal, pool.run(train, 3, {**options, "coordinator": coordinator}), expected))


def lose_a_rank(context: RankContext) -> str:
    """Return the error of rank 0 after rank 1 has left; empty on rank 1."""
    context.init_process_group()
    model = Model(False)
    wrapped = DistributedDataParallel(model)
    state = GradientSyncState(algorithm="tbq", topology="ps", timeout=1.0)
    wrapped.register_comm_hook(state, compressed_hook)
    for step in range(3):
        # Rank 1 leaves after two steps.
        if step == 2 and context.rank == 1:
            return ""
        x, y = batch(context.rank, step)
        try:
            nn.functional.mse_loss(wrapped(x), y).backward()
        except RuntimeError:
            break
    error = state.failure
    state.close()
    return f"{type(error).__name__}: {error}"


def test_a_rank_that_leaves_is_named(pool: RankPool) -> None:
    messages = pool.run(lose_a_rank, 2)
    # Rank 0 may notice the broken connection first, or reach its timeout.
    assert "rank 0 waited 1 s for gradients from rank 1" in messages[0] or (
        "lost rank 1 while gradients were synchronised" in messages[0]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"algorithm": "zip"},
            r"algorithm must be one of \['auto', 'none', 'raw', .*'tbq'.*\], got",
        ),
        ({"algorithm": "zvc"}, "algorithm must be one of"),
        ({"algorithm": "raw", "codec_options": {"bits": 2}}, "codec_options must be None"),
        ({"algorithm": "qsgd", "codec_options": {"bits": 3}}, "bits must be 2, 4 or 8"),
        ({"algorithm": "tbq", "topology": "star"}, "topology must be one of"),
        ({"algorithm": "tbq", "coordinator": "never"}, "coordinator must be one of"),
        ({"algorithm": "tbq", "timeout": 0.0}, "timeout must be a time above 0"),
        ({"algorithm": "tbq", "min_bytes": -1}, "min_bytes must be"),
        ({"replan": True}, "replan must be 'auto' or False, got True. Use replan=False."),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientSyncState(**options)
