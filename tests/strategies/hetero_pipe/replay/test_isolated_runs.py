"""A run of a step leaves nothing behind, and its side effects are applied once."""

from __future__ import annotations

import logging
from threading import Thread
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import SumMetric

from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors
from lightning_dlres.strategies.hetero_pipe.replay.metrics import MetricStates
from lightning_dlres.strategies.hetero_pipe.replay.step_effects import StepEffects
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attributes import UserState
from lightning_dlres.strategies.hetero_pipe.step.module_search import find_pipelined_module
from tests.support.models import QUIET


class Model(LightningModule):
    """A model whose step has every kind of side effect."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2))
        self.register_buffer("centre", torch.zeros(2))
        self.steps, self.sums, self.metric = 0, torch.zeros(2), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        self.sums += 1
        self.centre += 1
        self.metric.update(1.0)
        self.log("steps", float(self.steps))
        self.trainer.should_stop = True
        print("a step")

    def observed(self) -> list[float]:
        """Return the state that the step changes, metrics and the end of training included."""
        tensors = float(self.sums.sum()), float(self.centre.sum())
        return [self.steps, *tensors, self.metric.update_count, float(self.trainer.should_stop)]


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(**QUIET, accelerator="cpu")


def effects_of(model: Model, trainer: Trainer) -> StepEffects:
    model.trainer = trainer
    layers = find_pipelined_module(model, "net").layers
    state = UserState(layers.non_pipelined_modules, layers.modules)
    return StepEffects(model, layers, state, MetricStates(model), torch.device("cpu"))


def test_undone_run_leaves_nothing(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    effects = effects_of(model, trainer)
    before, sums, centre = model.observed(), model.sums, model.centre
    with effects.undone(LayerTensors()):
        model.training_step(None, 0)
        assert model.observed() == [1, 2.0, 2.0, 1, 1.0]
    assert model.observed() == before
    assert model.sums is sums
    assert model.centre is centre
    assert capsys.readouterr().out == ""


def test_every_run_starts_from_the_same_state_and_one_is_applied(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model()
    effects, sums, centre = effects_of(model, trainer), model.sums, model.centre
    for _ in range(2):
        with effects.isolated(LayerTensors()) as run:
            model.training_step(None, 0)
            effects.collect(run)
        # Metrics add up over the runs.
        assert model.observed()[:3] == [0, 0.0, 0.0]
    record = effects.to_tree(by_parts=True)
    assert [len(logs) for logs in record["logs"]] == [1, 1]
    assert record["fingerprints"][0] == record["fingerprints"][1]
    assert record["once_per_batch"]["buffers"] == ["centre"]
    assert record["printed"] == "a step\n"
    model.log = lambda name, value: logged.append((name, float(value)))  # type: ignore[assignment, misc]
    logged: list[tuple[str, float]] = []
    effects.apply([record], [1, 3])
    # Both micro-batches make one update of the metric, one log and one print.
    assert model.observed() == [1, 2.0, 2.0, 1, 1.0]
    assert model.sums is sums
    assert model.centre is centre
    assert float(model.metric.compute()) == 2.0
    assert logged == [("steps", 1.0)]
    assert capsys.readouterr().out == "a step\n"


def test_failed_run_is_undone_and_prints_its_text(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model()
    effects = effects_of(model, trainer)

    def fail_after_step() -> None:
        with effects.undone(LayerTensors()):
            model.training_step(None, 0)
            raise KeyError

    with pytest.raises(KeyError):
        fail_after_step()
    assert model.observed() == [0, 0.0, 0.0, 0, 0.0]
    assert capsys.readouterr().out == "a step\n"


def test_a_repeated_run_logs_nothing_but_other_threads_do(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    effects, log = effects_of(Model(), trainer), logging.getLogger("user's code")
    with effects.isolated(LayerTensors()):
        log.warning("repeated")
        thread = Thread(target=log.warning, args=["of another thread"])
        thread.start()
        thread.join()
    with effects.isolated(LayerTensors(), shows_logging=True):
        log.warning("first")
    log.warning("afterwards")
    assert [r.getMessage() for r in caplog.records] == ["of another thread", "first", "afterwards"]
