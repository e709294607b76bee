"""Callbacks of Lightning over two ranks: they see and do the same as on a single device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    device_stats_monitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from lightning_dlres import ConfigError
from tests.strategies.hetero_pipe.trainer.watched import Watched, watched
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, differences_in, no_differences_in, trainer_for


def record_epoch(trainer: Any, module: Any) -> None:
    module.observed.append(4000.0 + trainer.current_epoch)


class RecordsBar(TQDMProgressBar):
    """Progress bar that records what it shows."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        shown = self.get_metrics(trainer, module)
        module.observed += [float(self.total_train_batches), float(shown["loss_step"])]


class OwnBar(ProgressBar):
    """Progress bar of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.enable = lambda: None
        self.disable = lambda: None

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        metrics = self.get_metrics(trainer, module)
        module.observed += [float(self.total_train_batches), float(metrics["loss_step"])]


class OwnCheckpoint(Checkpoint):
    """Checkpoint of the user's own, which is as large as that of a single device."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint("own.ckpt")
        state = torch.load("own.ckpt", weights_only=False)
        module.observed += [float(value.norm()) for value in state["state_dict"].values()]
        module.observed.append(float(len(state["optimizer_states"][0]["state"])))


CASES: dict[str, Case] = {
    "many": watched(
        callbacks=lambda: [
            LambdaCallback(on_train_epoch_end=record_epoch),
            Timer("00:01:00:00"),
            SpikeDetection(exclude_batches_path="./bad.json"),
            GradientAccumulationScheduler({0: 1, 1: 2}),
            RecordsBar(),
            OwnCheckpoint(),
            RichModelSummary(),
        ],
        enable_progress_bar=True,
        enable_model_summary=True,
        enable_checkpointing=True,
    ),
    "LearningRateFinder": watched(
        callbacks=lambda: [LearningRateFinder(num_training_steps=5)], default_root_dir="."
    ),
}
MORE_CASES: dict[str, Case] = {
    "GradientAccumulationScheduler": watched(
        callbacks=lambda: [GradientAccumulationScheduler({0: 3, 1: 2})]
    ),
    "LambdaCallback": watched(callbacks=lambda: [LambdaCallback(on_train_epoch_end=record_epoch)]),
    "Timer": watched(callbacks=lambda: [Timer({"seconds": 0})]),
    "SpikeDetection": watched(callbacks=lambda: [SpikeDetection(exclude_batches_path="./b.json")]),
    "TQDMProgressBar": watched(callbacks=lambda: [RecordsBar()], enable_progress_bar=True),
    "RichProgressBar": watched(callbacks=lambda: [RichProgressBar()], enable_progress_bar=True),
    "ProgressBar": watched(callbacks=lambda: [OwnBar()], enable_progress_bar=True),
    "Checkpoint": watched(callbacks=lambda: [OwnCheckpoint()], enable_checkpointing=True),
    "RichModelSummary": watched(
        callbacks=lambda: [RichModelSummary(max_depth=2)], enable_model_summary=True
    ),
}


def compare(context: RankContext, names: list[str]) -> dict[str, list[str]]:
    return differences_in(context, {name: {**CASES, **MORE_CASES}[name] for name in names})


def test_callbacks_together(pool: RankPool) -> None:
    assert pool.run(compare, 2, list(CASES)) == no_differences_in(CASES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE_CASES)
def test_a_callback_alone(pool: RankPool, name: str) -> None:
    assert pool.run(compare, 2, [name]) == no_differences_in({name: MORE_CASES[name]})


class WithExample(Watched):
    """Model with an example input, which a summary runs."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(3, 16)


class RecordsSummary(ModelSummary):
    """Summary that keeps the columns of its table and the totals."""

    shown: Any = None

    @classmethod
    def summarize(cls, *columns_and_totals: Any, **totals: Any) -> None:  # type: ignore[override]
        cls.shown = (columns_and_totals, totals)


def logged_columns(context: RankContext) -> list[Any]:
    """Return the columns of the log, and the summary, on one device and on all."""
    seen = []
    for run_context in (None, context):
        RecordsSummary.shown = None
        logger = CSVLogger(f"{context.rank} {run_context is None}")
        statistics = mock.patch.object(
            CPUAccelerator, "get_device_stats", return_value={"load": 1.0}
        )
        trainer = trainer_for(
            run_context,
            schedule="gpipe",
            logger=logger,
            log_every_n_steps=1,
            callbacks=[
                RecordsSummary(max_depth=2),
                ThroughputMonitor(len, window_size=3),
                LearningRateMonitor(),
                DeviceStatsMonitor(),
            ],
            enable_model_summary=True,
        )
        with statistics, mock.patch.object(device_stats_monitor, "_PSUTIL_AVAILABLE", True):
            trainer.fit(WithExample())
        columns = None
        if trainer.is_global_zero:
            header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
            columns = set(header.split(","))
        seen.append((columns, RecordsSummary.shown))
    return seen


def test_monitors_and_summaries_show_the_whole_model_on_rank_zero(pool: RankPool) -> None:
    (expected, actual), (_, other) = pool.run(logged_columns, 2)
    assert other == (None, None)
    assert expected[0] == actual[0]
    assert {"train/device/samples_per_sec", "lr-SGD/pg1"} <= actual[0]
    assert any("load" in column for column in actual[0])
    assert expected[1] == actual[1]
    assert actual[1][1]["total_flops"] > 0


class Fails(Watched):
    """Model that raises on all ranks after the second step."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step == 2:
            raise KeyError("a fault of the user's")


def saved_on_exception(context: RankContext) -> list[tuple[int, float]]:
    saved = []
    for run_context in (None, context):
        directory = f"{context.rank if run_context is None else ''}saved"
        trainer = trainer_for(
            run_context,
            schedule="gpipe",
            callbacks=[OnExceptionCheckpoint(directory)],
            enable_checkpointing=True,
        )
        with pytest.raises(KeyError):
            trainer.fit(Fails())
        state = torch.load(f"{directory}/on_exception.ckpt", weights_only=False)
        norm = sum(float(value.norm()) for value in state["state_dict"].values())
        saved.append((state["global_step"], norm))
    return saved


@pytest.mark.exhaustive
def test_a_checkpoint_is_saved_if_all_ranks_raise(pool: RankPool) -> None:
    for (step, norm), actual in pool.run(saved_on_exception, 2):
        assert actual == (step, pytest.approx(norm, rel=1e-5))


class Spikes(Watched):
    """Model whose loss is not finite in the third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 else loss


def spike(context: RankContext) -> str:
    path = f"./bad{context.rank}.json"
    trainer = trainer_for(
        context, schedule="gpipe", callbacks=[SpikeDetection(exclude_batches_path=path)]
    )
    with pytest.raises(Exception, match="spike") as error:
        trainer.fit(Spikes())
    return str(error.value)


@pytest.mark.exhaustive
def test_a_spike_ends_all_ranks(pool: RankPool) -> None:
    assert pool.run(spike, 2) == ["Training spike detected in batch 2"] * 2


def tune(context: RankContext) -> list[Any]:
    """Return the suggested rate and the losses of the search, on one device and on all; and the
    error of a search of the batch size."""
    found = []
    for run_context in (None, context):
        model = Watched()
        trainer = trainer_for(run_context, schedule="gpipe", default_root_dir=context.tmp)
        finder = Tuner(trainer).lr_find(model, num_training=8)
        assert finder is not None
        found.append(
            [finder.suggestion(skip_begin=1, skip_end=1), model.lr, *finder.results["loss"]]
        )
    model.batch_size = 4  # type: ignore[assignment]
    with pytest.raises(ConfigError) as error:
        Tuner(trainer_for(context)).scale_batch_size(model)
    return [*found, str(error.value)]


def test_the_tuner_finds_the_learning_rate_but_not_the_batch_size(pool: RankPool) -> None:
    for expected, actual, message in pool.run(tune, 2):
        assert actual == pytest.approx(expected, rel=1e-4)
        assert re.match(f"{BatchSizeFinder.__name__} cannot work with a pipeline", message)
