"""Module whose gradients a test chooses, and random gradients for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Shape of each parameter: a matrix, a vector and a scalar.
SHAPES = {"weight": (70, 300), "bias": (300,), "scalar": ()}


class LinearLoss(nn.Module):
    """Module whose parameters get the inputs of `forward` as gradients."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())  # type: ignore[return-value]


def random_gradients(rank: int, step: int) -> dict[str, Tensor]:
    """Return gradients by name of the parameter, different in each step and on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
