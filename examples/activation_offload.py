"""An ordinary Lightning script. One line keeps its device memory within a budget.

python examples/activation_offload.py
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dlres as dlres


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)]
        self.net = nn.Sequential(*blocks, nn.Linear(512, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    data = TensorDataset(torch.randn(24576, 512), torch.randint(10, (24576,)))
    trainer = Trainer(
        max_epochs=1,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        # Half of the bytes that autograd saves leave the device until backward. The report shows
        # them in resource_report/memory.png.
        callbacks=[dlres.ActivationOffload(saved_budget=0.5), dlres.ResourceReport()],
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=2048))


if __name__ == "__main__":
    main()
