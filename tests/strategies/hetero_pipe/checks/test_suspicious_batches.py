"""A batch between two checks of the loss, whose micro-batches cannot be weighted by samples.

Signs in the step make the batch suspicious. It is checked before its gradients are used, and
trained as on a single device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlres import PipelinePlan, UnsupportedStepError
from lightning_dlres.strategies.hetero_pipe import step_runner
from lightning_dlres.strategies.hetero_pipe.step.normalisers import (
    NormaliserRecorder,
    doubt_about_batch,
)
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, Classifier, differences_in, fit, no_differences_in

# Number of the step with the special batch. Steps 0, 1, 2, 4 and 8 are always checked.
SPECIAL_STEP = 3


class AddsToBuffer(nn.Module):
    """A layer that adds to a buffer: a step that runs twice would add twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total += x.detach().sum(0)
        return x


def filled(mask: Tensor, value: Any) -> Tensor:
    weights = torch.ones(len(mask))
    weights[mask] = value
    return weights


ONE = torch.ones(())
# Losses with a statistic of the batch; they take outputs, labels, losses of the samples, and it.
STATISTICS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "class weight": lambda out, y, losses, s: F.binary_cross_entropy_with_logits(
        out[:, 0], (y > 1).float(), pos_weight=s
    ),
    "class weights": lambda out, y, losses, s: F.cross_entropy(
        out, y, weight=torch.where(torch.arange(5) > 2, s, ONE)
    ),
    "sum with class weights": lambda out, y, losses, s: (
        F.cross_entropy(out, y, weight=1 + (s - 1) * (torch.arange(5) > 2), reduction="sum")
        / len(y)
    ),
    "chosen weights": lambda out, y, losses, s: (torch.where(y > 1, s, ONE) * losses).mean(),
    "stacked weights": lambda out, y, losses, s: (torch.stack([ONE, s])[y % 2] * losses).mean(),
    "viewed": lambda out, y, losses, s: (losses * s.view(1)).mean(),
    "power": lambda out, y, losses, s: (1 + losses).pow(s).mean(),
    "filled weights": lambda out, y, losses, s: (filled(y > 1, s) * losses).mean(),
    "filled by a number": lambda out, y, losses, s: (filled(y > 1, s.item()) * losses).mean(),
    "delta": lambda out, y, losses, s: F.huber_loss(out[:, 0], y.float(), delta=s.item()),
}


class LossByKind(Classifier):
    """A model with a loss that is a mean over samples in every batch but one."""

    def __init__(self, kind: str, adds: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        second = AddsToBuffer() if adds else nn.Identity()
        self.net = nn.Sequential(
            nn.Linear(16, 12), second, nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 5)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels, mask = batch
        loss = self._loss(self.net(x.mul_(1.5)), labels, mask)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def _loss(self, out: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        if self.kind in ("unlabelled", "unequal"):
            return F.cross_entropy(out, labels)
        tokens = F.cross_entropy(out, labels.clamp(min=0), reduction="none")
        if self.kind == "quotient":
            return (tokens * mask).sum() / mask.sum()
        if self.kind == "weights":
            weights = (mask / mask.sum()).view(-1)
            return (weights * tokens).sum()
        if self.kind == "selected":
            return tokens[mask > 0].mean()
        if self.kind == "product":
            return (tokens * mask).sum() * mask.sum().reciprocal()
        if self.kind == "gradient":
            # If a whole micro-batch is masked, the gradient is NaN, but the value is not.
            return tokens.mean() + 0 * (out[:, 0] * mask).square().sum().sqrt()
        if self.kind == "list" and bool((mask == 0).any()):
            self.observed.append(float(tokens.detach().sum()))
        if self.kind in STATISTICS:
            # 1 in batches without masked samples.
            statistic = 1 + 2 * (1 - mask).mean()
            return STATISTICS[self.kind](out, labels.clamp(min=0), tokens, statistic)
        if self.kind == "harmless":
            return tokens.mean() * mask.sum() / mask.sum()
        late = self.global_step >= SPECIAL_STEP
        if self.kind == "factor":
            return tokens.mean() + float(late) * out.mean(0).square().sum()
        if self.kind == "term" and late:
            return tokens.mean() + out.mean(0).square().sum()
        if self.kind == "harmless term" and late:
            return tokens.mean() + out.square().mean()
        return tokens.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data(kind: str) -> DataLoader[Any]:
    """Return batches of eight samples; the special batch has no label for its first samples."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(56, 16, generator=generator)
    labels = torch.randint(5, (56,), generator=generator)
    mask = torch.ones(56)
    hidden = slice(
        8 * SPECIAL_STEP, 8 * SPECIAL_STEP + (1 if kind in ("unequal", "harmless") else 3)
    )
    labels[hidden], mask[hidden] = -100, 0.0
    return DataLoader(TensorDataset(x, labels, mask), batch_size=8)


FALL_BACK = (
    *("unlabelled", "unequal", "quotient", "weights", "selected", "product", "gradient"),
    *("term", "factor", *STATISTICS),
)
THREE_STAGES = PipelinePlan(replicas=((0, 1, 2),), split=(1, 3, 1))


def case(kind: str, schedule: str, adds: bool = True, **options: Any) -> Case:
    return Case(
        lambda: LossByKind(kind, adds),
        expected_schedule=schedule,
        data=lambda: data(kind),
        options=options,
        trainer={"max_epochs": 1},
    )


TWO_RANKS = {
    **{kind: case(kind, "gpipe") for kind in (*FALL_BACK, "list")},
    "mean": case("mean", "1f1b"),
    "harmless": case("harmless", "1f1b"),
    "harmless term": case("harmless term", "1f1b"),
    "cut elsewhere": case(
        "unlabelled", "gpipe", plan=PipelinePlan(replicas=((0, 1),), split=(4, 1))
    ),
}
THREE_RANKS = {"three stages": case("unlabelled", "gpipe", plan=THREE_STAGES)}
# No layer with a buffer here: buffers are those of the first replica, which sees half of the
# samples.
FOUR_RANKS = {kind: case(kind, "gpipe", adds=False) for kind in ("unlabelled", "list")}
BY_RANKS = {2: TWO_RANKS, 3: THREE_RANKS, 4: FOUR_RANKS}


def compare_with_plain_training(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, BY_RANKS[context.world_size])


@pytest.mark.parametrize("ranks", sorted(BY_RANKS))
def test_suspicious_batch_is_trained_as_on_a_single_device(pool: RankPool, ranks: int) -> None:
    assert pool.run(compare_with_plain_training, ranks) == no_differences_in(BY_RANKS[ranks], ranks)


class LateWeights(LossByKind):
    """A model whose weights of samples differ from step 5 on, which no sign shows."""

    def _loss(self, out: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        tokens = F.cross_entropy(out, labels.clamp(min=0), reduction="none")
        return (tokens * (float(self.global_step >= 5) * out.detach()[:, 0]).softmax(0)).sum()


def fit_late_weights(context: RankContext, schedule: str) -> tuple[str, str]:
    """Return the last schedule, and the error if there is one."""
    # Checks of steps 0, 1, 2, 4 and 6.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_runner, "_MOST_STEPS_BETWEEN_CHECKS", 3)
        model = LateWeights("weights")
        error = ""
        try:
            fit(context, Case(lambda: model, schedule, "gpipe", lambda: data("mean")))
        except UnsupportedStepError as caught:
            error = str(caught)
        return model.trainer.strategy.schedule, error  # type: ignore[attr-defined]


def test_the_distance_between_checks_is_bounded(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(fit_late_weights, 2, "auto")
    assert [outcome.value for outcome in outcomes] == [("gpipe", "")] * 2
    assert "since the last check, 2 steps ago" in outcomes[0].output
    for _, error in pool.run(fit_late_weights, 2, "1f1b"):
        assert "since the last check, 2 steps ago" in error


def fit_1f1b(context: RankContext) -> dict[str, str]:
    messages = {}
    for kind in FALL_BACK:
        model = LossByKind(kind)
        with pytest.raises(UnsupportedStepError) as error:
            fit(context, Case(lambda m=model: m, "1f1b", data=lambda k=kind: data(k)))
        assert all(bool(p.isfinite().all()) for p in model.parameters() if not p.is_meta)
        messages[kind] = str(error.value)
    return messages


def test_1f1b_refuses_a_doubtful_batch_before_its_gradients_are_used(pool: RankPool) -> None:
    for messages in pool.run(fit_1f1b, 2):
        for kind in FALL_BACK:
            assert "schedule='1f1b' would not train this model exactly" in messages[kind], kind


def normalisers_of(loss: Any, *sizes: int) -> list[list[float]]:
    rows = []
    for size in sizes:
        recorder = NormaliserRecorder()
        with recorder:
            loss(torch.ones(size, 3, requires_grad=True), torch.arange(size))
        rows.append(recorder.values())
    return rows


def record(rows: list[list[float]], loss: float = 1.0) -> dict[str, Any]:
    losses = torch.full((len(rows),), loss)
    skipped = [False] * len(rows)
    return {"losses": losses, "skipped": skipped, "normalisers": rows, "finite": [True]}


def test_operations_show_another_loss_and_no_other_number_of_samples() -> None:
    def operations(loss: Any, size: int) -> str:
        recorder = NormaliserRecorder()
        with recorder:
            loss(torch.ones(size, 3, requires_grad=True))
        return recorder.operations()

    plain = operations(lambda out: out.square().mean(), 3)
    assert operations(lambda out: out.square().mean(), 8) == plain
    assert operations(lambda out: out.square().mean() + out.detach().std(), 3) != plain
    assert operations(lambda out: out.topk(2, 0)[0].square().mean(), 3) != plain
    by_zero, by_one = (operations(lambda out, f=f: (out * f).sum(), 3) for f in (0.0, 1.0))
    assert by_zero != by_one
    assert by_one == operations(lambda out: (out * 2.0).sum(), 3)


def test_what_scales_with_samples_or_not_at_all_is_no_sign() -> None:
    losses = [
        lambda out, y: F.mse_loss(out, out.detach() + 1) * 0.5,
        lambda out, y: out.sum() / len(out) + out.mean() / 3,
        lambda out, y: (out / out.shape[1]).sum(1).mean() * torch.tensor(2.0),
        lambda out, y: F.cross_entropy(out, y % 3) * (1.0 / len(y)),
        lambda out, y: F.normalize(out, dim=1).sum(1).mean(),
    ]
    for loss in losses:
        rows = normalisers_of(loss, 3, 3, 2)
        assert doubt_about_batch([record(rows[:1]), record(rows[1:])], [3, 3, 2], True) is None


def test_values_that_differ_otherwise_are_named() -> None:
    rows = normalisers_of(lambda out, y: out.sum() / (y > 0).sum(), 3, 3, 2)
    reason = doubt_about_batch([record(rows)], [3, 3, 2], True)
    assert reason == "the loss is normalised by different values in the micro-batches (2, 2, 1)"
    assert "not finite" in str(doubt_about_batch([record(rows, float("nan"))], [3, 3, 2], True))
