"""What memory demands of every run of layers at once: how little of it could do, and how long must
be recomputed to meet the limit.

The sums of `Workload.bound_bytes` as matrices over (first, stop), since the planner asks about
thousands of runs: they tell in milliseconds where none fits."""

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
    """The memory of every run of layers on every stage of a workload. Entries of empty runs mean
    nothing."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._count = len(workload.layers)

    def whole(self, stage: int) -> Bytes:
        """Return the peak of a step where nothing is recomputed."""
        workload, layers = self.workload, self.workload.layers
        last, count = stage == workload.stages - 1, workload.in_flight(stage)
        kept = _sums(_bytes(layer.saved_bytes + layer.output_bytes for layer in layers))
        found = self._static + count * kept
        if stage > 0:
            found[:-1] += (1 + count) * _bytes(layer.input_bytes for layer in layers)[:, None]
        if not last:
            found[:, 1:] += _bytes(layer.gradient_output_bytes for layer in layers)
        elif workload.schedule.whole_batch_loss:
            found += workload.microbatches * workload.step.loss_bytes
        return found

    def least(self, stage: int) -> Bytes:
        """Return the peak where all is recomputed that frees memory; under "never" nothing is,
        under "always" everything."""
        inner, last = self._freed(stage)
        if self.workload.recompute == "never":
            inner, last = np.zeros_like(inner), np.zeros_like(last)
        if self.workload.recompute == "auto":
            inner, last = np.maximum(inner, 0), np.maximum(last, 0)
        freed = _sums(inner)
        freed[:, 1:] += last - inner
        apart = np.maximum(self._check(stage), self._update)
        found: Bytes = np.maximum(self.whole(stage) - freed, apart)
        return found

    def seconds(self, replica: int, stage: int) -> Matrix:
        """Return seconds for one micro-batch that no recomputation within the limit falls short of:
        those of the cheapest layers per byte, the last of them in part."""
        workload, kind = self.workload, self.workload.kind(replica, stage)
        again = [workload.recompute_seconds(index, kind) for index in range(self._count)]
        limit = workload.limit(stage)
        if workload.recompute == "always":
            return _sums(np.array(again))
        found = np.zeros((self._count + 1, self._count + 1))
        if workload.recompute == "never" or limit is None:
            return found
        need = np.maximum(self.whole(stage) - limit, 0).astype(np.float64)
        inner, last = self._freed(stage)
        choices = [
            *((again[i] / size, i, slice(i + 2, None), size) for i, size in _positive(inner)),
            *((again[i] / size, i, slice(i + 1, i + 2), size) for i, size in _positive(last)),
        ]
        for each, index, stops, size in sorted(choices, key=lambda choice: choice[0]):
            part = np.minimum(need[: index + 1, stops], size)
            need[: index + 1, stops] -= part
            found[: index + 1, stops] += part * each
        return found

    def _freed(self, stage: int) -> tuple[Bytes, Bytes]:
        """Return by how many bytes the peak falls if a layer is recomputed: within a run, and at
        its end, where its output is freed, too."""
        layers, count = self.workload.layers, self.workload.in_flight(stage)
        saved = _bytes(layer.saved_bytes for layer in layers)
        output = _bytes(layer.output_bytes for layer in layers)
        inner: Bytes = (count - 1) * saved - output
        return inner, inner + count * output

    def _check(self, stage: int) -> Bytes:
        """Return `Workload.check_bytes` of every run."""
        workload = self.workload
        whole = workload.schedule.whole_batch_loss
        if stage < workload.stages - 1 or whole or workload.microbatches < 2:
            return np.zeros((self._count + 1, self._count + 1), np.int64)
        found, loss = self._resident.copy(), workload.step.loss_bytes
        outputs = _bytes(layer.output_bytes + loss for layer in workload.layers)
        found[:, 1:] += workload.microbatches * outputs
        return found

    @cached_property
    def _update(self) -> Bytes:
        """`Workload.update_bytes` of every run."""
        step, layers = self.workload.step, self.workload.layers
        own, moment = _bytes(layer.update_bytes for layer in layers), np.zeros_like(self.trained)
        for first in range(self._count):
            moment[first, first + 1 :] = np.maximum.accumulate(own[first:])
        moment += np.ceil(step.update_bytes_per_byte * self.trained).astype(np.int64)
        found: Bytes = self._resident - (step.gradient_copies - 1) * self.trained + moment
        return found

    @cached_property
    def _static(self) -> Bytes:
        workload = self.workload
        workspace = np.zeros((self._count + 1, self._count + 1), np.int64)
        own = _bytes(layer.workspace_bytes for layer in workload.layers)
        kept = np.cumsum(
            _bytes(layer.saved_bytes + layer.output_bytes for layer in workload.layers)
        )
        for first in range(self._count):
            most = np.maximum.accumulate(own[first:] + kept[first:])
            workspace[first, first + 1 :] = most - kept[first:]
        workspace[:, -1] = np.maximum(workspace[:, -1], workload.step.loss_bytes)
        found: Bytes = self._resident + workspace
        return found

    @cached_property
    def _resident(self) -> Bytes:
        workload, layers = self.workload, self.workload.layers
        trained = self.trained
        weights = _sums(_bytes(layer.parameter_bytes for layer in layers)) + self._shared
        state = np.ceil(trained * workload.step.state_bytes_per_parameter_byte).astype(np.int64)
        batch = workload.microbatches * layers[0].input_bytes
        found: Bytes = weights + workload.step.gradient_copies * trained + state + batch
        return found

    @cached_property
    def trained(self) -> Bytes:
        """`Workload.trained_bytes` of every run."""
        gradients = _bytes(layer.gradient_bytes for layer in self.workload.layers)
        found: Bytes = _sums(gradients) + self._shared
        return found

    @cached_property
    def _shared(self) -> Bytes:
        layers = self.workload.layers
        shared = np.zeros((self._count + 1, self._count + 1), np.int64)
        for name, size in {n: b for layer in layers for n, b in layer.shared.items()}.items():
            shared += size * (_sums(_bytes(name in layer.shared for layer in layers)) > 0)
        return shared


def smallest_limit(workload: Workload) -> int:
    """Return the least memory that, given to every device, has a plan."""
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
    """Return the sum over every run of layers."""
    prefix = np.zeros(len(values) + 1, values.dtype)
    np.cumsum(values, out=prefix[1:])
    return prefix[None, :] - prefix[:, None]


def _positive(sizes: Bytes) -> Iterator[tuple[int, int]]:
    return ((index, int(size)) for index, size in enumerate(sizes) if size > 0)
