"""Gradients of 16 bits: small ones do not vanish where the loss scale is taken off."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dlres.codecs.gradient import gradient_codec
from lightning_dlres.gradsync.hook.unsent_gradients import UnsentGradients
from lightning_dlres.gradsync.plan.hosts import Hosts, over_hosts
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.support.gradient_sync import open_sync
from tests.support.rank_pool import RankContext, RankPool

# Without the loss scale, the gradient is below the least number of float16.
SCALE, VALUE = 65536.0, 1e-3
# The middle one of three partitions has its owner as the first rank to be merged.
COUNT = 12_288
HALVES = [torch.float16, torch.bfloat16]


def mean(
    context: RankContext,
    dtype: torch.dtype,
    topology: str,
    codec: str,
    hosts: Hosts,
    value: float = VALUE,
    scale: float = SCALE,
) -> Tensor:
    """Return the mean of gradients that are equal on all ranks."""
    plan = make_plan(
        [GradientSpec(name="weight", count=COUNT)],
        [CodecChoice(codec=codec, partitions=3)],
        world_size=len(hosts),
        topology=topology,
        alignment=4096,
    )
    codecs = {} if codec == RAW else {codec: gradient_codec(codec)}
    gradient = torch.full((COUNT,), value).to(dtype)
    with open_sync(context, over_hosts(plan, hosts), codecs) as opened:
        opened.sync.run(0, {"weight": gradient}, loss_scale=scale)
    return gradient.float()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("topology", "codec", "hosts"),
    [
        ("ps", "int8", ((0,), (1,), (2,))),
        ("ring", "int8", ((0,), (1,), (2,))),
        ("ps", "fp8", ((0,), (1,), (2,))),
        ("ps", RAW, ((0,), (1,), (2,))),
        ("ps", "int8", ((0, 2), (1,))),
    ],
)
def test_the_loss_scale_is_taken_off_without_loss(
    pool: RankPool, topology: str, codec: str, hosts: Hosts, dtype: torch.dtype
) -> None:
    for value in pool.run(mean, 3, dtype, topology, codec, hosts):
        torch.testing.assert_close(value, torch.full((COUNT,), VALUE), rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_unsent_residuals_get_the_loss_scale_without_loss(dtype: torch.dtype) -> None:
    unsent = UnsentGradients()
    unsent.put({"weight": torch.full((4,), VALUE / SCALE)})
    gradient = torch.full((4,), VALUE).to(dtype)
    unsent.add_to({"weight": gradient}, SCALE)
    torch.testing.assert_close(gradient.float(), torch.full((4,), 2 * VALUE), rtol=0.02, atol=0)


@pytest.mark.parametrize(
    ("topology", "codec", "hosts"),
    [
        ("ps", RAW, ((0,), (1,), (2,))),
        ("ring", RAW, ((0,), (1,), (2,))),
        ("ps", RAW, ((0, 2), (1,))),
        ("ring", "int8", ((0, 2), (1,))),
    ],
)
def test_means_whose_sums_overflow_are_finite(
    pool: RankPool, topology: str, codec: str, hosts: Hosts
) -> None:
    # Three of them are above the largest float16.
    large = 40_000.0
    for value in pool.run(mean, 3, torch.float16, topology, codec, hosts, large, 1.0):
        torch.testing.assert_close(value, torch.full((COUNT,), large), rtol=0.01, atol=0)
