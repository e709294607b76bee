"""Modules that run again in backward get what they got in forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_dlres.memory.recompute import running_again


class Identities(nn.Module):
    """Self-attention, which PyTorch computes otherwise than attention to another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor, other: Tensor, same: Tensor) -> Tensor:
        self.seen.append((x is same, x is other))
        mixed: Tensor = self.attention(x, same, same)[0] * other
        return mixed


def test_an_argument_that_is_given_twice_is_one_tensor_again() -> None:
    torch.manual_seed(0)
    root = nn.ModuleDict({"block": Identities()})
    x, other = torch.randn(2, 5, 3, 8)

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        root.zero_grad()
        root["block"](x, other, x).square().sum().backward()
        return [p.grad.clone() for p in root.parameters() if p.grad is not None]

    expected = gradients()
    # Hooks give back another tensor each time, as those of a plan do.
    with running_again(root, ["block"]), saved_tensors_hooks(Tensor.detach, Tensor.detach):
        found = gradients()
    assert root["block"].seen == [(True, False)] * 3
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
