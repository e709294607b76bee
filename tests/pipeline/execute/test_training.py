"""Gradients of the loss in a training step, and errors of its layers, without a schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.execute.training import TrainingStep


@pytest.mark.parametrize(
    ("dtype", "scale", "expected"),
    [
        (torch.float32, 1.0, 3.0),
        (torch.float32, 0.25, 0.75),
        (torch.float64, 1e300, 3e300),
        (torch.float16, 2.0**15, float("inf")),
        # Larger than the largest float16: a gradient scaler skips the step, as in plain training.
        (torch.float16, 2.0**16, float("inf")),
    ],
)
def test_backward_from_loss_gives_the_gradients_of_the_scaled_loss(
    dtype: torch.dtype, scale: float, expected: float
) -> None:
    output = torch.ones(2, dtype=dtype, requires_grad=True)
    # A stand-in whose replica has only micro-batch 4.
    step = cast(Any, SimpleNamespace(gradients={}, own=[4]))
    TrainingStep.backward_from_loss(step, (3 * output).sum(), [[output]], [], scale)
    assert step.gradients[4][0].tolist() == [expected, expected]


@pytest.mark.parametrize("error", [UnsupportedStepError("cut code"), ValueError("one sample")])
def test_only_errors_of_layers_are_explained_by_a_single_sample(error: Exception) -> None:
    step = cast(Any, SimpleNamespace(sizes=[2, 1]))
    with (
        pytest.raises(UnsupportedStepError) as raised,
        TrainingStep.explaining_single_samples(step, 1),
    ):
        raise error
    is_explained = "fails on a micro-batch of one sample" in str(raised.value)
    assert is_explained == isinstance(error, ValueError)
