"""Signs that the loss of a batch is not a mean over samples, found while the step runs per
micro-batch.

A normaliser is a divisor or factor of the loss, or the number of values that an operation averages.
The signs are: normalisers that differ between micro-batches, losses or gradients that are not
finite, and operations that no checked batch has used.

The check of the loss (`checks.loss_check`) looks at a few batches only. Between two checks a batch
may come whose micro-batches have unequal numbers of labels, or a micro-batch without any label.
Then the divisors differ. A term may also join the loss during the run, as after a warm-up. Then
there are operations that no check has seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres._compat import is_fake
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors
from lightning_dlres.strategies.hetero_pipe.step.gradient_reads import GradientsOfEarlierBatches
from lightning_dlres.strategies.hetero_pipe.step.parameter_guard import PipelinedWeightGuard

# Relative difference of two normalisers that counts as rounding.
_TOLERANCE = 1e-5
_DIVISIONS_AND_PRODUCTS = {
    *("div", "div_", "divide", "divide_", "true_divide", "__truediv__", "__rtruediv__"),
    *("__itruediv__", "mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"),
}
# Losses that do not count labels of value `ignore_index`.
_LOSSES_WITH_IGNORED_LABELS = {"cross_entropy", "nll_loss"}
# Operations that make one number of many values without averaging them.
_NOT_AVERAGING = {"sum", "nansum", "norm", "vector_norm", "dot", "select", "__getitem__"}


class NormaliserRecorder(PipelinedWeightGuard):
    """Guard that also records the values that normalise the loss, and counts operations.

    A normaliser is a scalar that a result with a gradient is divided or multiplied by, or the
    number of values that an operation averages. Only operations whose result has a gradient are
    counted.

    Attributes:
        normalisers: The values, in the order of the operations. They stay tensors until the step is
            over, because reading one waits for the device.
    """

    def __init__(
        self,
        layer_tensors: LayerTensors | None = None,
        module: nn.Module | None = None,
        gradients: GradientsOfEarlierBatches | None = None,
    ) -> None:
        super().__init__(layer_tensors, module, gradients)
        self.normalisers: list[Tensor | float] = []
        # Results without a gradient that a scalar tensor has scaled, such as mask / mask.sum(), and
        # the scalars, by id of the result. The loss may be multiplied by such a result later.
        # Holding the tensor keeps Python from giving its id to another tensor.
        self._weights: dict[int, tuple[Tensor, list[Tensor | float]]] = {}
        self._counts: Counter[str] = Counter()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)
        name = getattr(function, "__name__", "?")
        if is_fake(result):
            # Code between layers of other stages, whose results have no values here.
            return result
        if _has_gradient(result):
            self._counts[name] += 1
        if isinstance(result, Tensor):
            self._record(name, args, kwargs or {}, result)
        return result

    def values(self) -> list[float]:
        """Return the normalisers as numbers; waits for the device."""
        return [float(value) for value in self.normalisers]

    def operations(self) -> str:
        """Return the names of the counted operations, each with the bit length of its count.

        The text is compared with those of checked batches. Exact counts may depend on the data, but
        their magnitude rarely does, so that there are only a few different texts. A factor of zero
        counts as an operation named "0", since it hides a term from the check of the loss.
        """
        counts = Counter(self._counts)
        counts["0"] = self.values().count(0.0)
        return " ".join(f"{name}:{count.bit_length()}" for name, count in sorted(counts.items()))

    def _record(self, name: str, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        scalars = _scalar_operands(args) if name in _DIVISIONS_AND_PRODUCTS else []
        operands = [*args, *kwargs.values()]
        inherited = [v for a in operands if id(a) in self._weights for v in self._weights[id(a)][1]]
        if result.requires_grad:
            self.normalisers += scalars
            self.normalisers += inherited
            self.normalisers += _averaged_counts(name, args, kwargs, result)
            return
        # Without a gradient, a Python number only scales; it does not normalise.
        scalars = [value for value in scalars if isinstance(value, Tensor)]
        if (scalars or inherited) and result.dim():
            self._weights[id(result)] = (result, [*scalars, *inherited])


def doubt_about_batch(
    records: Sequence[Tree], sizes: Sequence[int], checks_gradients: bool
) -> str | None:
    """Return a sign that a batch's loss is not the weighted mean of its micro-batches' losses; None
    without one.

    Args:
        records: Records of the last stages.
        sizes: Samples of every micro-batch.
        checks_gradients: Whether a gradient that is not finite counts as a sign. With a gradient
            scaler it must not: the scale alone may make gradients overflow.
    """
    if all(flag for record in records for flag in record["skipped"]):
        return "training_step returns None for every micro-batch"
    losses = torch.cat([record["losses"].double().cpu() for record in records])
    if not bool(losses.isfinite().all()):
        return "the loss of a micro-batch is not finite"
    if checks_gradients and not all(flag for record in records for flag in record["finite"]):
        return "the gradient of a micro-batch is not finite"
    rows = [row for record in records for row in record["normalisers"]]
    if len({len(row) for row in rows}) > 1:
        return "training_step computes the loss differently for different micro-batches"
    for column in zip(*rows, strict=True):
        if not _fits_mean_over_samples(column, sizes):
            values = ", ".join(f"{value:g}" for value in column)
            return f"the loss is normalised by different values in the micro-batches ({values})"
    return None


def _has_gradient(result: Any) -> bool:
    if isinstance(result, (list, tuple)):
        return any(_has_gradient(item) for item in result)
    return isinstance(result, Tensor) and result.requires_grad


def _scalar_operands(args: Sequence[Any]) -> list[Tensor | float]:
    """Return the operands of a product or quotient that are one number without a gradient."""
    scalars: list[Tensor | float] = []
    for value in args[:2]:
        if isinstance(value, Tensor):
            if value.dim() == 0 and not value.requires_grad and not value.is_meta:
                # Copied, since user code may change the scalar in place later.
                scalars.append(value.detach().clone())
        elif isinstance(value, Number) and not isinstance(value, complex):
            scalars.append(float(value))  # type: ignore[arg-type]
    return scalars


def _averaged_counts(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor
) -> list[Tensor | float]:
    """Return, as one item, the number of values that an operation averages, or the sum of their
    weights; an empty list if it does not average."""
    first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
    if first is None or result.dim() or not first.dim() or name in _NOT_AVERAGING:
        return []
    if kwargs.get("reduction", "mean") == "sum":
        return []
    labels = kwargs.get("target", args[1] if len(args) > 1 else first)
    if name not in _LOSSES_WITH_IGNORED_LABELS or labels.is_floating_point():
        return [float(first.numel())]
    is_counted = labels != kwargs.get("ignore_index", -100)
    weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
    if isinstance(weight, Tensor):
        return [weight[labels.where(is_counted, 0)].where(is_counted, 0).sum()]
    return [is_counted.sum()]


def _fits_mean_over_samples(values: Sequence[float], sizes: Sequence[int]) -> bool:
    """Return whether one normaliser's values fit a mean over samples.

    They do if they are equal in all micro-batches, or in proportion to the samples, or in
    proportion to the inverse of the samples.
    """
    pairs = list(zip(values, sizes, strict=True))
    columns = (values, [v / n for v, n in pairs], [v * n for v, n in pairs])
    return any(
        all(math.isclose(v, column[0], rel_tol=_TOLERANCE) for v in column) for column in columns
    )
