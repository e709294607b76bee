"""Check that the loss of a step is a mean over samples.

Schedules such as 1F1B compute the loss per micro-batch, and weight the results by samples. This is
exact only for a mean over samples: not for padded-token means, sums or contrastive losses.
Therefore the step runs on a real batch both whole and per micro-batch. The loss, its gradient and
the step's side effects are compared. The functions return the first difference as text: the reason
why the step must not be computed per micro-batch.
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
from lightning_dlres.strategies.hetero_pipe.replay.logs import LogRecord, merge_parts
from lightning_dlres.strategies.hetero_pipe.replay.printing import PRINTED
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attribute_changes import (
    changed_collections,
    changed_generators,
    unsendable_values,
)
from lightning_dlres.strategies.hetero_pipe.step.user_step import LightningStep

# Relative difference of two losses that counts as rounding, by dtype. Other dtypes have the coarse
# tolerance.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_COARSE_TOLERANCE = 2e-2


def reason_against_microbatches(
    make_step: Callable[[], LightningStep],
    output: Tree,
    sizes: Sequence[int],
    compares_values: bool = True,
) -> str | None:
    """Return the reason why the step must not be computed per micro-batch; None if it may be.

    The step runs once on the whole batch and once on every micro-batch. Metrics and random state
    are restored.

    Args:
        make_step: Returns a new step over the batch.
        output: The module's output for the whole batch.
        sizes: Samples of every micro-batch.
        compares_values: True to also compare the attribute values that the runs leave behind.
    """
    whole = make_step()
    metrics, device = whole.context.metrics, whole.context.device
    name = metrics.first_unmergeable()
    if name is not None:
        return f"the state of the metric {name!r} cannot be merged from parts of a batch"
    rewind_random_state = rng.rewinder(device)
    try:
        loss, gradients, logs = _run_on_batch(whole, output, sizes)
        reason = _reason_in_whole_run(whole)
        if reason is not None:
            return reason
        whole_metrics, whole_random_state = metrics.snapshot(), digest(rng.snapshot(device))
        whole.restore_metrics()
        parts = make_step()
        try:
            part_loss, gradient_difference, part_logs = _run_on_parts(
                parts, output, sizes, gradients
            )
        except Exception as error:
            return f"training_step fails on a micro-batch ({type(error).__name__}: {error})"
        part_random_state, part_metrics = digest(rng.snapshot(device)), metrics.partial_states()
        whole.restore_metrics()
        metrics.merge([part_metrics])
        differing_metric = metrics.first_differing(whole_metrics)
    finally:
        whole.restore_metrics()
        rewind_random_state()
    reason = reason_in_skips([*whole.skipped, *parts.skipped])
    reason = reason or _loss_difference(loss, part_loss) or gradient_difference
    runs = [*whole.effects.fingerprints, *parts.effects.fingerprints]
    if reason is None and compares_values:
        reason = reason_in_fingerprints(runs)
    reason = reason or _log_difference(logs, part_logs)
    if reason is None and differing_metric is not None:
        return (
            f"the metric {differing_metric!r} has different states after the whole batch and after "
            "its micro-batches"
        )
    generators = changed_generators(whole.effects.changed_attributes)
    generators |= changed_generators(parts.effects.changed_attributes)
    draws = [{path: run.get(path) for path in generators} for run in runs]
    draws_differ = any(run != draws[0] for run in draws)
    if reason is None and (part_random_state != whole_random_state or draws_differ):
        return "training_step draws different random numbers for a batch and for a micro-batch"
    return reason


def reason_in_records(records: Sequence[Tree], logs: Sequence[Sequence[LogRecord]]) -> str | None:
    """Return the first effect that a step had per micro-batch and must have once per batch; None if
    there is none.

    Checks run on few batches, and the step may have such an effect on other batches only.

    Args:
        records: Records of the last stages.
        logs: Calls of `self.log` for every micro-batch.
    """
    reason = reason_in_skips([flag for record in records for flag in record["skipped"]])
    if reason is not None:
        return reason
    names = [[record.name for record in part] for part in logs]
    other = next((other for other in names if other != names[0]), None)
    if other is not None:
        return f"training_step logged {names[0]} for one micro-batch and {other} for another"
    for record in records:
        once = record["once_per_batch"]
        reason = _reason_in_effects(
            collections=once["collections"],
            buffers=once["buffers"],
            extra=[],
            logger_calls=record["logger"],
            unsendable=once["unsendable"],
        )
        if reason is not None:
            return reason
    return None


def reason_in_skips(skipped: Sequence[bool]) -> str | None:
    """Return the reason against micro-batches if only some runs of a step return None."""
    if any(skipped) and not all(skipped):
        return "training_step returns None for only some micro-batches, or only for the whole batch"
    return None


def reason_in_fingerprints(runs: Sequence[Mapping[str, int]]) -> str | None:
    """Return the first change that differs between runs of the step, as text; None without one.

    Args:
        runs: For every run a hash of each change; see `StepEffects.fingerprints`.
    """
    for other in runs:
        for path in sorted(runs[0].keys() | other.keys()):
            if runs[0].get(path) == other.get(path):
                continue
            if path == PRINTED:
                return "training_step prints different text for different micro-batches"
            where = f"self.{path}" if path else "an attribute"
            return f"training_step leaves different values in {where} for different micro-batches"
    return None


def inexact_schedule_error(reason: str, schedule: str) -> UnsupportedStepError:
    """Return the error for a step whose loss per micro-batch would not be exact."""
    return UnsupportedStepError(
        f"schedule={schedule!r} would not train this model exactly: {reason}. Use "
        f"schedule={GPipe.name!r}, which computes the loss once over the whole batch, or "
        "schedule='auto', which chooses."
    )


def _reason_in_whole_run(step: LightningStep) -> str | None:
    """Return the first effect of a run on the whole batch that must happen once per batch only."""
    effects = step.effects
    return _reason_in_effects(
        collections=changed_collections(effects.changed_attributes),
        buffers=effects.changed_buffers,
        extra=sorted(str(key) for key in step.extra or ()),
        logger_calls=effects.logger_calls[-1],
        unsendable=sorted(unsendable_values(effects.changed_attributes)),
    )


def _reason_in_effects(
    *,
    collections: Sequence[str],
    buffers: Sequence[str],
    extra: Sequence[str],
    logger_calls: Sequence[Any],
    unsendable: Sequence[str],
) -> str | None:
    if collections:
        return f"training_step adds to self.{collections[0]}, which must happen once per batch"
    if buffers:
        return f"training_step changes {buffers[0]!r} in place, which must happen once per batch"
    if extra:
        return f"training_step returns {extra[0]!r} beside the loss, which is for the whole batch"
    if unsendable:
        name = unsendable[0]
        return f"training_step makes a new object for self.{name}, which must happen once per batch"
    if logger_calls:
        return "training_step calls a logger directly, which must happen once per batch"
    return None


def _run_on_batch(
    step: LightningStep, output: Tree, sizes: Sequence[int]
) -> tuple[Tensor, list[Tensor | None], list[LogRecord]]:
    """Return the loss of the whole batch, its gradients for the module's output, and the logs."""
    leaves = _leaves(output)
    loss = _loss_or_zero(step.finish(_changeable(leaves), None, sizes))
    return loss.detach(), _gradients(loss, leaves), step.effects.logs[0]


def _run_on_parts(
    step: LightningStep, output: Tree, sizes: Sequence[int], gradients: Sequence[Tensor | None]
) -> tuple[Tensor, str | None, list[LogRecord]]:
    """Return the micro-batches' weighted loss, its gradient's difference as text, and the logs.

    Gradients are compared micro-batch by micro-batch, so that no second gradient of the whole batch
    takes memory.
    """
    losses, comparison = [], _GradientComparison(gradients, sizes)
    for m, part in enumerate(cut(output, sizes)):
        leaves = _leaves(part)
        loss = _loss_or_zero(step.finish(_changeable(leaves), m, sizes))
        loss = loss * (sizes[m] / sum(sizes))
        losses.append(loss.detach())
        comparison.add(m, _gradients(loss, leaves))
    total = torch.stack(losses).sum()
    return total, comparison.difference(total), merge_parts(step.effects.logs, sizes)


class _GradientComparison:
    """Comparison of a batch's gradients with those of its micro-batches, one at a time.

    Args:
        whole: Gradients of the batch's loss for the module's outputs; None for an output that the
            loss does not depend on.
        sizes: Samples of every micro-batch.
    """

    def __init__(self, whole: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        self._whole = whole
        self._whole_by_part = cut(list(whole), sizes)
        self._squared_errors: list[float | Tensor] = [0.0] * len(whole)
        self._reaches_same_outputs = True

    def add(self, m: int, parts: Sequence[Tensor | None]) -> None:
        """Add the gradients of micro-batch m."""
        pairs = zip_longest(self._whole_by_part[m], parts)
        for index, (expected, gradient) in enumerate(pairs):
            if expected is not None and gradient is not None:
                error = torch.linalg.vector_norm(expected - gradient).double()
                self._squared_errors[index] += error.square()
            elif expected is not None or gradient is not None:
                self._reaches_same_outputs = False

    def difference(self, loss: Tensor) -> str | None:
        """Return the difference as text; None if the gradients are equal up to rounding.

        Args:
            loss: Weighted loss of the micro-batches; its dtype sets the tolerance.
        """
        if not self._reaches_same_outputs:
            return (
                "the gradient of the loss reaches different outputs of the module for the whole "
                "batch and for its micro-batches"
            )
        tolerance = _TOLERANCE.get(loss.dtype, _COARSE_TOLERANCE)
        for gradient, squared_error in zip(self._whole, self._squared_errors, strict=True):
            if gradient is None:
                continue
            # Rounding adds up in backward: ten times the tolerance of the loss.
            limit = 10 * max(tolerance, _TOLERANCE.get(gradient.dtype, _COARSE_TOLERANCE))
            norm = float(torch.linalg.vector_norm(gradient))
            # A batch gradient that has overflowed, as under a large loss scale, proves nothing. A
            # part that is not finite differs from a finite gradient: `not <=` is true for NaN.
            if math.isfinite(norm) and not float(squared_error) ** 0.5 <= limit * norm:
                return "the loss has different gradients for the whole batch and its micro-batches"
        return None


def _leaves(output: Tree) -> Tree:
    return map_tensors(
        lambda t: t.detach().requires_grad_(t.is_floating_point() or t.is_complex()), output
    )


def _loss_or_zero(loss: Tensor | None) -> Tensor:
    return torch.zeros(()) if loss is None else loss


def _changeable(leaves: Tree) -> Tree:
    # User code may change the output in place, which autograd forbids for a leaf.
    return map_tensors(lambda t: t.clone(), leaves)


def _gradients(loss: Tensor, leaves: Tree) -> list[Tensor | None]:
    inputs = [leaf for leaf in tensors_of(leaves) if leaf.requires_grad]
    if not loss.requires_grad or not inputs:
        return []
    return list(torch.autograd.grad(loss, inputs, allow_unused=True))


def _loss_difference(loss: Tensor, part_loss: Tensor) -> str | None:
    if _close(loss, part_loss, _TOLERANCE.get(loss.dtype, _COARSE_TOLERANCE)):
        return None
    return (
        f"the loss is {float(loss):.6g} for the whole batch, but {float(part_loss):.6g} as "
        "the mean of its micro-batches weighted by samples: it is not a mean over samples"
    )


def _log_difference(logs: Sequence[LogRecord], part_logs: Sequence[LogRecord]) -> str | None:
    if [r.name for r in logs] != [r.name for r in part_logs]:
        return "training_step logs different names for the whole batch and for a micro-batch"
    for record, part in zip(logs, part_logs, strict=True):
        if isinstance(record.value, Metric):
            continue
        samples = record.options.get("batch_size"), part.options.get("batch_size")
        if samples[0] != samples[1]:
            return (
                f"self.log({record.name!r}, batch_size=...) gets {samples[0]} for the whole batch, "
                f"but {samples[1]} for its micro-batches"
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
