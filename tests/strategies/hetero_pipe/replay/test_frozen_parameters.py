"""Frozen parameters that a training step changes have the same values on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_dlres.core.errors import PeerLostError, UnsupportedStepError
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    differences_in,
    fit,
    no_differences_in,
)


class WithCenters(Classifier):
    """Classifier that follows the mean output, as a codebook follows its codes."""

    rows = 1

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(self.rows, 5), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(batch[0])
        with torch.no_grad():
            self.centers.mul_(0.9).add_(output.mean(0))
        self.observed.append(float(self.centers.sum()))
        return F.cross_entropy(output - self.centers[0], batch[1])


class WithLargeCenters(WithCenters):
    rows = 1 << 17


CASES = {schedule: Case(WithCenters, schedule, "gpipe") for schedule in ("auto", "gpipe")}


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def test_changes_are_those_of_plain_training(pool: RankPool) -> None:
    assert pool.run(compare, 2) == no_differences_in(CASES)


def error_of_large_ones(context: RankContext) -> str:
    with pytest.raises((UnsupportedStepError, PeerLostError)) as caught:
        fit(context, Case(WithLargeCenters, "gpipe"))
    return str(caught.value)


def test_a_change_of_a_large_parameter_is_refused(pool: RankPool) -> None:
    for text in pool.run(error_of_large_ones, 2):
        assert "must not change the parameter 'centers', which has more than 1 MiB" in text
