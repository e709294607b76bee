"""Memory footprint of every segment of consecutive layers, with and without recomputation.

The search asks about thousands of segments. So this module computes the sums of
`Workload.bound_bytes` as matrices over all segments at once, which takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.pipeline.plan.cost_model.costs import Workload

# Arrays of this module are either vectors over layers, or square matrices over segments: row is the
# first layer, column is the layer to stop before. `Matrix` has seconds, `Bytes` has bytes.
Matrix = NDArray[np.float64]
Bytes = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)


class Footprint:
    """Memory footprint of every segment of layers on every stage of a workload.

    Every matrix is over (first layer, layer to stop before). Entries of empty segments, with
    stop <= first, have no meaning.

    Args:
        workload: The model on its devices.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._num_layers = len(workload.layers)

    def busy_bytes_without_recompute(self, stage: int) -> Bytes:
        """Return the bound of a stage's bytes while micro-batches are in flight, without
        recomputation.

        It leaves out `Workload.idle_bytes`, which recomputation cannot free.
        """
        workload, layers = self.workload, self.workload.layers
        is_last, count = stage == workload.stages - 1, workload.in_flight(stage)
        saved = _sums(_bytes(layer.saved_bytes + layer.output_bytes for layer in layers))
        busy = self._static_bytes + count * saved
        if stage > 0:
            busy[:-1] += (1 + count) * _bytes(layer.input_bytes for layer in layers)[:, None]
        if not is_last:
            busy[:, 1:] += _bytes(layer.gradient_output_bytes for layer in layers)
        elif workload.schedule.whole_batch_loss:
            busy += workload.microbatches * workload.step.loss_bytes
        return busy

    def least_bytes(self, stage: int) -> Bytes:
        """Return the smallest `Workload.bound_bytes` that the option `recompute` allows.

        With "auto" every layer whose recomputation frees memory is recomputed, with "never" none,
        with "always" every layer.
        """
        inner, last = self._freed_bytes(stage)
        if self.workload.recompute == "never":
            inner, last = np.zeros_like(inner), np.zeros_like(last)
        if self.workload.recompute == "auto":
            inner, last = np.maximum(inner, 0), np.maximum(last, 0)
        freed = _sums(inner)
        # Column `stop` is a segment whose last layer is stop - 1.
        freed[:, 1:] += last - inner
        idle = np.maximum(self._loss_check_bytes(stage), self._update_bytes)
        peak: Bytes = np.maximum(self.busy_bytes_without_recompute(stage) - freed, idle)
        return peak

    def recompute_seconds(self, replica: int, stage: int) -> Matrix:
        """Return a lower bound of the recomputation that meets the memory limit, in seconds for one
        micro-batch.

        It is the fractional relaxation of the knapsack: the layers that cost the fewest seconds per
        freed byte are recomputed first, the last of them in part.
        """
        workload, kind = self.workload, self.workload.kind(replica, stage)
        layer_seconds = [
            workload.recompute_seconds(index, kind) for index in range(self._num_layers)
        ]
        limit = workload.memory_limit(stage)
        if workload.recompute == "always":
            return _sums(np.array(layer_seconds))
        seconds = np.zeros((self._num_layers + 1, self._num_layers + 1))
        if workload.recompute == "never" or limit is None:
            return seconds
        # Bytes that still must be freed, for every segment.
        need = np.maximum(self.busy_bytes_without_recompute(stage) - limit, 0).astype(np.float64)
        inner, last = self._freed_bytes(stage)
        # (seconds per freed byte, layer, stops of the segments in question, freed bytes).
        choices = [
            # A layer before the last one: segments that stop after the next layer or later.
            *(
                (layer_seconds[i] / size, i, slice(i + 2, None), size)
                for i, size in _positive(inner)
            ),
            # The last layer: segments that stop right after it.
            *(
                (layer_seconds[i] / size, i, slice(i + 1, i + 2), size)
                for i, size in _positive(last)
            ),
        ]
        for seconds_per_byte, index, stops, size in sorted(choices, key=lambda choice: choice[0]):
            freed = np.minimum(need[: index + 1, stops], size)
            need[: index + 1, stops] -= freed
            seconds[: index + 1, stops] += freed * seconds_per_byte
        return seconds

    def _freed_bytes(self, stage: int) -> tuple[Bytes, Bytes]:
        """Return the bytes by which `busy_bytes_without_recompute` falls if a layer is recomputed.

        Negative values are rises; see `Workload.freed_by_recompute`.

        Returns:
            Two vectors over layers: for a layer before the last one of its segment, and for the
            last layer, whose output is freed too.
        """
        layers, count = self.workload.layers, self.workload.in_flight(stage)
        saved = _bytes(layer.saved_bytes for layer in layers)
        output = _bytes(layer.output_bytes for layer in layers)
        inner: Bytes = (count - 1) * saved - output
        return inner, inner + count * output

    def _loss_check_bytes(self, stage: int) -> Bytes:
        """Return `Workload.loss_check_bytes` of every segment."""
        workload = self.workload
        has_no_check = workload.schedule.whole_batch_loss or workload.microbatches < 2
        if stage < workload.stages - 1 or has_no_check:
            return np.zeros((self._num_layers + 1, self._num_layers + 1), np.int64)
        loss_check, loss = self._resident_bytes.copy(), workload.step.loss_bytes
        output_and_loss = _bytes(layer.output_bytes + loss for layer in workload.layers)
        loss_check[:, 1:] += workload.microbatches * output_and_loss
        return loss_check

    @cached_property
    def _update_bytes(self) -> Bytes:
        """`Workload.update_bytes` of every segment."""
        step, layers = self.workload.step, self.workload.layers
        of_layer = _bytes(layer.update_bytes for layer in layers)
        temporary = np.zeros_like(self.trained_bytes)
        for first in range(self._num_layers):
            temporary[first, first + 1 :] = np.maximum.accumulate(of_layer[first:])
        temporary += np.ceil(step.update_bytes_per_byte * self.trained_bytes).astype(np.int64)
        update: Bytes = (
            self._resident_bytes - (step.gradient_copies - 1) * self.trained_bytes + temporary
        )
        return update

    @cached_property
    def _static_bytes(self) -> Bytes:
        """`Workload.static_bytes` of every segment."""
        workload = self.workload
        workspace = np.zeros((self._num_layers + 1, self._num_layers + 1), np.int64)
        of_layer = _bytes(layer.workspace_bytes for layer in workload.layers)
        saved = np.cumsum(
            _bytes(layer.saved_bytes + layer.output_bytes for layer in workload.layers)
        )
        # `Workload._workspace_bytes` of layers [first, stop) is the maximum over layers i of
        # of_layer[i] minus the saved bytes of the layers after i, saved[stop - 1] - saved[i].
        for first in range(self._num_layers):
            largest = np.maximum.accumulate(of_layer[first:] + saved[first:])
            workspace[first, first + 1 :] = largest - saved[first:]
        workspace[:, -1] = np.maximum(workspace[:, -1], workload.step.loss_bytes)
        static: Bytes = self._resident_bytes + workspace
        return static

    @cached_property
    def _resident_bytes(self) -> Bytes:
        """`Workload.resident_bytes` of every segment."""
        workload, layers = self.workload, self.workload.layers
        trained = self.trained_bytes
        weights = _sums(_bytes(layer.parameter_bytes for layer in layers)) + self._shared_bytes
        state = np.ceil(trained * workload.step.state_bytes_per_parameter_byte).astype(np.int64)
        batch = workload.microbatches * layers[0].input_bytes
        resident: Bytes = weights + workload.step.gradient_copies * trained + state + batch
        return resident

    @cached_property
    def trained_bytes(self) -> Bytes:
        """`Workload.trained_bytes` of every segment."""
        gradients = _bytes(layer.gradient_bytes for layer in self.workload.layers)
        trained: Bytes = _sums(gradients) + self._shared_bytes
        return trained

    @cached_property
    def _shared_bytes(self) -> Bytes:
        """Bytes of the shared parameters of every segment; each parameter counts once."""
        layers = self.workload.layers
        shared = np.zeros((self._num_layers + 1, self._num_layers + 1), np.int64)
        for name, size in {n: b for layer in layers for n, b in layer.shared.items()}.items():
            shared += size * (_sums(_bytes(name in layer.shared for layer in layers)) > 0)
        return shared


def smallest_limit(workload: Workload) -> int:
    """Return the smallest memory limit, in bytes and equal on every device, with which some plan
    fits."""
    footprint, count = Footprint(workload), len(workload.layers)
    is_empty = np.tri(count + 1, dtype=bool)
    # Smallest limit for the stages so far, by the layer where they stop.
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    for stage in range(workload.stages):
        least = np.where(is_empty, np.inf, footprint.least_bytes(stage))
        best = np.min(np.maximum(best[:, None], least), axis=0)
    return int(best[count])


def _bytes(values: Iterable[int]) -> Bytes:
    """Return one number of bytes per layer as a vector."""
    return np.fromiter(values, np.int64)


def _sums(values: NDArray[Number]) -> NDArray[Number]:
    """Return a matrix that has, for every segment, the sum of the values of its layers."""
    prefix = np.zeros(len(values) + 1, values.dtype)
    np.cumsum(values, out=prefix[1:])
    return prefix[None, :] - prefix[:, None]


def _positive(sizes: Bytes) -> Iterator[tuple[int, int]]:
    """Yield (index, size) of the positive sizes."""
    return ((index, int(size)) for index, size in enumerate(sizes) if size > 0)
