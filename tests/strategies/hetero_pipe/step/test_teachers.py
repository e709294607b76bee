"""Teachers, whose weights follow those of a student that stages hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    differences_in,
    expect_refusal,
    no_differences_in,
)

# The step calls several modules, so it is cut itself.
OPTIONS: dict[str, Any] = {"plan": None, "module": "training_step"}


class Distilled(Classifier):
    """A student that learns what its slower teacher says, as in BYOL.

    Args:
        is_shared: Whether a second attribute holds the student's layers.
    """

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 5))
        if is_shared:
            self.shared = nn.ModuleList(self.net.children())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = batch[0] + 0.1, 0.9 * batch[0]
        predicted = self.predictor(self.net(first))
        with torch.no_grad():
            target = self.teacher(second)
        return -F.cosine_similarity(predicted, target).mean()

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            teacher.lerp_(student, 0.1)


class MeanTeacher(Classifier):
    """A teacher that follows at the start of the step; it starts elsewhere than the student."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.teacher = nn.Linear(16, 16).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for teacher, student in zip(
                self.teacher.parameters(), self.first.parameters(), strict=True
            ):
                teacher.mul_(0.9).add_(student, alpha=0.1)
        first, second = self.first(batch[0]), self.first(2 * batch[0])
        with torch.no_grad():
            target = self.teacher(batch[0])
        return F.cross_entropy(self.net(first), batch[1]) + F.mse_loss(second, target)


CASES = {
    "in the step": Case(MeanTeacher, options=OPTIONS),
    "cut step": Case(lambda: Distilled(is_shared=True), options=OPTIONS),
    "cut student": Case(lambda: Distilled(is_shared=True), options={**OPTIONS, "module": "net"}),
}


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def test_a_teacher_follows_a_student_that_all_ranks_hold(pool: RankPool) -> None:
    assert pool.run(compare, 2) == no_differences_in(CASES)


def fit_unshared(context: RankContext, module: str) -> None:
    case = Case(lambda: Distilled(is_shared=False), options={**OPTIONS, "module": module})
    expect_refusal(context, case, r"another stage holds.* self\.shared = nn\.ModuleList")


@pytest.mark.parametrize("module", ["training_step", "net"])
def test_a_teacher_of_other_stages_weights_is_refused(pool: RankPool, module: str) -> None:
    pool.run(fit_unshared, 2, module)
