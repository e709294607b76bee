"""Side effects of a training step happen on every rank as often as on a single device.

These are: updates of metrics, random numbers, tensors changed in place, calls of loggers, outputs,
and the end of training.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, SumMetric

from lightning_dlres import UnsupportedStepError
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, Classifier, differences_in, fit, no_differences_in


class UpdateCount(Metric):
    """A metric that counts its updates."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("updates", torch.zeros(()), dist_reduce_fx="sum")

    def update(self) -> None:
        self.updates += 1

    def compute(self) -> Tensor:
        return self.updates


class UpdatesMetric(Classifier):
    """A model that updates a metric once per batch, with a value of the whole batch."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if isinstance(self.metric, UpdateCount):
            self.metric.update()
        else:
            self.metric.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.observed.append(float(self.metric.compute()))
        self.metric.reset()


class DrawsNumbers(Classifier):
    """A model that draws random numbers before or after the module's call, one for every sample or
    one for every step."""

    def __init__(self, before: bool, per_sample: bool) -> None:
        super().__init__()
        self.before, self.per_sample = before, per_sample

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        draw = (lambda: torch.rand(len(x), 1)) if self.per_sample else (lambda: torch.rand(()))
        out = self.net(x * draw() if self.before else x)
        return F.cross_entropy(out if self.before else out * draw(), y)

    def on_train_batch_end(self, *args: Any) -> None:
        self.observed.append(float(torch.rand(())))


class InPlace(Classifier):
    """A model that changes tensors in place that are not buffers; one of them is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth, self.history = torch.zeros(5), [torch.zeros(())]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.smooth.mul_(0.9).add_(out.detach().mean(0))
        self.history[0] += out.detach().sum()
        return F.cross_entropy(out - self.smooth, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        self.observed += [float(self.smooth.sum()), float(self.history[0])]


class LogsWithBatchSize(Classifier):
    """A model that logs with a batch size: a constant, or that of the batch."""

    def __init__(self, constant: bool) -> None:
        super().__init__()
        self.constant = constant

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        size = 8 if self.constant else len(x)
        self.log("sized", loss * (batch_idx + 1), on_step=False, on_epoch=True, batch_size=size)
        return loss


class LogsSometimes(Classifier):
    """A model that logs a name in every second batch only, or only if the first sample has a
    certain label."""

    def __init__(self, by_sample: bool) -> None:
        super().__init__()
        self.by_sample = by_sample

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        if (y[0] == 3) if self.by_sample else batch_idx % 2:
            self.log("sometimes", out.detach().mean(), on_step=True, on_epoch=True)
        return F.cross_entropy(out, y)


class ReturnsDict(Classifier):
    """A model whose step returns a dict with the loss, and with `more` also other values."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.more = more

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        return {"loss": loss, "largest": out.amax(), "name": "a"} if self.more else {"loss": loss}

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.observed.append(float(outputs["loss"]))
        if self.more:
            assert outputs["name"] == "a"
            self.observed.append(float(outputs["largest"]))


class StopsTraining(Classifier):
    """A model that ends training in its second step, on the rank that knows the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and float(loss) > 0.0:
            self.trainer.should_stop = True
        return loss


CASES = {
    "mean metric": Case(lambda: UpdatesMetric(MeanMetric()), expected_schedule="gpipe"),
    "sum metric": Case(lambda: UpdatesMetric(SumMetric()), expected_schedule="gpipe"),
    "count of updates": Case(lambda: UpdatesMetric(UpdateCount()), expected_schedule="gpipe"),
    "count of updates, gpipe": Case(lambda: UpdatesMetric(UpdateCount()), "gpipe"),
    "random per sample, before": Case(lambda: DrawsNumbers(True, True), expected_schedule="gpipe"),
    "random per sample, after": Case(lambda: DrawsNumbers(False, True), expected_schedule="gpipe"),
    "random per step, before": Case(lambda: DrawsNumbers(True, False)),
    "random per step, after": Case(lambda: DrawsNumbers(False, False)),
    "in place, gpipe": Case(InPlace, "gpipe"),
    "in place": Case(InPlace, expected_schedule="gpipe"),
    "constant batch size": Case(lambda: LogsWithBatchSize(True), expected_schedule="gpipe"),
    "own batch size": Case(lambda: LogsWithBatchSize(False), expected_schedule="1f1b"),
    "name sometimes": Case(lambda: LogsSometimes(False), expected_schedule="1f1b"),
    "name sometimes, gpipe": Case(lambda: LogsSometimes(False), "gpipe"),
    "name by sample": Case(lambda: LogsSometimes(True), expected_schedule="gpipe"),
    "dict with the loss": Case(lambda: ReturnsDict(False), expected_schedule="1f1b"),
    "dict with more": Case(lambda: ReturnsDict(True), expected_schedule="gpipe"),
    "stop": Case(StopsTraining, expected_schedule="1f1b", trainer={"max_epochs": 3}),
    "stop, gpipe": Case(StopsTraining, "gpipe", trainer={"max_epochs": 3}),
}


def compare_with_plain_training(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def test_side_effects_equal_a_single_device_on_all_ranks(pool: RankPool) -> None:
    assert pool.run(compare_with_plain_training, 2) == no_differences_in(CASES)


REFUSED = {
    "count of updates": "the metric 'metric'",
    "random per sample, before": "random numbers",
    "random per sample, after": "whole batch",
    "in place": "whole batch",
    "constant batch size": "batch_size=...) gets 8",
    "dict with more": "returns 'largest' beside the loss",
}


def fit_with_1f1b(context: RankContext) -> dict[str, str]:
    messages = {}
    for name in REFUSED:
        with pytest.raises(UnsupportedStepError) as error:
            fit(context, Case(CASES[name].make, "1f1b"))
        messages[name] = str(error.value)
    return messages


def test_1f1b_refuses_with_a_reason(pool: RankPool) -> None:
    for messages in pool.run(fit_with_1f1b, 2):
        for name, words in REFUSED.items():
            assert words in messages[name], name
            assert "schedule='gpipe'" in messages[name]


class KeepsDirectCalls(Logger):
    """A logger that keeps metrics with the name "direct". It writes on all ranks, so that the test
    sees every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, dict[str, float]]] = []

    name = version = "direct"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "direct" in metrics:
            self.calls.append((step, {k: round(float(v), 4) for k, v in metrics.items()}))


class CallsLogger(Classifier):
    """A model that calls the logger directly, before and after the module's call."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.logger is not None
        self.logger.log_metrics({"direct": batch[0].mean()}, step=batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"direct": loss.detach()}, step=batch_idx)
        return loss


def calls_of_all_runs(context: RankContext) -> list[list[Any]]:
    """Return the logger's calls in a plain run, under GPipe, and with the schedule chosen."""
    calls = []
    for place, schedule in ((None, "auto"), (context, "gpipe"), (context, "auto")):
        logger = KeepsDirectCalls()
        fit(place, Case(CallsLogger, schedule, trainer={"logger": logger, "max_epochs": 1}))
        calls.append(logger.calls)
    return calls


def test_direct_calls_of_a_logger_are_made_once(pool: RankPool) -> None:
    for plain, gpipe, auto in pool.run(calls_of_all_runs, 2):
        assert len(plain) == 8
        assert gpipe == plain
        assert auto == plain
