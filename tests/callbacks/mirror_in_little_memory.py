"""Script of test_mirror_in_little_memory.py: trains a model that is larger than its memory.

Arguments: "plain" or "ours", and a directory. It prints a checksum of the initial weights.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlres.callbacks.parameter_mirror import ParameterMirror
from tests.support.models import QUIET

WIDTH, LAYERS = 768, 40


class Large(LightningModule):
    def configure_model(self) -> None:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*layers)

    def on_fit_start(self) -> None:
        checksum = 0
        for parameter in self.parameters():
            checksum = zlib.crc32(parameter.detach().numpy(), checksum)
        print(f"initial weights {checksum}", flush=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def main(kind: str, directory: str) -> None:
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    callbacks = [ParameterMirror(disk=directory, window="min")] if kind == "ours" else []
    trainer = Trainer(accelerator="cpu", max_steps=4, callbacks=callbacks, **QUIET)  # type: ignore[arg-type]
    trainer.fit(Large(), DataLoader(torch.randn(8, WIDTH), 2))
    print("trained", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
