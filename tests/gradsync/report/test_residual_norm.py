"""Norm of the residuals beside the gradient's."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dlres.codecs.gradient import RESIDUAL, State
from lightning_dlres.gradsync.execute.states import StateKey
from lightning_dlres.gradsync.plan.graph import Part
from lightning_dlres.gradsync.report.residual_norm import residual_norm

STATES: dict[StateKey, State] = {
    ("weight", 0, 2, Part.GRADIENT): {RESIDUAL: torch.tensor([3.0, 0.0])},
    # The residual of a sum of two ranks counts half in the mean.
    ("weight", 2, 4, Part.SUM): {RESIDUAL: torch.tensor([0.0, 8.0]), "threshold": torch.ones(1)},
    ("plain", 0, 4, Part.GRADIENT): {},
}


def test_residuals_are_compared_with_the_gradients_that_have_them() -> None:
    gradients = {"weight": torch.full((2, 2), 5.0), "plain": torch.ones(4), "frozen": None}
    assert residual_norm(STATES, gradients, world_size=2) == pytest.approx(5 / 10)
    for dtype in (torch.float64, torch.complex64, torch.complex128):
        wide = {"weight": torch.full((2, 2), 5.0, dtype=dtype)}
        assert residual_norm(STATES, wide, world_size=2) == pytest.approx(5 / 10)
    scaled = {"weight": torch.full((2, 2), 40.0, dtype=torch.float16)}
    assert residual_norm(STATES, scaled, world_size=2, loss_scale=8.0) == pytest.approx(5 / 10)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_there_is_no_figure_beside_a_gradient_without_a_norm(value: float) -> None:
    assert residual_norm(STATES, {"weight": torch.full((4,), value)}, world_size=2) is None


def test_there_is_no_figure_without_residuals() -> None:
    assert residual_norm({}, {"weight": torch.ones(4)}, world_size=2) is None
    assert residual_norm(STATES, {}, world_size=2) is None
