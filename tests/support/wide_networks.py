"""Networks with large saved tensors and small parameters, tasks with them, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.support.models import Block
from tests.support.networks import UNet
from tests.support.offload_tasks import Regression


def wide_gpt() -> nn.Module:
    return nn.Sequential(*(Block(128, 0.1) for _ in range(4)), nn.Linear(128, 8))


def deep_mlp() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers)


def large_mlp() -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(64, 64, bias=False), nn.ReLU()))
    )


class Checkpointed(nn.Module):
    """Network with checkpointing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(128, 0.1) for _ in range(3))
        self.head = nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


# Network and batch by name.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (wide_gpt, lambda: torch.randn(8, 96, 128)),
    "mlp": (deep_mlp, lambda: torch.randn(2048, 256)),
    "checkpointed": (Checkpointed, lambda: torch.randn(8, 96, 128)),
    "unet": (UNet, lambda: torch.randn(4, 3, 64, 64)),
}


class WideRegression(Regression):
    """Task with one of the networks of this module."""

    def __init__(self, name: str) -> None:
        super().__init__("mlp")
        torch.manual_seed(1)
        self.net = NETWORKS[name][0]()

    def configure_optimizers(self) -> Any:
        # The number of zeros must not change: it determines the size of compressed storages.
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


def loader(name: str, count: int) -> DataLoader[Any]:
    """Return a loader of random batches for a network."""
    torch.manual_seed(2)
    data = [NETWORKS[name][1]() for _ in range(count)]
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]
