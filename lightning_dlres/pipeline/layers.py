"""The profile of a model's layers on this device (Method E, E5): seconds forward and backward,
bytes in, out, kept, and needed for a moment.

Layers are run one by one on copies, by the very code that runs them in training, so that weights,
buffers and random state stay as they were, and no device needs room for more than one layer. Layers
that are alike are measured once."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import LiveBytes
from lightning_dlres.core.rng import forked
from lightning_dlres.core.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.partition import initialise
from lightning_dlres.pipeline.stage import GradientBuffer, Stage

Bind = Callable[[int, nn.Module], Callable[[Tree], Tree]]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class LayerMeasurement:
    """One layer on one device, under one micro-batch; see `LayerProfile` for the sizes."""

    forward: float
    backward: float
    input_bytes: int
    output_bytes: int
    gradient_output_bytes: int
    saved_bytes: int
    workspace_bytes: int


def measure_layers(
    modules: Sequence[nn.Module],
    bind: Bind,
    inputs: Tree,
    device: torch.device,
    context: Context,
    slowdown: float = 1.0,
    repeats: int = 5,
    seconds: float = 0.0,
) -> tuple[list[LayerMeasurement], Tree]:
    """Measure every layer on this device.

    Args:
        modules: the layers; on the CPU or the meta device.
        bind: makes a callable of a layer's index and its copy.
        inputs: what the first layer is called with; later layers get their predecessor's output.
        device: where to compute.
        context: entered around every forward (mixed precision).
        slowdown: factor of an emulated slower device.
        repeats: least number of runs of a layer that count, after one run to warm up.
        seconds: least time over which all layers together are measured. A device that is throttled
            shows its sustained speed only over a while.

    Returns:
        The measurements, and the output of the last layer (detached).
    """
    found: dict[Any, LayerMeasurement] = {}
    outputs: dict[Any, Tree] = {}
    order, clock = [], Clock(device)
    activation = map_tensors(lambda t: t.to(device), inputs)
    with torch.enable_grad():
        for index, module in enumerate(modules):
            key = _likeness(module, activation)
            order.append(key)
            if key not in found:
                runner = _Runner(module, bind, index, activation, device, context)
                share = seconds / len(modules)
                found[key] = runner.measure(clock, repeats, share)
                outputs[key] = runner.output
            activation = outputs[key]
    pace = clock.pace() * slowdown
    return [_scaled(found[key], pace) for key in order], activation


class Clock:
    """Seconds of computing. On a CPU that is shared or throttled, a short run may see no pause at
    all and a long one several: processor time is measured for each layer, and stretched by how much
    longer all took together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_processor = device.type == "cpu" and torch.get_num_threads() == 1
        self._wall = self._counted = 0.0

    def now(self) -> tuple[float, float]:
        """Return the time on the wall, and the time that counts."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        wall = time.perf_counter()
        return wall, time.process_time() if self._by_processor else wall

    def between(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        """Return the counted seconds between two times, and add them up for the pace."""
        self._wall += end[0] - start[0]
        self._counted += end[1] - start[1]
        return end[1] - start[1]

    def pace(self) -> float:
        """Return by how much the counted seconds must be stretched."""
        return max(self._wall / self._counted, 1.0) if self._counted > 0 else 1.0


class _Runner:
    """Runs one layer forward and backward, as a stage does."""

    def __init__(
        self,
        module: nn.Module,
        bind: Bind,
        index: int,
        inputs: Tree,
        device: torch.device,
        context: Context,
    ) -> None:
        replica = _replica(module, device)
        parameters = [p for p in replica.parameters() if p.requires_grad]
        self._stage = Stage([bind(index, replica)], [parameters], index, device, context)
        self._own = {_storage(t) for t in (*replica.parameters(), *replica.buffers())}
        self._inputs, self._device = inputs, device
        self.output: Tree = None

    def measure(self, clock: Clock, repeats: int, seconds: float) -> LayerMeasurement:
        with forked(self._device):
            sizes = self._sizes()
            forward, backward, start = list[float](), list[float](), time.perf_counter()
            while len(forward) < repeats or time.perf_counter() - start < seconds:
                inputs = map_tensors(_copy, self._inputs)
                begin = clock.now()
                output = self._stage.forward(0, inputs, 0)
                middle = clock.now()
                gradients = _ones(output)
                resumed = clock.now()
                self._stage.backward(0, gradients, GradientBuffer(once=True))
                end = clock.now()
                forward.append(clock.between(begin, middle))
                backward.append(clock.between(resumed, end))
        return LayerMeasurement(_typical(forward), _typical(backward), *sizes)

    def _sizes(self) -> tuple[int, int, int, int, int]:
        """Run once, to warm up and to see what is kept."""
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[_storage(tensor)] = _storage_bytes(tensor)
            return tensor

        live = LiveBytes()
        inputs = map_tensors(_copy, self._inputs)
        with live:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = self._stage.forward(0, inputs, 0)
            kept, buffer = live.now, GradientBuffer(once=True)
            gradients = _ones(output)
            self._stage.backward(0, gradients, buffer)
        entered, left = tensors_of(inputs), tensors_of(output)
        known = self._own | {_storage(t) for t in (*entered, *left)}
        self.output = map_tensors(_detached, output)
        own = sum(size for storage, size in saved.items() if storage not in known)
        gradient_bytes = sum(_bytes(g) for g in buffer.gradients.values())
        # What backward leaves behind is counted elsewhere: the parameters' gradients.
        return (
            _distinct_bytes(entered),
            _distinct_bytes(left),
            _distinct_bytes([t for t in left if t.requires_grad]),
            own,
            max(live.peak - kept, gradient_bytes),
        )


def _typical(times: Sequence[float]) -> float:
    return statistics.median(times)


def _scaled(measured: LayerMeasurement, pace: float) -> LayerMeasurement:
    sizes = (
        measured.input_bytes,
        measured.output_bytes,
        measured.gradient_output_bytes,
        measured.saved_bytes,
        measured.workspace_bytes,
    )
    return LayerMeasurement(measured.forward * pace, measured.backward * pace, *sizes)


def _likeness(module: nn.Module, inputs: Tree) -> Any:
    """Return what two layers have in common that cost the same: their make, and the shapes of what
    they hold and get."""
    made = tuple(
        (name, type(child).__qualname__, type(child).__module__, child.extra_repr())
        for name, child in module.named_modules()
    )
    held = tuple(
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*module.named_parameters(), *module.named_buffers())
    )
    given = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_of(inputs))
    return made, held, given


def _replica(module: nn.Module, device: torch.device) -> nn.Module:
    replica = copy.deepcopy(module)
    with forked(device):
        for name, child in replica.named_modules():
            initialise(child, device, name)
    return replica.to(device).train()


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy that a layer may work on in place."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _ones(output: Tree) -> list[Tensor | None]:
    return [torch.ones_like(t) if t.requires_grad else None for t in tensors_of(output)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else _bytes(tensor)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _distinct_bytes(tensors: Sequence[Tensor]) -> int:
    return sum({_storage(t): _bytes(t) for t in tensors}.values())
