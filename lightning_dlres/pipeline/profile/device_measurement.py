"""What the user's own layers, loss and optimizer cost on this device (Method E, E1, E5).

Weights, buffers, metrics and logs stay as they were."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dlres.core import rng
from lightning_dlres.core._compat import LiveBytes
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.profile.config import ProfileConfig, ProfileSamples
from lightning_dlres.pipeline.profile.cpu_cache import CpuCacheFlusher
from lightning_dlres.pipeline.profile.layer_sizes import Sizes
from lightning_dlres.pipeline.profile.layer_times import (
    ComputeClock,
    LayerMeasurement,
    measure_layers,
)
from lightning_dlres.pipeline.profile.optimizer_costs import update_seconds
from lightning_dlres.pipeline.profile.profiled_model import ProfiledModel
from lightning_dlres.pipeline.stage.microbatch import samples_in


@dataclass(frozen=True)
class DeviceMeasurement:
    """What a run costs on one device.

    Attributes:
        layers: what each layer costs.
        loss: seconds of the loss of one micro-batch, forward and backward.
        loss_bytes: what it needs for a moment.
        update: seconds that the optimizer takes for a byte of a gradient.
        run_overhead_seconds: extra seconds of a layer that is a run of its own, forward and
            backward.
        wall_per_cpu_second: ratio of wall time to processor time.
    """

    layers: list[LayerMeasurement]
    loss: float
    loss_bytes: int
    update: float
    run_overhead_seconds: float
    wall_per_cpu_second: float


def measure(
    model: ProfiledModel,
    samples: ProfileSamples,
    config: ProfileConfig,
    layer_context: Callable[[], AbstractContextManager[Any]],
    optimizers: Sequence[Optimizer],
    caches: CpuCacheFlusher,
    limit: int | None,
    slowdown: float | None = None,
) -> tuple[DeviceMeasurement, Callable[[], None]]:
    """Return what the layers, the loss and the optimizer cost on this device, and what keeps it
    busy afterwards.

    Args:
        model, samples, config, layer_context, optimizers: see `Profiler`.
        caches: they are cold where training finds them so.
        limit: bytes that the device has.
        slowdown: where speeds are emulated, with one rank for each core or not: then processor time
            counts alone.
    """
    clock, runs, losses = ComputeClock(model.device, stretched=slowdown is None), [], []
    slowdown = slowdown or 1.0
    count = len(samples.inputs)
    for inputs, batch in zip(samples.inputs, samples.batches, strict=True):
        layers, output, again = measure_layers(
            model.modules,
            model.bind,
            inputs,
            model.device,
            layer_context,
            slowdown,
            -(-config.repeats // count),
            config.seconds / count,
            clock,
            limit,
        )
        runs.append(layers)
        losses.append(_measure_loss(model, batch, output, config.repeats, caches))
    wall_per_cpu_second = clock.wall_per_cpu_second()
    weights = [p for module in model.modules for p in module.parameters()]
    update = max(
        (update_seconds(each, weights, clock, config.repeats, caches) for each in optimizers),
        default=0.0,
    )
    run_overheads = [
        layer.run_overhead_seconds
        for layers in runs
        for layer in layers
        if layer.run_overhead_seconds is not None
    ]
    found = DeviceMeasurement(
        [_mean(list(alike)) for alike in zip(*runs, strict=True)],
        statistics.fmean(seconds for seconds, _ in losses) * wall_per_cpu_second * slowdown,
        max(nbytes for _, nbytes in losses),
        update * wall_per_cpu_second,
        # Where two times differ by less than their noise.
        max(statistics.fmean(run_overheads), 0.0) if run_overheads else 0.0,
        wall_per_cpu_second,
    )
    return found, again


def typical(rounds: Sequence[DeviceMeasurement]) -> DeviceMeasurement:
    """Return the median of every time."""
    layers = [
        replace(
            alike[0],
            forward=_median(layer.forward for layer in alike),
            backward=_median(layer.backward for layer in alike),
        )
        for alike in zip(*(found.layers for found in rounds), strict=True)
    ]
    return DeviceMeasurement(
        layers,
        statistics.median(found.loss for found in rounds),
        max(found.loss_bytes for found in rounds),
        statistics.median(found.update for found in rounds),
        statistics.median(found.run_overhead_seconds for found in rounds),
        statistics.median(found.wall_per_cpu_second for found in rounds),
    )


def _measure_loss(
    model: ProfiledModel, batch: Any, output: Tree, repeats: int, caches: CpuCacheFlusher
) -> tuple[float, int]:
    """Return the counted seconds of the step from the module's call on, forward and backward, and
    the bytes that it needs; zeros where user code cannot be run outside of training."""
    clock, rewind_random_state = ComputeClock(model.device), rng.held(model.device)
    leaves = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), output)
    wanted = [t for t in tensors_of(leaves) if t.requires_grad]
    wanted += [p for p in model.non_pipelined if p.device == model.device]
    spent, live = [], LiveBytes()
    try:
        with torch.enable_grad():
            for run in range(repeats + 1):
                step = model.start_loss(batch)
                caches.overwrite()
                start = clock.now()
                # Counting bytes takes time: in the run that warms up.
                with live if run == 0 else nullcontext():
                    given = map_tensors(Tensor.clone, leaves) if run == 0 else leaves
                    loss = step.finish(given, None, [samples_in(batch) or 1])
                    del given
                    if loss.requires_grad and wanted:
                        torch.autograd.grad(loss, wanted, allow_unused=True)
                if run:
                    spent.append(clock.now() - start)
                step.undo_metrics()
    except Exception as error:
        model.warn(
            f"dlres: the loss could not be timed before training ({type(error).__name__}: "
            f"{error}); the plan counts it as nothing."
        )
        return 0.0, 0
    finally:
        rewind_random_state()
    return statistics.fmean(spent), live.peak


def _mean(runs: list[LayerMeasurement]) -> LayerMeasurement:
    return LayerMeasurement(
        statistics.fmean(run.forward for run in runs),
        statistics.fmean(run.backward for run in runs),
        Sizes(*(max(column) for column in zip(*(run.sizes for run in runs), strict=True))),
    )


def _median(seconds: Iterable[float]) -> float:
    """Return the median; NaN if some are, as of a layer for which there was no room at a time."""
    found = list(seconds)
    return math.nan if any(map(math.isnan, found)) else statistics.median(found)
