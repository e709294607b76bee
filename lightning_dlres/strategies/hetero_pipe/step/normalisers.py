"""Signs that a step's loss is no mean over samples, taken from the step itself as it runs by
micro-batches: divisors, counts of averaged values, values that are not finite, other operations.

The check of the loss (see `check`) looks at a few batches only. Between two checks a batch may come
whose micro-batches have other numbers of labels, or one without any. Its signs differ then. A term
may also join the loss in mid-run, as after a warm-up: operations show it that no check has seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors
from lightning_dlres.strategies.hetero_pipe.step.parameter_guard import PipelinedWeightGuard

_TOLERANCE = 1e-5
_DIVIDES = {
    *("div", "div_", "divide", "divide_", "true_divide", "__truediv__", "__rtruediv__"),
    *("__itruediv__", "mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"),
}
_WITH_IGNORED_LABELS = {"cross_entropy", "nll_loss"}
_ADDS_UP = {"sum", "nansum", "norm", "vector_norm", "dot", "select", "__getitem__"}


class NormaliserRecorder(PipelinedWeightGuard):
    """A guard that also writes down by what the loss is normalised: scalars that a result with a
    gradient is divided or multiplied by, and how many values become one. It counts the operations
    whose result has a gradient.

    Attributes:
        found: the values, in the order of the operations; tensors are read once the step is over.
    """

    def __init__(self, made: LayerTensors | None = None) -> None:
        super().__init__(made)
        self.found: list[Tensor | float] = []
        # Weights without a gradient that were divided by a scalar, such as mask / mask.sum(). Held,
        # so that no other tensor gets their identity.
        self._weights: dict[int, tuple[Tensor, list[Tensor | float]]] = {}
        self._operations: Counter[str] = Counter()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)
        name = getattr(function, "__name__", "?")
        if _has_gradient(result):
            self._operations[name] += 1
        if isinstance(result, Tensor):
            self._note(name, args, kwargs or {}, result)
        return result

    def values(self) -> list[float]:
        """Return what was found as numbers."""
        return [float(value) for value in self.found]

    def operations(self) -> str:
        """Return the names of the operations, each with the order of magnitude of its number: where
        that depends on the data, steps are of a few kinds only. A factor of zero counts as one, as
        it hides a term from the check."""
        counts = Counter(self._operations)
        counts["0"] = self.values().count(0.0)
        return " ".join(f"{name}:{count.bit_length()}" for name, count in sorted(counts.items()))

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        scalars = _scalars(args) if name in _DIVIDES else []
        operands = [*args, *kwargs.values()]
        inherited = [v for a in operands if id(a) in self._weights for v in self._weights[id(a)][1]]
        if result.requires_grad:
            self.found += scalars
            self.found += inherited
            self.found += _averaged(name, args, kwargs, result)
            return
        # Python numbers scale, they do not normalise, unless a gradient is involved.
        scalars = [value for value in scalars if isinstance(value, Tensor)]
        if (scalars or inherited) and result.dim():
            self._weights[id(result)] = (result, [*scalars, *inherited])


def why_doubtful(records: Sequence[Tree], sizes: Sequence[int], gradients: bool) -> str | None:
    """Return a sign that a batch's loss is not the mean of its micro-batches; None without one.

    Args:
        records: what the last stages recorded.
        sizes: samples of every micro-batch.
        gradients: whether gradients count; scaled ones may overflow.
    """
    losses = torch.cat([record["losses"].double().cpu() for record in records])
    if not bool(losses.isfinite().all()):
        return "the loss of a micro-batch is not finite"
    if gradients and not all(flag for record in records for flag in record["finite"]):
        return "the gradient of a micro-batch is not finite"
    rows = [row for record in records for row in record["normalisers"]]
    if len({len(row) for row in rows}) > 1:
        return "training_step computes the loss otherwise for one micro-batch than for another"
    for column in zip(*rows, strict=True):
        if not _is_normal(column, sizes):
            counts = ", ".join(f"{value:g}" for value in column)
            return f"the loss is normalised by unlike values in the micro-batches ({counts})"
    return None


def _has_gradient(result: Any) -> bool:
    if isinstance(result, (list, tuple)):
        return any(_has_gradient(item) for item in result)
    return isinstance(result, Tensor) and result.requires_grad


def _scalars(args: Sequence[Any]) -> list[Tensor | float]:
    """Return the operands of a product or quotient that are one number without a gradient."""
    found: list[Tensor | float] = []
    for value in args[:2]:
        if isinstance(value, Tensor):
            if value.dim() == 0 and not value.requires_grad and not value.is_meta:
                # It may be changed in place later on.
                found.append(value.detach().clone())
        elif isinstance(value, Number) and not isinstance(value, complex):
            found.append(float(value))  # type: ignore[arg-type]
    return found


def _averaged(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor
) -> list[Tensor | float]:
    """Return how many values an operation makes one number of."""
    first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
    if first is None or result.dim() or not first.dim() or name in _ADDS_UP:
        return []
    if kwargs.get("reduction", "mean") == "sum":
        return []
    labels = kwargs.get("target", args[1] if len(args) > 1 else first)
    if name not in _WITH_IGNORED_LABELS or labels.is_floating_point():
        return [float(first.numel())]
    counted = labels != kwargs.get("ignore_index", -100)
    weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
    if isinstance(weight, Tensor):
        return [weight[labels.where(counted, 0)].where(counted, 0).sum()]
    return [counted.sum()]


def _is_normal(values: Sequence[float], sizes: Sequence[int]) -> bool:
    """Whether values are those of a mean over samples: the same for all micro-batches, or in
    proportion to their samples, or to the inverse of these."""
    pairs = list(zip(values, sizes, strict=True))
    columns = (values, [v / n for v, n in pairs], [v * n for v, n in pairs])
    return any(
        all(math.isclose(v, column[0], rel_tol=_TOLERANCE) for v in column) for column in columns
    )
