"""Module whose gradients a test chooses, and random gradients for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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


def means_of_steps(
    wrapped: DistributedDataParallel,
    gradients_of: Callable[[int], dict[str, Tensor]],
    steps: Iterable[int],
) -> list[dict[str, Tensor]]:
    """Return the mean gradients of some steps, by name of the parameter.

    Args:
        wrapped: Module that takes gradients as input, such as `LinearLoss`.
        gradients_of: Returns this rank's gradients in a step.
        steps: Numbers of the steps.
    """
    means = []
    for step in steps:
        wrapped.zero_grad()
        wrapped(gradients_of(step)).backward()
        means.append(
            {n: p.grad.clone() for n, p in wrapped.module.named_parameters() if p.grad is not None}
        )
    return means
