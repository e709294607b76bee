"""Costs of the user's layers, loss and optimizer on this rank's device.

The measurement restores weights, buffers, metrics and logs.
"""

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
from lightning_dlres.core.device.live_bytes import LiveBytes
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
    """Costs of a run on one device.

    Attributes:
        layers: Costs of each layer.
        loss: Seconds of the loss of one micro-batch, forward and backward.
        loss_bytes: Temporary memory of the loss of one micro-batch; see `StepCosts`.
        update: Seconds of the optimizer per byte of gradient.
        run_overhead_seconds: Extra seconds of a layer that is a run of its own; see `StepCosts`.
        wall_per_cpu_second: Ratio of wall time to processor time; all times above include it.
    """

    layers: list[LayerMeasurement]
    loss: float
    loss_bytes: int
    update: float
    run_overhead_seconds: float
    wall_per_cpu_second: float


def measure_device(
    model: ProfiledModel,
    samples: ProfileSamples,
    config: ProfileConfig,
    *,
    layer_context: Callable[[], AbstractContextManager[Any]],
    optimizers: Sequence[Optimizer],
    flusher: CpuCacheFlusher,
    limit: int | None,
    slowdown: float | None = None,
) -> tuple[DeviceMeasurement, Callable[[], None]]:
    """Measure the layers, the loss and the optimizer on this device.

    Args:
        model: The model to measure.
        samples: Samples to run.
        config: Options of the profile.
        layer_context: Returns a context manager for every forward (mixed precision).
        optimizers: Optimizers of the run.
        flusher: Flushes the CPU caches before the loss and the optimizer's step, as layers do in
            training.
        limit: Bytes that the measurement may take on the device; None: unknown.
        slowdown: Factor of an emulated slower device; None where nothing is emulated. With emulated
            speeds only processor time counts, since ranks may share a core.

    Returns:
        The measurement, and a function that keeps the device busy; see `measure_layers`.
    """
    clock, layer_runs, losses = ComputeClock(model.device, stretched=slowdown is None), [], []
    slowdown = slowdown or 1.0
    count = len(samples.inputs)
    for inputs, batch in zip(samples.inputs, samples.batches, strict=True):
        layers, output, load = measure_layers(
            model.modules,
            model.bind,
            inputs,
            model.device,
            layer_context,
            slowdown=slowdown,
            repeats=-(-config.repeats // count),
            seconds=config.seconds / count,
            clock=clock,
            limit=limit,
        )
        layer_runs.append(layers)
        losses.append(_measure_loss(model, batch, output, config.repeats, flusher))
    wall_per_cpu_second = clock.wall_per_cpu_second()
    weights = [p for module in model.modules for p in module.parameters()]
    update = max(
        (update_seconds(x, weights, clock, config.repeats, flusher) for x in optimizers),
        default=0.0,
    )
    run_overheads = [
        layer.run_overhead_seconds
        for layers in layer_runs
        for layer in layers
        if layer.run_overhead_seconds is not None
    ]
    measurement = DeviceMeasurement(
        [_mean(list(runs)) for runs in zip(*layer_runs, strict=True)],
        statistics.fmean(seconds for seconds, _ in losses) * wall_per_cpu_second * slowdown,
        max(nbytes for _, nbytes in losses),
        # Without `slowdown`: an emulated device does not stretch the optimizer's step.
        update * wall_per_cpu_second,
        # At least 0: the difference of two times may be smaller than their noise.
        max(statistics.fmean(run_overheads), 0.0) if run_overheads else 0.0,
        wall_per_cpu_second,
    )
    return measurement, load


def median_measurement(rounds: Sequence[DeviceMeasurement]) -> DeviceMeasurement:
    """Return the median of every time over several measurements of one device.

    The sizes of layers are those of the first measurement, and `loss_bytes` is the largest one.
    """
    layers = [
        replace(
            layer_rounds[0],
            forward=_median(layer.forward for layer in layer_rounds),
            backward=_median(layer.backward for layer in layer_rounds),
        )
        for layer_rounds in zip(*(x.layers for x in rounds), strict=True)
    ]
    return DeviceMeasurement(
        layers,
        statistics.median(x.loss for x in rounds),
        max(x.loss_bytes for x in rounds),
        statistics.median(x.update for x in rounds),
        statistics.median(x.run_overhead_seconds for x in rounds),
        statistics.median(x.wall_per_cpu_second for x in rounds),
    )


def _measure_loss(
    model: ProfiledModel, batch: Any, output: Tree, repeats: int, flusher: CpuCacheFlusher
) -> tuple[float, int]:
    """Return the seconds (of a `ComputeClock`) and the temporary bytes of the loss of one batch.

    The loss is the part of the user's step after the pipelined module's call, with its backward.
    Both are 0 if user code cannot run outside of training.
    """
    clock, rewind_random_state = ComputeClock(model.device), rng.rewinder(model.device)
    leaves = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), output)
    differentiable = [t for t in tensors_of(leaves) if t.requires_grad]
    differentiable += [p for p in model.non_pipelined if p.device == model.device]
    loss_seconds, live = [], LiveBytes()
    try:
        with torch.enable_grad():
            for run in range(repeats + 1):
                step = model.start_loss(batch)
                flusher.overwrite()
                start = clock.now()
                # Bytes are counted in the warm-up run: counting takes time. This run works on a
                # copy of the output, since `loss_bytes` includes one.
                with live if run == 0 else nullcontext():
                    leaves_copy = map_tensors(Tensor.clone, leaves) if run == 0 else leaves
                    loss = step.finish(leaves_copy, None, [samples_in(batch) or 1])
                    del leaves_copy
                    if loss is not None and loss.requires_grad and differentiable:
                        torch.autograd.grad(loss, differentiable, allow_unused=True)
                if run:
                    loss_seconds.append(clock.now() - start)
                step.restore_metrics()
    except Exception as error:
        model.warn(
            f"dlres: the loss could not be timed before training ({type(error).__name__}: "
            f"{error}). The plan assumes that it takes no time."
        )
        return 0.0, 0
    finally:
        rewind_random_state()
    return statistics.fmean(loss_seconds), live.peak


def _mean(runs: list[LayerMeasurement]) -> LayerMeasurement:
    """Return the mean times and the largest sizes of one layer over several micro-batches."""
    return LayerMeasurement(
        statistics.fmean(run.forward for run in runs),
        statistics.fmean(run.backward for run in runs),
        Sizes(*(max(column) for column in zip(*(run.sizes for run in runs), strict=True))),
    )


def _median(seconds: Iterable[float]) -> float:
    """Return the median; NaN if any value is NaN: the layer did not fit into memory once."""
    values = list(seconds)
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)
