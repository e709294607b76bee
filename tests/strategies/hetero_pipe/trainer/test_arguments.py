"""Every argument of the Trainer: two ranks train as a single device does, or refuse it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_dlres import ConfigError
from tests.strategies.hetero_pipe.trainer.watched import Watched, watched
from tests.support.rank_environment import PoolEnvironment
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    differences_in,
    fit,
    no_differences_in,
    trainer_for,
)

VALIDATES_OFTEN = {"limit_val_batches": 2, "num_sanity_val_steps": 1}
# Arguments that do not exclude each other share a run.
TOGETHER = {
    "loops": watched(
        limit_train_batches=3,
        val_check_interval=2,
        check_val_every_n_epoch=2,
        reload_dataloaders_every_n_epochs=1,
        min_epochs=2,
        max_epochs=3,
        gradient_clip_val=0.05,
        use_distributed_sampler=False,
        **VALIDATES_OFTEN,
    ),
    "steps": watched(
        max_steps=5,
        min_steps=4,
        max_time="00:01:00:00",
        accumulate_grad_batches=2,
        gradient_clip_val=0.01,
        gradient_clip_algorithm="value",
        detect_anomaly=True,
        deterministic=True,
        inference_mode=False,
        profiler="simple",
        enable_progress_bar=True,
        enable_model_summary=True,
        enable_autolog_hparams=False,
    ),
    "overfit_batches": watched(overfit_batches=2, benchmark=True),
    "fast_dev_run": watched(fast_dev_run=2),
}
# One argument in each run.
ALONE = {
    "accumulate_grad_batches": watched(accumulate_grad_batches=3),
    "barebones": watched(
        barebones=True,
        **dict.fromkeys(
            ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
        ),
    ),
    "benchmark": watched(benchmark=True),
    "check_val_every_n_epoch": watched(check_val_every_n_epoch=2),
    "check_val_every_n_epoch=None": watched(check_val_every_n_epoch=None, val_check_interval=3),
    "detect_anomaly": watched(detect_anomaly=True),
    "deterministic": watched(deterministic=True),
    "enable_autolog_hparams": watched(enable_autolog_hparams=False),
    "enable_model_summary": watched(enable_model_summary=True),
    "enable_progress_bar": watched(enable_progress_bar=True),
    "gradient_clip_algorithm": watched(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "gradient_clip_val": watched(gradient_clip_val=0.05),
    "inference_mode": watched(inference_mode=False),
    "limit_train_batches": watched(limit_train_batches=0.5),
    "limit_train_batches=0": watched(limit_train_batches=0),
    "limit_val_batches": watched(limit_val_batches=0.4),
    "limit_val_batches=0": watched(limit_val_batches=0),
    "max_epochs": watched(max_epochs=3),
    "max_steps": watched(max_steps=5),
    "max_time": watched(max_time={"seconds": 0}),
    "min_epochs": watched(min_epochs=2, max_time={"seconds": 0}, max_epochs=4),
    "min_steps": watched(min_steps=3, max_time={"seconds": 0}),
    "num_sanity_val_steps": watched(num_sanity_val_steps=-1),
    "num_sanity_val_steps=0": watched(num_sanity_val_steps=0),
    "overfit_batches=0.5": watched(overfit_batches=0.5),
    "precision=64-true": watched(precision="64-true"),
    "profiler": watched(profiler="advanced"),
    "reload_dataloaders_every_n_epochs": watched(reload_dataloaders_every_n_epochs=1, max_epochs=3),
    "use_distributed_sampler": watched(use_distributed_sampler=False),
    "val_check_interval": watched(val_check_interval=0.5),
}
# Two halves of a batch round differently from the whole.
HALF_PRECISION = {
    "precision=bf16-true": watched(precision="bf16-true"),
    "precision=16-true": watched(precision="16-true"),
}
HALF_TOLERANCE = 0.05


def compare(context: RankContext, cases: dict[str, Case], tolerance: float) -> dict[str, list[str]]:
    return differences_in(context, cases, tolerance)


def test_arguments_together(pool: RankPool) -> None:
    assert pool.run(compare, 2, TOGETHER, 1e-5) == no_differences_in(TOGETHER)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALONE)
def test_an_argument_alone(pool: RankPool, name: str) -> None:
    cases = {name: ALONE[name]}
    assert pool.run(compare, 2, cases, 1e-5) == no_differences_in(cases)


@pytest.mark.exhaustive
def test_true_half_precision(pool: RankPool) -> None:
    outcomes = pool.run(compare, 2, HALF_PRECISION, HALF_TOLERANCE)
    assert outcomes == no_differences_in(HALF_PRECISION)


# The hooks of this profiler on the layers cannot be copied, as measuring the layers does.
PROFILER_OF_TORCH = {
    "measured": replace(watched(profiler="pytorch"), options={"plan": None}),
}


def test_hooks_of_a_profiler(pool: RankPool) -> None:
    outcomes = pool.run(compare, 2, PROFILER_OF_TORCH, 1e-5)
    assert outcomes == no_differences_in(PROFILER_OF_TORCH)


class AddsGroup(Watched):
    """Model whose optimizer gets a group of parameters, of another stage, in the second epoch."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        if self.current_epoch == 1:
            optimizer.add_param_group({"params": self.net[4].parameters(), "lr": 0.3})


class OneCycle(Watched):
    """Model whose scheduler needs the number of steps of the run."""

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Plateau(Watched):
    """Model whose scheduler follows a logged value."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=10.0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val"},
        }


OPTIMIZERS = {
    "group added": watched(AddsGroup),
    "one cycle": watched(OneCycle),
    "plateau": watched(Plateau, max_epochs=3),
}


@pytest.mark.exhaustive
def test_optimizers_and_schedulers(pool: RankPool) -> None:
    assert pool.run(compare, 2, OPTIMIZERS, 1e-5) == no_differences_in(OPTIMIZERS)


class OtherClock(Callback):
    """Callback that lets the clock of each rank tell another time until the next validation."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        is_late = trainer.global_step % 3 == trainer.global_rank
        trainer._last_val_time = time.monotonic() - (1000.0 if is_late else 0.0)


def fit_with_clocks(context: RankContext) -> list[float]:
    case = watched(
        callbacks=lambda: [OtherClock()], val_check_interval={"minutes": 1}, num_sanity_val_steps=0
    )
    return fit(context, case).observed


def test_rank_zero_tells_when_a_validation_by_time_is_due(pool: RankPool) -> None:
    first, second = pool.run(fit_with_clocks, 2)
    assert first == second
    # Rank 0 is late after steps 3 and 6. Each other rank would be late after other steps.
    assert [int(value) % 1000 for value in first if 1000 <= value < 2000] == [3 + 1, 6 + 1]


def refusal_of_sync_batchnorm(context: RankContext) -> tuple[str, int]:
    with pytest.raises(ConfigError) as error:
        fit(context, watched(sync_batchnorm=True))
    trainer = trainer_for(None, sync_batchnorm=True, fast_dev_run=True)
    trainer.fit(Watched())
    return str(error.value), trainer.global_step


def test_sync_batchnorm_is_refused_on_several_devices(pool: RankPool) -> None:
    for message, steps in pool.run(refusal_of_sync_batchnorm, 2):
        assert message.startswith("sync_batchnorm must be False for a pipeline")
        assert steps == 1


class Synced(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(3)


def refusal_of_synced_layer(context: RankContext) -> str:
    with pytest.raises(ConfigError) as error:
        fit(context, replace(watched(), make=Synced))
    return str(error.value)


def test_layers_that_synchronise_batches_are_refused(pool: RankPool) -> None:
    for message in pool.run(refusal_of_synced_layer, 2):
        assert message.startswith("Synced must not have an nn.SyncBatchNorm for a pipeline")
        assert "got 'norm'" in message


def write_files(context: RankContext, directory: Path) -> dict[str, list[str]]:
    """Train with a logger and checkpoints on one device, then on all; return the files of each."""
    for run_context, name in ((None, "plain"), (context, "pipeline")):
        if run_context is None and context.rank > 0:
            continue
        root = directory / name
        trainer = trainer_for(
            run_context,
            default_root_dir=root,
            logger=CSVLogger(root, version=0),
            log_every_n_steps=2,
            enable_checkpointing=True,
        )
        trainer.fit(Watched())
    return {
        name: sorted(str(f.relative_to(directory / name)) for f in (directory / name).rglob("*.*"))
        for name in ("plain", "pipeline")
    }


@pytest.mark.exhaustive
def test_files_are_those_of_a_single_device(pool: RankPool, tmp_path: Path) -> None:
    files, _ = pool.run(write_files, 2, tmp_path)
    assert files["plain"] == files["pipeline"]
    assert len(files["plain"]) == 2
    plain, pipeline = (
        (tmp_path / name / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
        for name in ("plain", "pipeline")
    )
    assert [line.split(",")[0] for line in plain] == [line.split(",")[0] for line in pipeline]
    assert len(plain) == len(pipeline)


class NodeOfOneRank(PoolEnvironment):
    """Environment of a rank that is alone on its node."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self.global_rank()


def fit_on_two_nodes(context: RankContext) -> tuple[list[float], list[float]]:
    expected = fit(None, watched()).observed
    nodes, port = context.world_size, context.environment.main_port
    environment = NodeOfOneRank(nodes, context.rank, port)
    model = Watched()
    trainer_for(context, schedule="gpipe", devices=1, num_nodes=nodes, plugins=[environment]).fit(
        model
    )
    return model.observed, expected


@pytest.mark.exhaustive
def test_one_device_on_each_of_two_nodes(pool: RankPool) -> None:
    for observed, expected in pool.run(fit_on_two_nodes, 2):
        assert observed == pytest.approx(expected, rel=1e-5)


class Evaluated(Watched):
    test_step = Watched.validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


def evaluate_a_part(context: RankContext) -> list[list[Any]]:
    """Return the results of test and predict with limits, on one device and on all."""
    results = []
    for run_context in (None, context):
        model = Evaluated()
        trainer = trainer_for(run_context, limit_test_batches=2, limit_predict_batches=1)
        tested = trainer.test(model, model.val_dataloader(), verbose=False)
        predicted = trainer.predict(model, model.val_dataloader())
        results.append([tested[0]["val"], torch.cat(predicted).tolist()])
    return results


def test_test_and_predict_may_be_limited(pool: RankPool) -> None:
    for (value, rows), (other_value, other_rows) in pool.run(evaluate_a_part, 2):
        assert value == pytest.approx(other_value, rel=1e-5)
        assert len(rows) == 4
        assert torch.allclose(torch.tensor(rows), torch.tensor(other_rows), atol=1e-6)
