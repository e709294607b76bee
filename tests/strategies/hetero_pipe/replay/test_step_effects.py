"""What a training step does beside its loss happens as often as on a single device, and everywhere:
metrics, random numbers, tensors changed in place, loggers, outputs, an end of training."""

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
from tests.support.training_cases import Case, Classifier, differences_in, fit, none_in


class Updates(Metric):
    """Counts how often it was updated."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("updates", torch.zeros(()), dist_reduce_fx="sum")

    def update(self) -> None:
        self.updates += 1

    def compute(self) -> Tensor:
        return self.updates


class Measured(Classifier):
    """Updates a metric once per batch, with a value of the whole batch."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if isinstance(self.metric, Updates):
            self.metric.update()
        else:
            self.metric.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.observed.append(float(self.metric.compute()))
        self.metric.reset()


class Draws(Classifier):
    """Draws random numbers before or after the module's call, one for every sample or for every
    step."""

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
    """Changes tensors in place that are no buffers, one of them in a list."""

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
    """Logs with a batch size of its own: constant, or that of the batch."""

    def __init__(self, constant: bool) -> None:
        super().__init__()
        self.constant = constant

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        size = 8 if self.constant else len(x)
        self.log("sized", loss * (batch_idx + 1), on_step=False, on_epoch=True, batch_size=size)
        return loss


class LogsAtTimes(Classifier):
    """Logs one name in some batches only, and one where a sample asks for it."""

    def __init__(self, by_sample: bool) -> None:
        super().__init__()
        self.by_sample = by_sample

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        if (y[0] == 3) if self.by_sample else batch_idx % 2:
            self.log("at_times", out.detach().mean(), on_step=True, on_epoch=True)
        return F.cross_entropy(out, y)


class ReturnsDict(Classifier):
    """Returns a dict with the loss, and, if asked, with more."""

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


class Stops(Classifier):
    """Ends training in its second step, as only a rank with the loss can know."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and float(loss) > 0.0:
            self.trainer.should_stop = True
        return loss


CASES = {
    "mean metric": Case(lambda: Measured(MeanMetric()), used="gpipe"),
    "sum metric": Case(lambda: Measured(SumMetric()), used="gpipe"),
    "count of updates": Case(lambda: Measured(Updates()), used="gpipe"),
    "count of updates, gpipe": Case(lambda: Measured(Updates()), "gpipe"),
    "random per sample, before": Case(lambda: Draws(True, True), used="gpipe"),
    "random per sample, after": Case(lambda: Draws(False, True), used="gpipe"),
    "random per step, before": Case(lambda: Draws(True, False)),
    "random per step, after": Case(lambda: Draws(False, False)),
    "in place, gpipe": Case(InPlace, "gpipe"),
    "in place": Case(InPlace, used="gpipe"),
    "constant batch size": Case(lambda: LogsWithBatchSize(True), used="gpipe"),
    "own batch size": Case(lambda: LogsWithBatchSize(False), used="1f1b"),
    "name at times": Case(lambda: LogsAtTimes(False), used="1f1b"),
    "name at times, gpipe": Case(lambda: LogsAtTimes(False), "gpipe"),
    "name by sample": Case(lambda: LogsAtTimes(True), used="gpipe"),
    "dict with the loss": Case(lambda: ReturnsDict(False), used="1f1b"),
    "dict with more": Case(lambda: ReturnsDict(True), used="gpipe"),
    "stop": Case(Stops, used="1f1b", trainer={"max_epochs": 3}),
    "stop, gpipe": Case(Stops, "gpipe", trainer={"max_epochs": 3}),
}


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def test_equal_to_a_single_device_on_all_ranks(pool: RankPool) -> None:
    assert pool.run(compare, 2) == none_in(CASES)


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


def test_1f1b_refuses_by_name(pool: RankPool) -> None:
    for messages in pool.run(fit_with_1f1b, 2):
        for name, words in REFUSED.items():
            assert words in messages[name], name
            assert "schedule='gpipe'" in messages[name]


class Notes(Logger):
    """Keeps what it is given; writes on all ranks, so that both can be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[int | None, dict[str, float]]] = []

    name = version = "notes"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "direct" in metrics:
            self.notes.append((step, {k: round(float(v), 4) for k, v in metrics.items()}))


class CallsLogger(Classifier):
    """Gives a value to the logger itself, before and after the module's call."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.logger is not None
        self.logger.log_metrics({"direct": batch[0].mean()}, step=batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"direct": loss.detach()}, step=batch_idx)
        return loss


def notes_of(context: RankContext) -> list[list[Any]]:
    """Return what the logger got in a plain run, under GPipe and with the schedule chosen."""
    found = []
    for place, schedule in ((None, "auto"), (context, "gpipe"), (context, "auto")):
        logger = Notes()
        fit(place, Case(CallsLogger, schedule, trainer={"logger": logger, "max_epochs": 1}))
        found.append(logger.notes)
    return found


def test_what_a_logger_gets_itself_is_written_once(pool: RankPool) -> None:
    for plain, gpipe, auto in pool.run(notes_of, 2):
        assert len(plain) == 8
        assert gpipe == plain
        assert auto == plain
