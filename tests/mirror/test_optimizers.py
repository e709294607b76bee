"""Optimizers of a mirror step as those of plain training, with gradients and states of any kind."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.mirror.config import MirrorConfig
from lightning_dlres.mirror.mirror import Mirror

CPU = torch.device("cpu")
KINDS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_of_two_optimizers_has_two_histories(kind: str) -> None:
    results = []
    for is_mirrored in (False, True):
        torch.manual_seed(0)
        shared, *heads = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        model = nn.ModuleList([shared, *heads])
        optimizers = [KINDS[kind]([*shared.parameters(), *head.parameters()]) for head in heads]
        mirror = Mirror(model, optimizers, MirrorConfig(), CPU) if is_mirrored else None
        losses = []
        for number in range(4):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
            with mirror.step("training") if mirror is not None else nullcontext():
                for optimizer, head, target in zip(optimizers, heads, (1, -2), strict=True):
                    optimizer.zero_grad()
                    loss: Tensor = (head(torch.tanh(shared(x))) - target).square().mean()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
        if mirror is not None:
            mirror.close()
        results.append(losses)
    assert results[0] == results[1]
