"""Command `dlres plan`: show and save the pipeline plan of a config file, without training."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_warn
from msgspec.structs import replace
from typing_extensions import override

from lightning_dlres.cli.fit import TrainerCLI, TrainerParser
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.plan.planner import measured_plan
from lightning_dlres.pipeline.profile.cluster import Cluster
from lightning_dlres.pipeline.profile.cluster_file import load_cluster
from lightning_dlres.strategies.capabilities import PipelinePlanning, PlanningOptions
from lightning_dlres.strategies.hetero_pipe.profiled_model import profile_single_process


def plan(options: Sequence[str]) -> int:
    """Make the plan, print it, and write it to a file; return the exit status.

    Args:
        options: Arguments of the command line after `dlres plan`.

    Raises:
        ConfigError: If the config has another strategy, or if no plan can be made.
    """
    settings, overrides = _parser().parse_known_args(options)
    if not settings.out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out must be a file in an existing folder, got {settings.out}. Make the folder "
            f"{settings.out.parent}."
        )
    cluster = load_cluster(settings.cluster) if settings.cluster is not None else None
    arguments = ["--config", str(settings.config), *overrides]
    with warnings.catch_warnings():
        # LightningCLI warns if it gets arguments both here and on the command line.
        warnings.filterwarnings("ignore", message=".*args parameter is intended.*")
        cli = TrainerCLI(
            args=arguments,
            run=False,
            save_config_callback=None,
            parser_kwargs={"prog": "dlres plan"},
            parser_class=TrainerParser,
        )
    strategy = cli.trainer.strategy
    if not isinstance(strategy, PipelinePlanning):
        raise ConfigError(
            f"The strategy in {settings.config} must be HeteroPipeStrategy, got "
            f"{type(strategy).__name__}. Use --trainer.strategy=dlres_hetero_pipe."
        )
    if cluster is None:
        pipeline_plan = _plan_on_ranks(cli, strategy)
    else:
        pipeline_plan = _plan_here(cli, strategy, *cluster)
    # Lightning's launcher runs this command once per rank of a host. Only the first one writes.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{pipeline_plan.table()}\n{pipeline_plan.prediction()}")
        settings.out.write_text(pipeline_plan.to_json())
        print(
            f"Wrote the plan to {settings.out}. Use: HeteroPipeStrategy(plan={str(settings.out)!r})"
        )
    return 0


def _plan_on_ranks(cli: LightningCLI, strategy: PipelinePlanning) -> PipelinePlan:
    """Start the ranks of the config, profile the layers on them, and return the plan.

    Raises:
        ConfigError: If the strategy profiled nothing, as with one device or without a training set.
    """
    trainer = cli.trainer
    trainer.fit_loop.epoch_loop.max_steps = 0
    # Without steps, callbacks and loggers have nothing to do.
    trainer.callbacks = []  # type: ignore[attr-defined]
    trainer.loggers = []
    trainer.fit(cli.model, datamodule=cli.datamodule)
    if strategy.plan is None or not strategy.plan.is_measured:
        raise ConfigError(
            "The layers must be profiled to make a plan, got no profile; the reason is above. Use "
            "at least two devices and a training set."
        )
    return strategy.plan


def _plan_here(
    cli: LightningCLI, strategy: PipelinePlanning, cluster: Cluster, factors: Sequence[float]
) -> PipelinePlan:
    """Profile the layers in this process, and return the plan for the cluster of a file.

    Args:
        cli: Trainer, model and data of the config.
        strategy: The Trainer's strategy.
        cluster: Devices and links of the file.
        factors: For each kind of device, the time of a layer on it divided by the time on this
            device.

    Raises:
        ConfigError: If the training set is empty.
    """
    planner = _PlanAtTrainStart(strategy, cluster, factors)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision=cli.trainer.precision,
        max_steps=1,
        logger=False,
        callbacks=[planner],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    try:
        trainer.fit(cli.model, datamodule=cli.datamodule)
    except _PlanReady as done:
        return done.plan
    raise ConfigError(
        "The training set must not be empty, got no training batch. Pass a training set."
    )


class _PlanReady(Exception):
    """Exception that carries the plan and ends the Trainer's run before the first step."""

    def __init__(self, plan: PipelinePlan) -> None:
        self.plan = plan


class _PlanAtTrainStart(Callback):
    """Callback that profiles the layers at the start of training, and raises `_PlanReady`."""

    def __init__(
        self, strategy: PipelinePlanning, cluster: Cluster, factors: Sequence[float]
    ) -> None:
        self._strategy, self._cluster, self._factors = strategy, cluster, factors

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        options = self._strategy.options
        profile = profile_single_process(
            trainer,
            pl_module,
            path=options.module,
            split_batch=options.split_batch,
            config=options.profile,
            microbatches=options.num_microbatches(len(self._cluster.devices)),
            cluster=_with_limits(self._cluster, options),
            factors=self._factors,
        )
        raise _PlanReady(measured_plan(profile, options.plan_constraints, rank_zero_warn))


def _with_limits(cluster: Cluster, options: PlanningOptions) -> Cluster:
    """Return a cluster whose devices also have the memory limits of the strategy."""
    devices = []
    for rank, device in enumerate(cluster.devices):
        limits = (device.memory_limit, options.memory_limit_of(rank, len(cluster.devices)))
        least = min((limit for limit in limits if limit is not None), default=None)
        devices.append(replace(device, memory_limit=least))
    return replace(cluster, devices=tuple(devices))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlres plan",
        description="Show and save the pipeline plan of a config file. Other options override the "
        "config, as in `dlres fit`.",
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="as for `dlres fit`"
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="plan for the devices of this file instead of starting ranks on the local ones",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("plan.json"),
        metavar="FILE",
        help="file for the plan (default: %(default)s)",
    )
    return parser
