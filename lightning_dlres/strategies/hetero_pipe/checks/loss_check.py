"""Is the loss a mean over samples? 1F1B computes it per micro-batch, which is exact only then.

Padded-token means, sums and contrastive losses are not. So a real batch's loss, its gradient and
what is logged are computed both ways, and a difference is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dlres.core import rng
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.execute.digest import digest
from lightning_dlres.pipeline.plan.schedules.gpipe import GPipe
from lightning_dlres.pipeline.stage.microbatch import cut
from lightning_dlres.strategies.hetero_pipe.replay.attributes import (
    changed_lists,
    drawn_from,
    not_sent,
)
from lightning_dlres.strategies.hetero_pipe.replay.logs import LogRecord, merge_parts
from lightning_dlres.strategies.hetero_pipe.replay.printing import PRINTED
from lightning_dlres.strategies.hetero_pipe.step.user_step import LightningStep

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_COARSE = 2e-2


def why_not_by_parts(
    make_step: Callable[[], LightningStep],
    output: Tree,
    sizes: Sequence[int],
    compares_values: bool = True,
) -> str | None:
    """Return why the step cannot be computed micro-batch by micro-batch; None if it can.

    Args:
        make_step: returns a fresh step over the batch.
        output: the module's output for the whole batch.
        sizes: samples of every micro-batch.
        compares_values: whether all runs must leave the same on the module.

    Metrics and random state are left as they were.
    """
    whole = make_step()
    name = whole.context.metrics.unmergeable()
    if name is not None:
        return f"the metric {name!r} cannot be put together from parts of a batch"
    rewind_random_state = rng.held(whole.context.device)
    try:
        loss, gradients, logs = _whole(whole, output, sizes)
        reason = _once_per_batch(whole)
        if reason is not None:
            return reason
        metrics = whole.context.metrics
        measured, drawn = metrics.snapshot(), digest(rng.snapshot(whole.context.device))
        whole.undo_metrics()
        parts = make_step()
        try:
            part_loss, unlike_gradient, part_logs = _parts(parts, output, sizes, gradients)
        except Exception as error:
            return f"training_step fails on a micro-batch ({type(error).__name__}: {error})"
        part_drawn, part_measured = digest(rng.snapshot(whole.context.device)), metrics.part()
        whole.undo_metrics()
        metrics.merge([part_measured])
        unlike = metrics.unlike(measured)
    finally:
        whole.undo_metrics()
        rewind_random_state()
    reason = _loss_difference(loss, part_loss) or unlike_gradient
    runs = [*whole.effects, *parts.effects]
    if reason is None and compares_values:
        reason = why_values_vary(runs)
    reason = reason or _log_difference(logs, part_logs)
    if reason is None and unlike is not None:
        return f"the metric {unlike!r} is another one for the batch than from its micro-batches"
    generators = drawn_from(whole.changed_attributes) | drawn_from(parts.changed_attributes)
    draws = [{path: run.get(path) for path in generators} for run in runs]
    if reason is None and (part_drawn != drawn or any(run != draws[0] for run in draws)):
        return "training_step draws other random numbers for a batch than for a micro-batch"
    return reason


def why_no_longer_by_parts(
    records: Sequence[Tree], logs: Sequence[Sequence[LogRecord]]
) -> str | None:
    """Return what a step did that was computed micro-batch by micro-batch, and should not have
    been; None if nothing. A step may do so in a few batches only, which no check has met."""
    names = [[record.name for record in part] for part in logs]
    other = next((other for other in names if other != names[0]), None)
    if other is not None:
        return f"training_step logged {names[0]} for one micro-batch and {other} for another"
    for record in records:
        once = record["once"]
        reason = _why_once(once["lists"], once["buffers"], [], record["logger"], once["kept"])
        if reason is not None:
            return reason
    return None


def why_values_vary(runs: Sequence[Mapping[str, int]]) -> str | None:
    """Return what runs of a step leave otherwise, by the numbers of their changes; None if
    nothing."""
    for other in runs:
        for path in sorted(runs[0].keys() | other.keys()):
            if runs[0].get(path) == other.get(path):
                continue
            if path == PRINTED:
                return "training_step prints other text for every micro-batch"
            where = f"self.{path}" if path else "an attribute"
            return f"training_step leaves other values in {where} for every micro-batch"
    return None


def _once_per_batch(step: LightningStep) -> str | None:
    extra = [str(key) for key in step.extra or ()]
    lists = changed_lists(step.changed_attributes)
    kept = sorted(not_sent(step.changed_attributes))
    return _why_once(lists, step.changed_buffers, sorted(extra), step.logger_calls[-1], kept)


def _why_once(
    lists: Sequence[str],
    buffers: Sequence[str],
    extra: Sequence[str],
    logged: Sequence[Any],
    kept: Sequence[str],
) -> str | None:
    if lists:
        return f"training_step adds to the list self.{lists[0]}, once per batch"
    if buffers:
        return f"training_step changes the buffer {buffers[0]!r}, once per batch"
    if extra:
        return f"training_step returns {extra[0]!r} beside the loss, for the whole batch"
    if kept:
        return f"training_step makes a new object for self.{kept[0]}, once per batch"
    if logged:
        return "training_step calls the logger itself, once per batch"
    return None


def _whole(
    step: LightningStep, output: Tree, sizes: Sequence[int]
) -> tuple[Tensor, list[Tensor | None], list[LogRecord]]:
    leaves = _leaves(output)
    loss = step.finish(_used(leaves), None, sizes)
    return loss.detach(), _gradients(loss, leaves), step.logs[0]


def _parts(
    step: LightningStep, output: Tree, sizes: Sequence[int], whole: Sequence[Tensor | None]
) -> tuple[Tensor, str | None, list[LogRecord]]:
    """Return the loss, how its gradient differs from that of the whole batch, and the logs.

    Gradients are compared piece by piece, so that no second whole one is held."""
    losses, comparison = [], _Comparison(whole, sizes)
    for m, piece in enumerate(cut(output, sizes)):
        leaves = _leaves(piece)
        loss = step.finish(_used(leaves), m, sizes) * (sizes[m] / sum(sizes))
        losses.append(loss.detach())
        comparison.add(m, _gradients(loss, leaves))
    total = torch.stack(losses).sum()
    return total, comparison.difference(total), merge_parts(step.logs, sizes)


class _Comparison:
    """Compares the gradient of a batch's loss with those of its micro-batches as they come."""

    def __init__(self, whole: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        self._whole = whole
        self._pieces = cut(list(whole), sizes)
        self._squared_errors: list[float | Tensor] = [0.0] * len(whole)
        self._reaches_alike = True

    def add(self, m: int, parts: Sequence[Tensor | None]) -> None:
        """Take in the gradients of micro-batch m."""
        for index, (piece, part) in enumerate(zip_longest(self._pieces[m], parts)):
            if piece is not None and part is not None:
                error = torch.linalg.vector_norm(piece - part).double()
                self._squared_errors[index] += error.square()
            elif piece is not None or part is not None:
                self._reaches_alike = False

    def difference(self, loss: Tensor) -> str | None:
        """Return how they differ; None if they do not."""
        if not self._reaches_alike:
            return (
                "its gradient reaches other outputs for the whole batch than for its micro-batches"
            )
        tolerance = _TOLERANCE.get(loss.dtype, _COARSE)
        for gradient, squared_error in zip(self._whole, self._squared_errors, strict=True):
            if gradient is None:
                continue
            limit = 10 * max(tolerance, _TOLERANCE.get(gradient.dtype, _COARSE))
            norm = float(torch.linalg.vector_norm(gradient))
            # Of what is not finite (a loss scaled too far) nothing can be said; a part that is not,
            # of a gradient that is, differs.
            if math.isfinite(norm) and not float(squared_error) ** 0.5 <= limit * norm:
                return "its gradient for the whole batch is not that of its micro-batches"
        return None


def _leaves(output: Tree) -> Tree:
    return map_tensors(
        lambda t: t.detach().requires_grad_(t.is_floating_point() or t.is_complex()), output
    )


def _used(leaves: Tree) -> Tree:
    # User code may change the output in place, which a leaf does not allow.
    return map_tensors(lambda t: t.clone(), leaves)


def _gradients(loss: Tensor, leaves: Tree) -> list[Tensor | None]:
    wanted = [leaf for leaf in tensors_of(leaves) if leaf.requires_grad]
    if not loss.requires_grad or not wanted:
        return []
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))


def _loss_difference(loss: Tensor, part_loss: Tensor) -> str | None:
    if _close(loss, part_loss, _TOLERANCE.get(loss.dtype, _COARSE)):
        return None
    return (
        f"the loss is {float(loss):.6g} for the whole batch, but {float(part_loss):.6g} as "
        "the mean of its micro-batches weighted by samples: it is not a mean over samples"
    )


def _log_difference(logs: Sequence[LogRecord], part_logs: Sequence[LogRecord]) -> str | None:
    if [r.name for r in logs] != [r.name for r in part_logs]:
        return "training_step logs other names for the whole batch than for a micro-batch"
    for record, part in zip(logs, part_logs, strict=True):
        if isinstance(record.value, Metric):
            continue
        samples = record.options.get("batch_size"), part.options.get("batch_size")
        if samples[0] != samples[1]:
            return (
                f"self.log({record.name!r}, batch_size=...) says {samples[0]} for the whole batch, "
                f"and {samples[1]} for its micro-batches"
            )
        value, other = torch.as_tensor(record.value), torch.as_tensor(part.value)
        if not _close(value, other, _TOLERANCE.get(value.dtype, _TOLERANCE[torch.float32])):
            return (
                f"the logged value {record.name!r} is {float(value):.6g} for the whole batch, but "
                f"{float(other):.6g} from its micro-batches"
            )
    return None


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool(
        torch.allclose(
            a.double().cpu(),
            b.double().cpu(),
            rtol=tolerance,
            atol=tolerance * 1e-2,
            equal_nan=True,
        )
    )


def refuse(reason: str, schedule: str) -> UnsupportedStepError:
    """Return the error for a step that a loss per micro-batch does not compute exactly."""
    return UnsupportedStepError(
        f"schedule={schedule!r} would not train this model exactly: {reason}. Use "
        f"schedule={GPipe.name!r}, which computes the loss once over the whole batch, or "
        "schedule='auto', which chooses."
    )
