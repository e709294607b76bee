"""An ordinary Lightning script that reads its samples through the prefetch cache.

The dataset is map-style: the handwritten digits of scikit-learn.

pip install scikit-learn
python examples/prefetch_cache.py
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, random_split

import lightning_dlres as dlres


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        image, digit = batch
        return nn.functional.cross_entropy(self.net(image), digit)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        image, digit = batch
        self.log("accuracy", (self.net(image).argmax(1) == digit).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def digits() -> list[Dataset[tuple[Tensor, ...]]]:
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32) / 16
    return list(random_split(TensorDataset(images, torch.tensor(bunch.target)), [0.8, 0.2]))


def main() -> None:
    train, val = digits()
    # This replaces two DataLoaders. `train` may also be a folder, a URL or storage nodes.
    data = dlres.PrefetchCacheDataModule(train=train, val=val, batch_size=32, capacity="1MiB")
    trainer = Trainer(max_epochs=5, devices=1, logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), datamodule=data)
    print(f"accuracy: {trainer.callback_metrics['accuracy']:.2f}")


if __name__ == "__main__":
    main()
