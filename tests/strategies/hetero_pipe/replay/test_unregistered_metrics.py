"""Metrics that are not submodules of the LightningModule give the values of a single device.

They are in a callback, a dict, a list or an object, or are made during the run. New submodules give
these values, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import CatMetric, MeanMetric, Metric, MetricTracker, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dlres import PipelinePlan
from lightning_dlres.core.errors import ConfigError
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Classifier, batches, trainer_for


class HasMetrics(Callback):
    """A callback with metrics of its own; it makes one of them when the first batch ends."""

    def __init__(self) -> None:
        self.samples, self.late = SumMetric(), dict[str, Metric]()
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples.update(len(batch[0]))
        self.late.setdefault("sum", SumMetric()).update(outputs["loss"])

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.values += [float(self.samples.compute()), float(self.late["sum"].compute())]
        self.late["sum"].reset()

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        # After the strategy's teardown.
        self.samples._computed = None
        self.values += [float(self.samples.compute())]


class Box:
    """An object of the user's with a metric."""

    def __init__(self) -> None:
        self.accuracy = MulticlassAccuracy(num_classes=5)


class UpdatesMetrics(Classifier):
    """A model with metrics in containers and objects, which it updates in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name, self.box = {"sum": SumMetric(), "cat": CatMetric()}, Box()
        self._several = [MeanMetric(), SumMetric()]
        self.tracker, self.fresh = MetricTracker(MulticlassAccuracy(num_classes=5)), MeanMetric()
        self.tracker.increment()

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()
        self.fresh = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.by_name["sum"].update(loss.detach())
        self.by_name["cat"].update(out.detach().amax(1))
        self._several[0].update(loss.detach(), len(out))
        self.box.accuracy.update(out, batch[1])
        self.tracker.update(out, batch[1])
        self.fresh.update(loss.detach(), len(out))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._several[1].update(self.net(batch[0]).sum())

    def _values(self) -> list[float]:
        metrics = [*self.by_name.values(), *self._several, self.box.accuracy]
        return [float(m.compute().sum()) for m in metrics] + [
            float(m.update_count) for m in metrics
        ]

    def on_train_epoch_end(self) -> None:
        self.observed += [
            *self._values(),
            float(self.tracker.compute()),
            float(self.fresh.compute()),
        ]
        self.by_name["sum"].reset()


def values_of(context: RankContext | None, schedule: str = "auto") -> list[float]:
    seed_everything(3, verbose=False)
    model, callback, options = UpdatesMetrics(), HasMetrics(), {"schedule": schedule}
    if context is not None and context.world_size == 3:
        options |= {"plan": PipelinePlan(replicas=((0, 1, 2),), split=(2, 2, 1)), "stages": 3}  # type: ignore[dict-item]
    trainer = trainer_for(context, callbacks=[callback], **options)
    trainer.fit(model, batches(), batches())
    return callback.values + model.observed + model._values() + [float(callback.samples.compute())]


def values_of_all_runs(context: RankContext) -> list[list[float]]:
    return [values_of(None), values_of(context), values_of(context, "gpipe")]


@pytest.mark.parametrize("ranks", [2, 3])
def test_metrics_have_the_values_of_a_single_device(pool: RankPool, ranks: int) -> None:
    for plain, *others in pool.run(values_of_all_runs, ranks):
        for values in others:
            assert values == pytest.approx(plain, rel=1e-5)


def summed(context: RankContext) -> SumMetric:
    metric = SumMetric()
    metric.update(torch.tensor(float(context.rank + 1)))
    return metric


def fit_then_sum(context: RankContext) -> list[float]:
    values_of(context)
    return [float(summed(context).compute())]


def fail_then_sum(context: RankContext) -> list[float]:
    plan = PipelinePlan(replicas=((0, 1),), split=(99, 1))
    with pytest.raises(ConfigError, match="99"):
        trainer_for(context, plan=plan).fit(UpdatesMetrics(), batches())
    return [float(summed(context).compute())]


def test_metrics_gather_as_usual_after_a_run_that_failed_to_start(pool: RankPool) -> None:
    assert pool.run(fail_then_sum, 2) == [[3.0], [3.0]]


def test_metrics_of_the_script_gather_as_usual_after_the_run(pool: RankPool) -> None:
    assert pool.run(fit_then_sum, 2) == [[3.0], [3.0]]
