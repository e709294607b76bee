"""Script of test_little_memory.py: trains a model that is larger than its memory.

Arguments: "plain", "mirror" or "all"; a directory; the rows of a batch; and, for "all", the address
of a parameter server. "all" are `ParameterMirror`, `ActivationOffload` and that server. The script
prints a checksum of the initial weights.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlres.callbacks.activation_offload import ActivationOffload
from lightning_dlres.callbacks.parameter_mirror import ParameterMirror
from lightning_dlres.strategies.parameter_server.strategy import ParameterServerStrategy
from tests.support.models import QUIET

WIDTH, LAYERS, STEPS = 768, 40, 2


class Large(LightningModule):
    """Model whose norms save a batch each, and whose linear layers see only one row."""

    def configure_model(self) -> None:
        self.norms = nn.Sequential(*[nn.LayerNorm(WIDTH) for _ in range(LAYERS)])
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*layers)

    def on_fit_start(self) -> None:
        checksum = 0
        for parameter in self.parameters():
            checksum = zlib.crc32(parameter.detach().numpy(), checksum)
        print(f"initial weights {checksum}", flush=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(self.norms(batch).mean(0)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def options(kind: str, directory: str, server: str) -> dict[str, Any]:
    """Return arguments of the Trainer."""
    if kind == "plain":
        return {}
    mirror = ParameterMirror(disk=directory, window="min")
    if kind == "mirror":
        return {"callbacks": [mirror]}
    offload = ActivationOffload(budget="min", host_budget=0, disk=directory)
    strategy = ParameterServerStrategy(servers=[server], log_directory=directory)
    return {"callbacks": [mirror, offload], "strategy": strategy, "devices": 1}


def main(kind: str, directory: str, rows: str, server: str = "") -> None:
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    data = torch.randn(STEPS * int(rows), WIDTH, generator=torch.Generator().manual_seed(2))
    trainer = Trainer(accelerator="cpu", max_epochs=1, **options(kind, directory, server), **QUIET)
    trainer.fit(Large(), DataLoader(data, int(rows)))
    print("trained", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
