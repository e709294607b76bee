"""Memory footprint of every segment of consecutive layers, with and without recomputation.

The planner asks about thousands of segments. So the sums of `Workload.bound_bytes` are matrices
over (first, stop), which show in milliseconds where no segment fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.pipeline.plan.cost_model.costs import Workload

Matrix = NDArray[np.float64]
Bytes = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)


class Footprint:
    """Memory footprint of every segment of layers on every stage of a workload.

    Every matrix is over (first layer, layer to stop before). Entries of empty segments, with
    stop <= first, have no meaning.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._count = len(workload.layers)

    def without_recompute(self, stage: int) -> Bytes:
        """Return the peak bytes of a step without recomputation."""
        workload, layers = self.workload, self.workload.layers
        last, count = stage == workload.stages - 1, workload.in_flight(stage)
        saved = _sums(_bytes(layer.saved_bytes + layer.output_bytes for layer in layers))
        peak = self._static + count * saved
        if stage > 0:
            peak[:-1] += (1 + count) * _bytes(layer.input_bytes for layer in layers)[:, None]
        if not last:
            peak[:, 1:] += _bytes(layer.gradient_output_bytes for layer in layers)
        elif workload.schedule.whole_batch_loss:
            peak += workload.microbatches * workload.step.loss_bytes
        return peak

    def least(self, stage: int) -> Bytes:
        """Return the smallest peak bytes: with all recomputation that frees memory.

        With recompute "never" nothing is recomputed, with "always" every layer.
        """
        inner, last = self._freed(stage)
        if self.workload.recompute == "never":
            inner, last = np.zeros_like(inner), np.zeros_like(last)
        if self.workload.recompute == "auto":
            inner, last = np.maximum(inner, 0), np.maximum(last, 0)
        freed = _sums(inner)
        freed[:, 1:] += last - inner
        idle = np.maximum(self._loss_check(stage), self._update)
        peak: Bytes = np.maximum(self.without_recompute(stage) - freed, idle)
        return peak

    def seconds(self, replica: int, stage: int) -> Matrix:
        """Return a lower bound of the recomputation that meets the memory limit, in seconds for one
        micro-batch.

        It recomputes the cheapest layers per freed byte, the last of them in part.
        """
        workload, kind = self.workload, self.workload.kind(replica, stage)
        layer_seconds = [workload.recompute_seconds(index, kind) for index in range(self._count)]
        limit = workload.memory_limit(stage)
        if workload.recompute == "always":
            return _sums(np.array(layer_seconds))
        seconds = np.zeros((self._count + 1, self._count + 1))
        if workload.recompute == "never" or limit is None:
            return seconds
        need = np.maximum(self.without_recompute(stage) - limit, 0).astype(np.float64)
        inner, last = self._freed(stage)
        choices = [
            # A layer within a segment, which stops after the next layer at the earliest.
            *(
                (layer_seconds[i] / size, i, slice(i + 2, None), size)
                for i, size in _positive(inner)
            ),
            # The last layer of a segment.
            *(
                (layer_seconds[i] / size, i, slice(i + 1, i + 2), size)
                for i, size in _positive(last)
            ),
        ]
        for seconds_per_byte, index, stops, size in sorted(choices, key=lambda choice: choice[0]):
            part = np.minimum(need[: index + 1, stops], size)
            need[: index + 1, stops] -= part
            seconds[: index + 1, stops] += part * seconds_per_byte
        return seconds

    def _freed(self, stage: int) -> tuple[Bytes, Bytes]:
        """Return the bytes by which the peak falls if a layer is recomputed: within a segment, and
        as its last layer, whose output is freed too."""
        layers, count = self.workload.layers, self.workload.in_flight(stage)
        saved = _bytes(layer.saved_bytes for layer in layers)
        output = _bytes(layer.output_bytes for layer in layers)
        inner: Bytes = (count - 1) * saved - output
        return inner, inner + count * output

    def _loss_check(self, stage: int) -> Bytes:
        """Return `Workload.loss_check_bytes` of every segment."""
        workload = self.workload
        is_unchecked = workload.schedule.whole_batch_loss or workload.microbatches < 2
        if stage < workload.stages - 1 or is_unchecked:
            return np.zeros((self._count + 1, self._count + 1), np.int64)
        held, loss = self._resident.copy(), workload.step.loss_bytes
        outputs = _bytes(layer.output_bytes + loss for layer in workload.layers)
        held[:, 1:] += workload.microbatches * outputs
        return held

    @cached_property
    def _update(self) -> Bytes:
        """`Workload.update_bytes` of every segment."""
        step, layers = self.workload.step, self.workload.layers
        own, temporary = _bytes(layer.update_bytes for layer in layers), np.zeros_like(self.trained)
        for first in range(self._count):
            temporary[first, first + 1 :] = np.maximum.accumulate(own[first:])
        temporary += np.ceil(step.update_bytes_per_byte * self.trained).astype(np.int64)
        held: Bytes = self._resident - (step.gradient_copies - 1) * self.trained + temporary
        return held

    @cached_property
    def _static(self) -> Bytes:
        """`Workload.static_bytes` of every segment."""
        workload = self.workload
        workspace = np.zeros((self._count + 1, self._count + 1), np.int64)
        own = _bytes(layer.workspace_bytes for layer in workload.layers)
        saved = np.cumsum(
            _bytes(layer.saved_bytes + layer.output_bytes for layer in workload.layers)
        )
        for first in range(self._count):
            most = np.maximum.accumulate(own[first:] + saved[first:])
            workspace[first, first + 1 :] = most - saved[first:]
        workspace[:, -1] = np.maximum(workspace[:, -1], workload.step.loss_bytes)
        static: Bytes = self._resident + workspace
        return static

    @cached_property
    def _resident(self) -> Bytes:
        """`Workload.resident_bytes` of every segment."""
        workload, layers = self.workload, self.workload.layers
        trained = self.trained
        weights = _sums(_bytes(layer.parameter_bytes for layer in layers)) + self._shared
        state = np.ceil(trained * workload.step.state_bytes_per_parameter_byte).astype(np.int64)
        batch = workload.microbatches * layers[0].input_bytes
        resident: Bytes = weights + workload.step.gradient_copies * trained + state + batch
        return resident

    @cached_property
    def trained(self) -> Bytes:
        """`Workload.trained_bytes` of every segment."""
        gradients = _bytes(layer.gradient_bytes for layer in self.workload.layers)
        trained: Bytes = _sums(gradients) + self._shared
        return trained

    @cached_property
    def _shared(self) -> Bytes:
        """Bytes of the shared parameters of every segment; each parameter counts once."""
        layers = self.workload.layers
        shared = np.zeros((self._count + 1, self._count + 1), np.int64)
        for name, size in {n: b for layer in layers for n, b in layer.shared.items()}.items():
            shared += size * (_sums(_bytes(name in layer.shared for layer in layers)) > 0)
        return shared


def smallest_limit(workload: Workload) -> int:
    """Return the smallest memory limit, in bytes and equal for every device, that has a plan."""
    footprint, count = Footprint(workload), len(workload.layers)
    empty = np.tri(count + 1, dtype=bool)
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    for stage in range(workload.stages):
        least = np.where(empty, np.inf, footprint.least(stage))
        best = np.min(np.maximum(best[:, None], least), axis=0)
    return int(best[count])


def _bytes(values: Iterable[int]) -> Bytes:
    return np.fromiter(values, np.int64)


def _sums(values: NDArray[Number]) -> NDArray[Number]:
    """Return the sum over every segment of layers."""
    prefix = np.zeros(len(values) + 1, values.dtype)
    np.cumsum(values, out=prefix[1:])
    return prefix[None, :] - prefix[:, None]


def _positive(sizes: Bytes) -> Iterator[tuple[int, int]]:
    return ((index, int(size)) for index, size in enumerate(sizes) if size > 0)
