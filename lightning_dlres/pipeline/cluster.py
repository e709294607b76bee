"""Compute power of every rank (Method E, E1), measured on the model's own layers.

Layers are timed one by one on copies, so that weights, buffers and random state stay as they were,
and no device needs room for more than one layer.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core.rng import forked
from lightning_dlres.core.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.partition import initialise

Bind = Callable[[int, nn.Module], Callable[[Tree], Tree]]


def measure_layers(
    modules: Sequence[nn.Module],
    bind: Bind,
    inputs: Tree,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
    slowdown: float = 1.0,
    repeats: int = 5,
) -> list[float]:
    """Return the seconds of one forward and backward of every layer on this device.

    Args:
        modules: the layers; on the CPU or the meta device.
        bind: makes a callable of a layer's index and its copy.
        inputs: what the first layer is called with; later layers get their predecessor's output.
        device: where to compute.
        context: entered around every forward (mixed precision).
        slowdown: factor of an emulated slower device.
        repeats: the fastest of so many runs counts, after one run to warm up.
    """
    seconds = []
    activation = map_tensors(lambda t: t.to(device), inputs)
    for index, module in enumerate(modules):
        replica = _replica(module, device)
        layer = bind(index, replica)
        parameters = [p for p in replica.parameters() if p.requires_grad]
        times = []
        with forked(device):
            for _ in range(repeats + 1):
                start = time.perf_counter()
                output = _run(layer, activation, parameters, context)
                _synchronise(device)
                times.append(time.perf_counter() - start)
        seconds.append(min(times[1:]) * slowdown)
        activation = map_tensors(Tensor.detach, output)
    return seconds


def powers_of(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Return the compute power of each rank relative to the fastest, from its seconds for every
    layer.

    A rank's power is the median over layers of (fastest rank's seconds / its seconds), so that one
    disturbed measurement does not make a device look slow.
    """
    totals = [sum(row) for row in seconds]
    best = seconds[totals.index(min(totals))]
    raw = [
        statistics.median([b / s for b, s in zip(best, row, strict=True) if s > 0] or [1.0])
        for row in seconds
    ]
    return [power / max(raw) for power in raw]


def _replica(module: nn.Module, device: torch.device) -> nn.Module:
    replica = copy.deepcopy(module)
    with forked(device):
        for name, child in replica.named_modules():
            initialise(child, device, name)
    return replica.to(device).train()


def _run(
    layer: Callable[[Tree], Tree],
    inputs: Tree,
    parameters: list[nn.Parameter],
    context: Callable[[], AbstractContextManager[Any]],
) -> Tree:
    def leaf(tensor: Tensor) -> Tensor:
        return (
            tensor.detach().clone().requires_grad_(tensor.is_floating_point() and tensor.dim() > 0)
        )

    leaves = map_tensors(leaf, inputs)
    with torch.enable_grad(), context():
        # `+ 0` because a layer may work in place, which a leaf does not allow.
        output = layer(map_tensors(lambda t: t + 0 if t.requires_grad else t, leaves))
    outputs = [t for t in tensors_of(output) if t.requires_grad]
    wanted = [t for t in tensors_of(leaves) if t.requires_grad] + parameters
    if outputs and wanted:
        torch.autograd.grad(
            outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True
        )
    return output


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
