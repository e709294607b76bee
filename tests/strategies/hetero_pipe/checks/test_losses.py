"""Losses that are not a mean over samples.

GPipe is exact for them, 1F1B refuses them with a reason, and "auto" chooses GPipe and says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlres import HeteroPipeStrategy, UnsupportedStepError
from tests.support.examples import checkered
from tests.support.models import QUIET
from tests.support.parity import relative
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import QUICK

KINDS = ["padded", "padded_later", "sum", "contrastive", "noise", "perplexity", "unmergeable"]


class LossByKind(LightningModule):
    """A model with one network, and the loss that `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.generator = torch.Generator()
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 6)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, mask = batch
        if self.kind == "noise":
            noise = torch.randn_like(x)
            loss = F.mse_loss(self.net(x + noise), noise)
        else:
            loss = self._loss(self.net(x), y, mask)
        if self.kind == "own draws":
            torch.randn(x.shape, generator=self.generator)
        self.log("loss", loss)
        if self.kind == "perplexity":
            self.log("perplexity", loss.detach().exp())
        return loss

    def _loss(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        tokens = F.cross_entropy(out, y, reduction="none")
        if self.kind.startswith("padded"):
            return (tokens * mask).sum() / mask.sum()
        if self.kind == "sum":
            return tokens.sum()
        if self.kind == "contrastive":
            z = F.normalize(out, dim=-1)
            return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))
        if self.kind == "root":
            # If a whole micro-batch is masked, the gradient is NaN, but the value is not.
            return tokens.mean() + 0 * (out[:, 0] * mask).square().sum().sqrt()
        return tokens.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class WithUnmergeableMetric(LossByKind):
    """A model that logs a metric whose state cannot be merged from parts of a batch."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        from torchmetrics import MaxMetric

        self.largest = MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.largest(out.detach())
        self.log("largest", self.largest)
        return F.cross_entropy(out, batch[1])


def data(kind: str) -> DataLoader[Any]:
    """Return batches; for "padded_later" the first batch has no padding."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(50, 6, generator=generator)
    mask = (torch.rand(50, generator=generator) > 0.5).float()
    mask[::10] = 1.0
    if kind == "padded_later":
        mask[:10] = 1.0
    if kind == "root":
        mask = torch.zeros(50).index_fill(0, torch.arange(0, 50, 10), 1.0)
    labels = torch.randint(6, (50,), generator=generator)
    return DataLoader(TensorDataset(x, labels, mask), batch_size=10)


def fit(
    context: RankContext | None, kind: str, schedule: str, devices: int = 2, stages: int = 2
) -> Any:
    """Train, and return the schedule that was used, the logged values and the weights."""
    seed_everything(3, verbose=False)
    model = WithUnmergeableMetric(kind) if kind == "unmergeable" else LossByKind(kind)
    strategy = (
        HeteroPipeStrategy(stages=stages, schedule=schedule, microbatches=4, profile=QUICK)  # type: ignore[arg-type]
        if context
        else "auto"
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        plugins=[context.environment] if context else [],
        max_epochs=2,
        **QUIET,
    )
    trainer.fit(model, data(kind))
    used = strategy.schedule if isinstance(strategy, HeteroPipeStrategy) else ""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return used, metrics, {n: p.detach() for n, p in model.named_parameters()}


def fit_plainly(context: RankContext, kind: str) -> Any:
    return fit(None, kind, "", 1)


def assert_equal_to_plain(pool: RankPool, kind: str, outcomes: list[Any]) -> None:
    (expected,) = pool.run(fit_plainly, 1, kind)
    for _, metrics, weights in outcomes:
        for name, value in expected[1].items():
            assert metrics[name] == pytest.approx(value, rel=1e-5)
        for name, value in expected[2].items():
            assert relative(weights[name], value) <= 1e-5, name


@pytest.mark.parametrize("kind", checkered(KINDS))
def test_gpipe_is_exact(pool: RankPool, kind: str) -> None:
    assert_equal_to_plain(pool, kind, pool.run(fit, 2, kind, "gpipe"))


@pytest.mark.parametrize("kind", ["contrastive", "padded"])
def test_gpipe_is_exact_over_two_replicas(pool: RankPool, kind: str) -> None:
    assert_equal_to_plain(pool, kind, pool.run(fit, 4, kind, "gpipe", 4, 2))


@pytest.mark.parametrize("kind", checkered(KINDS, start=1))
def test_auto_falls_back_to_gpipe_and_says_so(pool: RankPool, kind: str) -> None:
    outcomes = pool.run_expecting_errors(fit, 2, kind, "auto")
    assert [outcome.value[0] for outcome in outcomes] == ["gpipe", "gpipe"]
    assert "dlres: schedule gpipe" in outcomes[0].output
    assert_equal_to_plain(pool, kind, [outcome.value for outcome in outcomes])


REFUSALS = {
    "padded": "not a mean over samples",
    "padded_later": "not a mean over samples",
    "sum": "not a mean over samples",
    "contrastive": "not a mean over samples",
    "noise": "not a mean over samples",
    "own draws": "draws different random numbers for a batch and for a micro-batch",
    "perplexity": "'perplexity'",
    "unmergeable": "'largest'",
    "root": "the loss has different gradients for the whole batch and its micro-batches",
}


def fit_all_with_1f1b(context: RankContext) -> dict[str, str]:
    """Return the error for each loss."""
    messages = {}
    for kind in REFUSALS:
        with pytest.raises(UnsupportedStepError) as error:
            fit(context, kind, "1f1b")
        messages[kind] = str(error.value)
    return messages


def test_1f1b_refuses_with_a_reason(pool: RankPool) -> None:
    for messages in pool.run(fit_all_with_1f1b, 2):
        for kind, reason in REFUSALS.items():
            assert reason in messages[kind]
            assert "schedule='gpipe'" in messages[kind]


def test_auto_chooses_1f1b_for_a_mean_over_samples(pool: RankPool) -> None:
    outcomes = pool.run(fit, 2, "mean", "auto")
    assert [outcome[0] for outcome in outcomes] == ["1f1b", "1f1b"]
    assert_equal_to_plain(pool, "mean", outcomes)
