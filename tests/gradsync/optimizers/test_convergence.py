"""One bit per parameter: Adam fails with compressed gradients, and 1-bit Adam does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.optimizers import MomentumSync, OneBitAdam, momentum_hook
from tests.support.rank_pool import RankContext, RankPool

SIZE, STEPS, FREEZE_STEP = 4096, 400, 100
LR, BETAS = 0.03, (0.9, 0.99)
# Ratio of the smallest curvature to the largest one. Adam's variance makes up for it.
SPREAD = 0.003
# Standard deviation of the targets that the samples give, beside that of the targets: 1.
NOISE = 2.0
# Parts of the initial distance. 1-bit Adam may end so much further away than AdamW, while the naive
# form must end so much further away than that.
MARGIN, NAIVE_GAP = 0.003, 0.2


class Scaled(nn.Module):
    """A quadratic function with curvatures of very unlike size in one parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.curvature = SPREAD ** torch.rand(SIZE, generator=generator)
        self.target = torch.randn(SIZE, generator=generator)
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, generator: torch.Generator) -> Tensor:
        target = self.target + NOISE * torch.randn(SIZE, generator=generator)
        return 0.5 * (self.curvature * (self.weight - target) ** 2).sum()

    def distance(self) -> float:
        return float(
            (self.weight.detach() - self.target).square().sum() / self.target.square().sum()
        )


def train(context: RankContext, kind: str, seed: int) -> float:
    context.init_process_group()
    model = Scaled(seed)
    ddp = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS)
    state: GradientSyncState | MomentumSync | None = None
    if kind == "naive":
        state = GradientSyncState(algorithm="onebit", topology="ps", min_bytes=0)
        ddp.register_comm_hook(state, compressed_hook)
    elif kind == "1-bit Adam":
        state = MomentumSync(algorithm="onebit", min_bytes=0)
        optimizer = OneBitAdam(model.parameters(), LR, BETAS, freeze_step=FREEZE_STEP, sync=state)
        ddp.register_comm_hook(state, momentum_hook)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    generator = torch.Generator().manual_seed(1000 * seed + context.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(generator).backward()
        optimizer.step()
        scheduler.step()
    if state is not None:
        state.close()
    return model.distance()


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (2, 3))]
)
def test_one_bit_momentum_ends_near_adamw_and_one_bit_gradients_do_not(
    pool: RankPool, seed: int
) -> None:
    kinds = ("AdamW", "naive", "1-bit Adam")
    distances = {kind: pool.run(train, 2, kind, seed) for kind in kinds}
    assert all(one == other for one, other in distances.values())
    adamw, naive, ours = (distances[kind][0] for kind in kinds)
    assert ours < adamw + MARGIN
    assert naive > adamw + NAIVE_GAP
