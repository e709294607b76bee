"""Temporary bytes of optimizer steps, measured for each kind of optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_dlres.pipeline.profile.optimizer_costs import UpdateBytes, update_bytes


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {}, (0.0, 0.0, 0.0)),
        (torch.optim.AdamW, {"foreach": False}, (2.0, 1.0, 0.0)),
        (torch.optim.AdamW, {"foreach": True}, (0.0, 0.0, 1.0)),
        (torch.optim.AdamW, {"fused": True}, (0.0, 0.0, 0.0)),
        (torch.optim.SparseAdam, {}, (0.0, 0.0, 0.0)),
    ],
)
def test_temporary_bytes_of_an_optimizer_step(
    kind: type[Optimizer], options: dict[str, Any], expected: tuple[float, ...]
) -> None:
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5, 2))]
    optimizer = kind(parameters, lr=0.01, **options)
    measured = update_bytes(optimizer, torch.device("cpu"))
    assert (measured.current, measured.previous, measured.total) == pytest.approx(
        expected, abs=0.01
    )


def test_temporary_bytes_depend_on_the_order_of_parameters() -> None:
    adam = UpdateBytes(current=2.0, previous=1.0)
    assert adam.of([]) == 0
    assert adam.of([10]) == 20
    assert adam.of([10, 4, 10]) == 24
    assert adam.of([4, 10, 10]) == 30
