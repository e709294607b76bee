"""From a LightningModule and its data to a plan: profile the layers on every rank, then split in
proportion to power."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_dlres import _compat
from lightning_dlres.core import rng
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.tree import Tree
from lightning_dlres.pipeline.cluster import measure_layers, powers_of
from lightning_dlres.pipeline.plan import LayerProfile, PipelinePlan
from lightning_dlres.pipeline.planner import proportional_split
from lightning_dlres.strategies.capture import PipelinedModule
from lightning_dlres.strategies.connection import Connection
from lightning_dlres.strategies.step import LightningStep, StepContext

Machines = tuple[tuple[int, ...], ...]


def require_layers(pipelined: PipelinedModule, stages: int) -> None:
    """Raise unless every stage can get a layer.

    Raises:
        ConfigError: fewer layers than stages.
    """
    count = len(pipelined.layers.modules)
    if count < stages:
        kind = type(pipelined.module).__name__
        raise ConfigError(
            f"The pipelined module {pipelined.path!r} ({kind}) has {count} "
            f"layer{'s' if count != 1 else ''}, expected at least one for each of the {stages} "
            f"stages. Use devices={count}, HeteroPipeStrategy(stages={count}), or put more layers "
            "into one nn.Sequential."
        )


def adopt_plan(given: PipelinePlan, pipelined: PipelinedModule, world_size: int) -> PipelinePlan:
    """Return a plan that was given, completed with the model's layers.

    Raises:
        ConfigError: it is for another model or another number of ranks.
    """
    names, sizes = pipelined.layers.names, pipelined.layers.parameter_bytes()
    if given.world_size != world_size:
        raise ConfigError(
            f"plan: got a plan for {given.world_size} ranks, expected one for {world_size}. Plan "
            "again."
        )
    if sum(given.split) != len(names):
        raise ConfigError(
            f"plan: got split {list(given.split)} for {sum(given.split)} layers, but "
            f"{pipelined.path!r} has {len(names)}. Edit the split, or plan again."
        )
    known = tuple(layer.name for layer in given.layers)
    if known and known != names:
        raise ConfigError(
            f"plan: got a plan for layers {list(known)}, but the model's are {list(names)}. Plan "
            "again."
        )
    layers = given.layers or tuple(LayerProfile(n, s) for n, s in zip(names, sizes, strict=True))
    return PipelinePlan(
        machines=given.machines, split=given.split, layers=layers, powers=given.powers
    )


def measured_plan(
    pipelined: PipelinedModule,
    machines: Machines,
    inputs: Tree,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
    slowdown: float,
    connection: Connection,
) -> PipelinePlan:
    """Measure every layer on every rank (E1), and split in proportion to power (E2); called by all
    ranks.

    Args:
        inputs: what the first layer is called with, for a few samples.
    """
    layers, mine = pipelined.layers, list[float]()
    for turn in range(connection.world_size):
        # CPU ranks may share cores: one at a time. Other devices are their ranks' own.
        if turn == (connection.rank if device.type == "cpu" else 0):
            mine = measure_layers(layers.modules, pipelined.bind, inputs, device, context, slowdown)
        connection.any_rank(False)
    seconds = connection.gather(mine)
    powers = powers_of(seconds)
    best = seconds[powers.index(max(powers))]
    return _split(pipelined, machines, best, powers)


def unmeasured_plan(pipelined: PipelinedModule, machines: Machines) -> PipelinePlan:
    """Split by parameter bytes, as if all devices were alike; where there is nothing to measure
    with."""
    return _split(pipelined, machines, None, ())


def _split(
    pipelined: PipelinedModule,
    machines: Machines,
    seconds: Sequence[float] | None,
    powers: Sequence[float],
) -> PipelinePlan:
    sizes = pipelined.layers.parameter_bytes()
    times = list(seconds) if seconds is not None else [0.0] * len(sizes)
    stage_powers = [
        min((powers[m[s]] for m in machines), default=1.0) if powers else 1.0
        for s in range(len(machines[0]))
    ]
    split = proportional_split(
        seconds if seconds is not None else [float(s) for s in sizes], stage_powers
    )
    profiles = tuple(
        LayerProfile(n, b, t) for n, b, t in zip(pipelined.layers.names, sizes, times, strict=True)
    )
    return PipelinePlan(machines=machines, split=split, layers=profiles, powers=tuple(powers))


def profiling_inputs(trainer: Trainer, context: StepContext, samples: int) -> Tree:
    """Return what the first layer would be called with for a few training samples; on one rank.

    The samples come straight from the dataset, beside the loader, and random state is put back, so
    that training sees the same batches as without profiling.
    """
    saved = rng.snapshot(context.device)
    try:
        batch = _few_samples(_compat.train_loader(trainer), samples)
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.strategy.batch_to_device(batch, torch.device("cpu"))
        takes_index = len(inspect.signature(context.module.training_step).parameters) > 1
        with torch.no_grad():
            inputs = LightningStep(context, (batch, 0) if takes_index else (batch,)).module_inputs()
        return inputs
    finally:
        rng.restore(saved, context.device)


def _few_samples(loader: Any, samples: int) -> Any:
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and callable(collate):
        count = min(samples, len(dataset), getattr(loader, "batch_size", None) or samples)
        return collate([dataset[index] for index in range(count)])
    return next(iter(loader))
