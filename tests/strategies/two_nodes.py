"""Script of test_gpu.py: one of two nodes with one rank each. It trains, and saves its weights.

Arguments: strategy, accelerator of this node, file of the weights. A strategy is "plain", "pipe",
or an algorithm of `CompressedDDPStrategy`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlres import CompressedDDPStrategy, HeteroPipeStrategy
from tests.support.models import QUIET

BATCH, STEPS, WIDTH = 16, 12, 32


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def strategy_of(name: str) -> Any:
    # NCCL takes no two ranks on one GPU.
    options: Any = {"process_group_backend": "cpu:gloo,cuda:gloo", "timeout": 60}
    if name == "plain":
        return "auto"
    if name == "pipe":
        return HeteroPipeStrategy(microbatches=4, **options)
    return CompressedDDPStrategy(algorithm=name, min_bytes=0, **options)


def main(name: str, accelerator: str, path: str) -> None:
    seed_everything(1, verbose=False)
    torch.set_num_threads(2)
    is_alone = name == "plain"
    # A pipeline gets the whole batch, a rank of data parallel training its half.
    parts = 1 if name in ("plain", "pipe") else 2
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * STEPS, WIDTH, generator=generator)
    y = torch.randint(0, 4, (BATCH * STEPS,), generator=generator)
    own = slice(int(os.environ.get("NODE_RANK", "0")) if parts > 1 else 0, None, parts)
    samples = TensorDataset(x[own], y[own])
    module = Net()
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        num_nodes=1 if is_alone else 2,
        strategy=strategy_of(name),
        max_epochs=2,
        use_distributed_sampler=False,
        **QUIET,
    )
    trainer.fit(module, DataLoader(samples, BATCH // parts))
    print(f"trained on {trainer.strategy.root_device}", flush=True)
    state = trainer.strategy.lightning_module_state_dict()
    weights = {key: value.cpu() for key, value in state.items()}
    torch.save(weights, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
