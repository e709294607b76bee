"""Times and sizes of a model's layers on this device: seconds forward and backward, and bytes.

Copies of the layers run one by one, with the code that runs layers in training. Weights, buffers
and random state stay as they were, and a device needs memory for one layer only. If that layer
still does not fit, its sizes are computed without running it.

Equal layers are measured once. Small layers are measured on several copies: a single copy would
find its weights in the CPU cache, which cannot hold the weights of a whole stage. If the output of
a copy is a valid input of the next, the copies are timed twice: together as one run (see
`stage.stage`), and each as a run of its own. The difference is the overhead of a run.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lightning_dlres.core.device.live_bytes import LiveBytes
from lightning_dlres.core.rng import forked
from lightning_dlres.core.wire.tree import Tree, flatten, map_tensors, tensors_of
from lightning_dlres.pipeline.profile.cpu_cache import FLUSH_BYTES
from lightning_dlres.pipeline.profile.layer_sizes import (
    Bind,
    Context,
    LayerCall,
    SavedTensorBytes,
    Sizes,
    bytes_of,
    sizes_without_storage,
)
from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer
from lightning_dlres.pipeline.stage.initialise import initialised_copy
from lightning_dlres.pipeline.stage.layer_errors import explaining_single_samples, is_lack_of_memory
from lightning_dlres.pipeline.stage.microbatch import samples_in
from lightning_dlres.pipeline.stage.stage import Stage

_log = logging.getLogger(__name__)

# A layer is assumed to need at most this many times the bytes of its weights and inputs. If the
# device has less memory than that, the layer's need is computed before the layer is run.
_AMPLE_MEMORY_FACTOR = 32
# Part of the message of the RuntimeError that torch.func raises in a forward that is recorded.
_REFUSES_RECORDING = "support saved tensor hooks"


@dataclass(frozen=True)
class LayerMeasurement:
    """Costs of one layer on one device for one micro-batch.

    Attributes:
        forward: Seconds of forward; NaN if the layer does not fit into memory.
        backward: Seconds of backward; NaN if the layer does not fit into memory.
        sizes: Bytes of the layer.
        run_overhead_seconds: Extra seconds, forward and backward, as a run of its own; None if the
            layer was not timed both within a longer run and alone.
    """

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
    *,
    slowdown: float = 1.0,
    repeats: int = 5,
    seconds: float = 0.0,
    clock: ComputeClock | None = None,
    limit: int | None = None,
) -> tuple[list[LayerMeasurement], Tree, Callable[[], None]]:
    """Measure every layer on this device.

    Args:
        modules: The layers, on the CPU or the meta device.
        bind: Returns the callable for a layer's index and a copy of its module.
        inputs: Inputs of the first layer. Each later layer receives its predecessor's output.
        device: Device to measure on.
        context: Returns a context manager for every forward (mixed precision).
        slowdown: Factor of an emulated slower device.
        repeats: Minimum number of timed runs of a layer, after one run to warm up.
        seconds: Minimum time over which all layers together are measured. A throttled device shows
            its sustained speed only over a while.
        clock: Clock that measures, and adds up wall and processor time; None makes one.
        limit: Bytes that the measurement may take on the device; None: unknown. A layer that is
            known to need more is not run, and has no times.

    Returns:
        The measurements; the detached output of the last layer; and a function that runs the
        costliest kind of layer once more, to keep the device as busy as in training.
    """
    kinds: dict[Any, _LayerKind] = {}
    layer_kinds, clock = [], clock or ComputeClock(device)
    activation = map_tensors(lambda t: t.to(device), inputs)
    with torch.enable_grad(), forked(device):
        for index, module in enumerate(modules):
            # The last member of a list returns less than the others.
            role = getattr(bind(index, module), "role", "")
            key = role, _kind_key(module, activation)
            if key not in kinds:
                held_outputs = sum(kind.sizes.output_bytes for kind in kinds.values())
                free = None if limit is None else limit - held_outputs
                call = LayerCall(module, bind, index, activation, device, context)
                with explaining_single_samples(samples_in(inputs) == 1):
                    kinds[key] = _measure_sizes(call, free)
            layer_kinds.append(kinds[key])
            activation = kinds[key].output
        for kind in filter(lambda kind: kind.fits, kinds.values()):
            # Enough copies to fill a core's caches, but no more than the model has of this layer.
            copies = max(min(layer_kinds.count(kind), FLUSH_BYTES // max(kind.held_bytes, 1)), 1)
            kind_seconds = seconds * layer_kinds.count(kind) / len(modules)
            try:
                _measure_times(kind, copies, clock, repeats, kind_seconds)
            except RuntimeError as error:
                if not is_lack_of_memory(error):
                    raise
                kind.fits = False
    wall_per_cpu_second = clock.wall_per_cpu_second() * slowdown
    fitting = [kind for kind in layer_kinds if kind.fits]
    costliest = max(
        fitting,
        key=lambda kind: (kind.forward + kind.backward) * layer_kinds.count(kind),
        default=None,
    )
    load = _Load(costliest.call if costliest else None)
    return [kind.measurement(wall_per_cpu_second) for kind in layer_kinds], activation, load


@dataclass(eq=False)
class _LayerKind:
    """Kind of equal layers: the call and the output of the first one, and their costs.

    Attributes:
        fits: Whether a copy fits into memory, so that it can be timed.
        held_bytes: Bytes that a copy takes while it is timed.
    """

    call: LayerCall
    output: Tree
    sizes: Sizes
    fits: bool
    held_bytes: int = 0
    forward: float = math.nan
    backward: float = math.nan
    run_overhead_seconds: float | None = None

    @property
    def can_follow_itself(self) -> bool:
        """True if the layer accepts its own output as input."""
        accepted, returned = (
            (structure, [(t.shape, t.dtype, t.requires_grad) for t in tensors])
            for structure, tensors in map(flatten, (self.call.inputs, self.output))
        )
        # Integers such as token ids have a meaning: those of an output may be invalid as inputs.
        return accepted == returned and all(t.is_floating_point() for t in tensors_of(self.output))

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


def _measure_sizes(call: LayerCall, limit: int | None) -> _LayerKind:
    """Run a layer once for its sizes; without enough memory, find them without running it."""
    tensors = {*call.module.parameters(), *call.module.buffers(), *tensors_of(call.inputs)}
    if limit is not None and _AMPLE_MEMORY_FACTOR * bytes_of(tensors) > limit:
        try:
            zeros, sizes, needed_bytes = sizes_without_storage(call)
        except Exception as error:
            # The layer reads values, or FakeTensor lacks an operation: its need stays unknown.
            _log.debug("layer %d is run without knowing its memory need: %s", call.index, error)
        else:
            if needed_bytes > limit:
                return _LayerKind(call, zeros(), sizes, fits=False)
    try:
        output, sizes, held_bytes = _Runner(call).sizes()
        return _LayerKind(call, output, sizes, fits=True, held_bytes=held_bytes)
    except RuntimeError as error:
        if not is_lack_of_memory(error):
            raise
    zeros, sizes, _ = sizes_without_storage(call)
    return _LayerKind(call, zeros(), sizes, fits=False)


class ComputeClock:
    """Clock of compute time, which is fair on a CPU that is shared or throttled.

    On such a CPU a short run may see no pause at all, and a long one several. So each layer is
    measured in processor time, and the result is stretched by the ratio of wall time to processor
    time of all runs together. Linux pauses a throttled process at the system call that reads its
    processor time. Such pauses fall between two measurements, so `pacing` takes the ratio over many
    measurements at once.

    Args:
        device: Device that computes.
        stretched: Whether to stretch processor time; off where speeds are emulated.
    """

    def __init__(self, device: torch.device, stretched: bool = True) -> None:
        self.device = device
        self._stretched = stretched
        self._by_processor = device.type == "cpu" and torch.get_num_threads() == 1
        self._wall = self._busy = 0.0

    def now(self) -> float:
        """Return the current time in seconds: processor time on one CPU thread, else wall time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.process_time() if self._by_processor else time.perf_counter()

    @contextmanager
    def pacing(self) -> Iterator[None]:
        """Context manager that compares processor time with wall time; no code inside may wait."""
        wall, busy = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._wall += time.perf_counter() - wall
            self._busy += time.process_time() - busy

    def wall_per_cpu_second(self) -> float:
        """Return the factor that turns measured seconds into wall time; at least 1."""
        is_known = self._stretched and self._by_processor and self._busy > 0
        return max(self._wall / self._busy, 1.0) if is_known else 1.0


class _Runner:
    """Runs one copy of a layer, or several copies in a row, as a stage runs its layers."""

    def __init__(self, call: LayerCall, copies: Sequence[nn.Module] | None = None) -> None:
        copies = copies or [initialised_copy(call.module, call.device)]
        parameters = [[p for p in each.parameters() if p.requires_grad] for each in copies]
        bound = [call.bind(call.index, each) for each in copies]
        self._stage = Stage(
            bound,
            parameters,
            first_layer=call.index,
            device=call.device,
            context=call.context,
        )
        self._weights = [t for each in copies for t in (*each.parameters(), *each.buffers())]
        self._inputs = call.inputs
        self._buffer = GradientBuffer()

    def forward(self, clock: ComputeClock) -> float:
        """Run forward; return the seconds."""
        inputs = map_tensors(_copy, self._inputs)
        begin = clock.now()
        output = self._stage.forward(0, inputs, 0)
        spent = clock.now() - begin
        self._gradients = _ones(output)
        return spent

    def backward(self, clock: ComputeClock) -> float:
        """Run backward, adding to earlier gradients; return the seconds."""
        begin = clock.now()
        self._stage.backward(0, self._gradients, self._buffer)
        return clock.now() - begin

    def sizes(self) -> tuple[Tree, Sizes, int]:
        """Run once; return the detached output, the sizes, and the bytes of a copy while it is
        timed."""
        saved, live = SavedTensorBytes(), LiveBytes()
        inputs = map_tensors(_copy, self._inputs)
        with live:
            output = self._recorded_forward(inputs, saved)
            if output is None:
                # All memory that the layer keeps then counts as saved.
                before = live.now
                output = self._stage.forward(0, inputs, 0)
                saved.add_unseen(live.now - before - bytes_of(tensors_of(output)))
            live_after_forward, buffer = live.now, GradientBuffer()
            gradients = _ones(output)
            self._stage.backward(0, gradients, buffer)
        # The planner counts one copy of the gradients, which stays after backward. Every later
        # backward makes a second one before it is added, so the workspace holds at least that.
        gradient_bytes = bytes_of(buffer.gradients.values())
        workspace_bytes = max(live.peak - live_after_forward, gradient_bytes)
        sizes = saved.sizes(self._weights, tensors_of(inputs), tensors_of(output), workspace_bytes)
        # The workspace is freed after backward. Only the copy that runs has one.
        held_bytes = bytes_of(self._weights) + gradient_bytes + sum(sizes) - workspace_bytes
        return map_tensors(_detached, output), sizes, held_bytes

    def _recorded_forward(self, inputs: Tree, saved: SavedTensorBytes) -> Tree | None:
        """Run forward, and record the tensors that autograd saves; None if the layer refuses it."""
        try:
            with saved.recording():
                return self._stage.forward(0, inputs, 0)
        except RuntimeError as error:
            if _REFUSES_RECORDING not in str(error):
                raise
        self._stage.drop_records()
        return None


class _Load:
    """Load that keeps a device busy: each call runs a layer forward and backward.

    The first call makes a copy of the layer. Without a layer, calls do nothing.
    """

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


def _measure_times(
    kind: _LayerKind, copies: int, clock: ComputeClock, repeats: int, seconds: float
) -> None:
    """Time a kind of layer on this many copies: together as one run, if the layer can follow
    itself, and each copy as a run of its own."""
    module, device = kind.call.module, kind.call.device
    module_copies = [initialised_copy(module, device) for _ in range(copies)]
    alone = [_Runner(kind.call, [module_copy]) for module_copy in module_copies]
    if copies == 1 or not kind.can_follow_itself:
        kind.forward, kind.backward = _mean_seconds(alone, clock, repeats, seconds)
        return
    one_run = [_Runner(kind.call, module_copies)]
    forward, backward = _mean_seconds(one_run, clock, repeats, seconds / 2)
    kind.forward, kind.backward = forward / copies, backward / copies
    kind.run_overhead_seconds = (
        sum(_mean_seconds(alone, clock, repeats, seconds / 2)) - kind.forward - kind.backward
    )


def _mean_seconds(
    runners: Sequence[_Runner], clock: ComputeClock, repeats: int, seconds: float
) -> tuple[float, float]:
    """Return the mean seconds of a runner's forward and of its backward.

    Each round runs all forwards, then all backwards, as a stage runs its layers.
    """

    def one_round(clock: ComputeClock) -> tuple[list[float], list[float]]:
        forwards = [runner.forward(clock) for runner in runners]
        return forwards, [runner.backward(clock) for runner in reversed(runners)]

    one_round(ComputeClock(clock.device))  # warm-up
    forward, backward, start = list[float](), list[float](), time.perf_counter()
    with clock.pacing():
        while len(forward) < repeats or time.perf_counter() - start < seconds:
            forwards, backwards = one_round(clock)
            forward += forwards
            backward += backwards
    # Means, not medians: a median would leave out the few runs that a throttled processor pauses.
    return statistics.fmean(forward), statistics.fmean(backward)


def _kind_key(module: nn.Module, inputs: Tree) -> Any:
    """Return a key that is equal for layers of equal cost.

    It has the classes and settings of their modules, the shapes of weights and inputs, and the
    plain values among the inputs.
    """
    modules = tuple(
        (name, type(child).__qualname__, type(child).__module__, child.extra_repr())
        for name, child in module.named_modules()
    )
    weights = tuple(
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*module.named_parameters(), *module.named_buffers())
    )
    structure, tensors = flatten(inputs)
    shapes = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
    return modules, weights, shapes, msgspec.msgpack.encode(structure)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy that a layer may change in place."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _ones(output: Tree) -> list[Tensor | None]:
    return [torch.ones_like(t) if t.requires_grad else None for t in tensors_of(output)]
