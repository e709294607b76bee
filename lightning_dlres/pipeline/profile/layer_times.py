"""The profile of a model's layers on this device (Method E, E5): seconds forward and backward,
bytes in, out, kept, and needed for a moment.

Layers are run one by one on copies, by the very code that runs them in training, so that weights,
buffers and random state stay as they were, and no device needs room for more than one layer; of one
for which there is no room either, the sizes are found without running it. Layers that are alike are
measured once: on several copies if they are small, since a single one would find its weights in the
cache, and those of a whole stage are not there. Copies that fit behind each other are measured as
one run of a stage, and each as a run of its own: the difference is the overhead of
a run."""

from __future__ import annotations

import copy
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import LiveBytes
from lightning_dlres.core.rng import forked
from lightning_dlres.core.wire.tree import Tree, flatten, map_tensors, tensors_of
from lightning_dlres.pipeline.profile.cpu_cache import COLD_BYTES
from lightning_dlres.pipeline.profile.layer_sizes import (
    Bind,
    Context,
    LayerCall,
    SavedTensorBytes,
    Sizes,
    bytes_of,
    sizes_without_storage,
)
from lightning_dlres.pipeline.stage.initialise import initialise
from lightning_dlres.pipeline.stage.stage import GradientBuffer, Stage

_log = logging.getLogger(__name__)

# Of a RuntimeError, as torch has no class for it where the CPU's memory is not enough.
_ALLOCATOR_OF_THE_CPU = "DefaultCPUAllocator"
# Weights and inputs of which a layer makes more than so many times their bytes are not expected:
# where there is room for that, it is not looked at more closely.
_AMPLE = 32


@dataclass(frozen=True)
class LayerMeasurement:
    """One layer on one device, under one micro-batch. The seconds are NaN where there is no room
    for the layer. `run_overhead_seconds` is its extra time, forward and backward, as a run of its
    own; None where it was not measured in both ways."""

    forward: float
    backward: float
    sizes: Sizes
    run_overhead_seconds: float | None = None


def measure_layers(
    modules: Sequence[nn.Module],
    bind: Bind,
    inputs: Tree,
    device: torch.device,
    context: Context,
    slowdown: float = 1.0,
    repeats: int = 5,
    seconds: float = 0.0,
    clock: ComputeClock | None = None,
    limit: int | None = None,
) -> tuple[list[LayerMeasurement], Tree, Callable[[], None]]:
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
        clock: adds up what is spent; None: one of its own.
        limit: bytes that the device has. A layer that needs more is not run, if that can be known
            without its values; it has no times then.

    Returns:
        The measurements; the output of the last layer (detached); and what runs the costliest kind
        of layer once more, to keep the device as busy as in training.
    """
    kinds: dict[Any, _Kind] = {}
    order, clock = [], clock or ComputeClock(device)
    activation = map_tensors(lambda t: t.to(device), inputs)
    with torch.enable_grad(), forked(device):
        for index, module in enumerate(modules):
            key = _likeness(module, activation)
            if key not in kinds:
                held = sum(kind.sizes.output_bytes for kind in kinds.values())
                room = None if limit is None else limit - held
                call = LayerCall(module, bind, index, activation, device, context)
                kinds[key] = _sized(call, room)
            order.append(kinds[key])
            activation = kinds[key].output
        for kind in filter(lambda kind: kind.fits, kinds.values()):
            # As many copies as a core's caches do not hold.
            copies = max(min(order.count(kind), COLD_BYTES // max(kind.held_bytes, 1)), 1)
            share = seconds * order.count(kind) / len(modules)
            try:
                _time(kind, copies, clock, repeats, share)
            except RuntimeError as error:
                if not is_lack_of_memory(error):
                    raise
                kind.fits = False
    wall_per_cpu_second = clock.wall_per_cpu_second() * slowdown
    fitting = [kind for kind in order if kind.fits]
    costliest = max(
        fitting, key=lambda kind: (kind.forward + kind.backward) * order.count(kind), default=None
    )
    load = _Load(costliest.call if costliest else None)
    return [kind.measurement(wall_per_cpu_second) for kind in order], activation, load


@dataclass(eq=False)
class _Kind:
    """Layers that are alike: the first one and its call, what it returns, and what it costs.
    `held_bytes` is what a copy takes while it is measured."""

    call: LayerCall
    output: Tree
    sizes: Sizes
    fits: bool
    held_bytes: int = 0
    forward: float = math.nan
    backward: float = math.nan
    run_overhead_seconds: float | None = None

    @property
    def fits_behind_itself(self) -> bool:
        """Whether the layer can be called with what it returns."""
        given, returned = (
            (structure, [(t.shape, t.dtype, t.requires_grad) for t in tensors])
            for structure, tensors in map(flatten, (self.call.inputs, self.output))
        )
        # Numbers that are no floats mean something: another layer's need not be valid here.
        return given == returned and all(t.is_floating_point() for t in tensors_of(self.output))

    def measurement(self, wall_per_cpu_second: float) -> LayerMeasurement:
        run_overhead_seconds = (
            None
            if self.run_overhead_seconds is None
            else self.run_overhead_seconds * wall_per_cpu_second
        )
        return LayerMeasurement(
            self.forward * wall_per_cpu_second,
            self.backward * wall_per_cpu_second,
            self.sizes,
            run_overhead_seconds,
        )


def _sized(call: LayerCall, limit: int | None) -> _Kind:
    """Run a layer once for its sizes, or, where there is no room, find them without running it."""
    held = {*call.module.parameters(), *call.module.buffers(), *tensors_of(call.inputs)}
    if limit is not None and _AMPLE * bytes_of(held) > limit:
        try:
            zeros, sizes, need = sizes_without_storage(call)
        except Exception as error:
            # It asks for values, or does what FakeTensor does not know: running it will tell.
            _log.debug("layer %d is run without knowing what it needs: %s", call.index, error)
        else:
            if need > limit:
                return _Kind(call, zeros(), sizes, fits=False)
    try:
        output, sizes, taken = _Runner(call).sizes()
        return _Kind(call, output, sizes, fits=True, held_bytes=taken)
    except RuntimeError as error:
        if not is_lack_of_memory(error):
            raise
    zeros, sizes, _ = sizes_without_storage(call)
    return _Kind(call, zeros(), sizes, fits=False)


def is_lack_of_memory(error: Exception) -> bool:
    """Return whether a device or the host had no room."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        type(error) is RuntimeError and _ALLOCATOR_OF_THE_CPU in str(error)
    )


class ComputeClock:
    """Seconds of computing. On a CPU that is shared or throttled, a short run may see no pause at
    all and a long one several: processor time is measured for each layer, and stretched by how much
    longer all took together, if `stretched`. Linux pauses a throttled process when it asks for
    its processor time, that is, between measurements; so this needs a clock of its own."""

    def __init__(self, device: torch.device, stretched: bool = True) -> None:
        self.device = device
        self._stretched = stretched
        self._by_processor = device.type == "cpu" and torch.get_num_threads() == 1
        self._wall = self._busy = 0.0

    def now(self) -> float:
        """Return the time that counts."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.process_time() if self._by_processor else time.perf_counter()

    @contextmanager
    def pacing(self) -> Iterator[None]:
        """Compare processor time with time on the wall; nothing may be waited for inside."""
        wall, busy = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._wall += time.perf_counter() - wall
            self._busy += time.process_time() - busy

    def wall_per_cpu_second(self) -> float:
        """Return by how much the counted seconds must be stretched."""
        known = self._stretched and self._by_processor and self._busy > 0
        return max(self._wall / self._busy, 1.0) if known else 1.0


class _Runner:
    """Runs a copy of a layer forward and backward, or several one behind the other, as a stage
    does."""

    def __init__(self, call: LayerCall, copies: Sequence[nn.Module] | None = None) -> None:
        copies = copies or [_module_copy(call.module, call.device)]
        parameters = [[p for p in each.parameters() if p.requires_grad] for each in copies]
        bound = [call.bind(call.index, each) for each in copies]
        self._stage = Stage(
            bound,
            parameters,
            first_layer=call.index,
            device=call.device,
            context=call.context,
        )
        self._held = [t for each in copies for t in (*each.parameters(), *each.buffers())]
        self._inputs = call.inputs
        self._buffer = GradientBuffer()

    def forward(self, clock: ComputeClock) -> float:
        """Run the layer forward; return the seconds."""
        inputs = map_tensors(_copy, self._inputs)
        begin = clock.now()
        output = self._stage.forward(0, inputs, 0)
        spent = clock.now() - begin
        self._gradients = _ones(output)
        return spent

    def backward(self, clock: ComputeClock) -> float:
        """Run it backward, adding to the gradients of before; return the seconds."""
        begin = clock.now()
        self._stage.backward(0, self._gradients, self._buffer)
        return clock.now() - begin

    def sizes(self) -> tuple[Tree, Sizes, int]:
        """Run once, and return the output, detached; the sizes; and what a copy of the layer takes
        while it is measured."""
        saved, live = SavedTensorBytes(), LiveBytes()
        inputs = map_tensors(_copy, self._inputs)
        with live:
            with saved.recorded():
                output = self._stage.forward(0, inputs, 0)
            kept, buffer = live.now, GradientBuffer()
            gradients = _ones(output)
            self._stage.backward(0, gradients, buffer)
        # What backward leaves behind is counted elsewhere: the parameters' gradients.
        gradient_bytes = bytes_of(buffer.gradients.values())
        moment = max(live.peak - kept, gradient_bytes)
        sizes = saved.sizes(self._held, tensors_of(inputs), tensors_of(output), moment)
        held = bytes_of(self._held) + gradient_bytes + sum(sizes[:4])
        return map_tensors(_detached, output), sizes, held


class _Load:
    """Runs a layer forward and backward, which is made only if it is called at all."""

    def __init__(self, call: LayerCall | None) -> None:
        self._call = call
        self._runner: _Runner | None = None

    def __call__(self) -> None:
        if self._call is None:
            return
        device = self._call.device
        clock = ComputeClock(device)
        with torch.enable_grad(), forked(device):
            self._runner = self._runner or _Runner(self._call)
            self._runner.forward(clock)
            self._runner.backward(clock)


def _time(kind: _Kind, copies: int, clock: ComputeClock, repeats: int, seconds: float) -> None:
    """Measure a kind of layer on so many copies: as one run, as in a stage, if they fit behind each
    other; then each as a run of its own."""
    module_copies = [_module_copy(kind.call.module, kind.call.device) for _ in range(copies)]
    alone = [_Runner(kind.call, [module_copy]) for module_copy in module_copies]
    if copies == 1 or not kind.fits_behind_itself:
        kind.forward, kind.backward = _rounds(alone, clock, repeats, seconds)
        return
    run = [_Runner(kind.call, module_copies)]
    forward, backward = _rounds(run, clock, repeats, seconds / 2)
    kind.forward, kind.backward = forward / copies, backward / copies
    kind.run_overhead_seconds = (
        sum(_rounds(alone, clock, repeats, seconds / 2)) - kind.forward - kind.backward
    )


def _rounds(
    runners: Sequence[_Runner], clock: ComputeClock, repeats: int, seconds: float
) -> tuple[float, float]:
    """Return the mean seconds forward and backward of what runs one after the other, first all
    forward and then all backward, as the layers of a stage do."""

    def turn(counting: ComputeClock) -> tuple[list[float], list[float]]:
        there = [runner.forward(counting) for runner in runners]
        return there, [runner.backward(counting) for runner in reversed(runners)]

    turn(ComputeClock(clock.device))  # to warm up
    forward, backward, start = list[float](), list[float](), time.perf_counter()
    with clock.pacing():
        while len(forward) < repeats or time.perf_counter() - start < seconds:
            there, back = turn(clock)
            forward += there
            backward += back
    # Not medians: what a throttled processor loses with every pause is in the longest runs only.
    return statistics.fmean(forward), statistics.fmean(backward)


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


def _module_copy(module: nn.Module, device: torch.device) -> nn.Module:
    module_copy = copy.deepcopy(module)
    with forked(device):
        for name, child in module_copy.named_modules():
            initialise(child, device, name)
    return module_copy.to(device).train()


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy that a layer may work on in place."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _ones(output: Tree) -> list[Tensor | None]:
    return [torch.ones_like(t) if t.requires_grad else None for t in tensors_of(output)]
