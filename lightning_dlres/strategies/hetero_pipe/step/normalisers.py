"""Signs that the loss of a batch is not a mean over samples, found while the step runs per
micro-batch.

A normaliser is a divisor or factor of the loss, another number that an operation takes besides
what it transforms, such as the weight of a class, or the number of values that it averages.
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
# Operations whose numbers move the loss, or choose elements, and scale nothing.
_SUMS_AND_CHOICES = {
    *("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "subtract", "subtract_"),
    *("rsub", "__sub__", "__rsub__", "__isub__", "__getitem__"),
}
# Operations that give elements the value of a number.
_FILLING = {
    *("where", "full", "full_like", "new_full", "fill_", "masked_fill", "masked_fill_"),
    "__setitem__",
}
# Arguments of losses that are weights of classes: numbers of the whole batch, not of a sample.
_CLASS_WEIGHTS = {
    "binary_cross_entropy_with_logits": "pos_weight",
    "cross_entropy": "weight",
    "nll_loss": "weight",
}
# Losses that do not count labels of value `ignore_index`.
_LOSSES_WITH_IGNORED_LABELS = {"cross_entropy", "nll_loss"}
# Operations that make one number of many values without averaging them.
_NOT_AVERAGING = {"sum", "nansum", "norm", "vector_norm", "dot", "select", "__getitem__"}


class NormaliserRecorder(PipelinedWeightGuard):
    """Guard that also records the values that normalise the loss, and counts operations.

    A normaliser is a scalar operand of an operation whose result has a gradient, a weight of a
    class, or the number of values that an operation averages. Only operations whose result has a
    gradient are counted.

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
        # Results without a gradient that were made of a scalar tensor, such as mask / mask.sum(),
        # and the scalars, by id of the result. The loss may be multiplied by such a result later.
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
        if name == "__setitem__":
            # The tensor that it changes, and what it puts there.
            self._record(name, (args[0], args[2]), {}, args[0])
        elif isinstance(result, Tensor):
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
        operands = [*args, *kwargs.values()]
        if not result.requires_grad:
            operands = [b for a in operands for b in (a if isinstance(a, (list, tuple)) else [a])]
        scalars = _scalar_operands(name, operands)
        inherited = [v for a in operands if id(a) in self._weights for v in self._weights[id(a)][1]]
        if result.requires_grad:
            self.normalisers += scalars
            self.normalisers += inherited
            self.normalisers += _class_weights(name, args, kwargs)
            self.normalisers += _averaged_counts(name, args, kwargs, result)
            return
        if name not in _FILLING:
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


def _scalar_operands(name: str, operands: Sequence[Any]) -> list[Tensor | float]:
    """Return the operands of an operation that are one number without a gradient.

    Of products and quotients they may be of any kind, since counts normalise. Other operations take
    whole numbers for sizes and positions.
    """
    if name in _SUMS_AND_CHOICES:
        return []
    is_scaling = name in _DIVISIONS_AND_PRODUCTS
    scalars: list[Tensor | float] = []
    for value in operands[:2] if is_scaling else operands:
        if isinstance(value, Tensor):
            is_number = value.dim() == 0 and not value.requires_grad and not value.is_meta
            if is_number and (is_scaling or value.is_floating_point()):
                # Copied, since user code may change the scalar in place later.
                scalars.append(value.detach().clone())
        elif isinstance(value, Number if is_scaling else float) and not isinstance(value, complex):
            number = float(value)  # type: ignore[arg-type]
            # Values of other stages are no numbers here. One of the user's makes a loss that is
            # not finite, which is a sign of its own.
            scalars += [number] if number == number else []
    return scalars


def _class_weights(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor | float]:
    """Return a number that tells a loss's weights of classes from most others; an empty list if it
    has none."""
    weight = kwargs.get(_CLASS_WEIGHTS.get(name, ""))
    if weight is None and name in ("cross_entropy", "nll_loss") and len(args) > 2:
        weight = args[2]
    if not isinstance(weight, Tensor) or weight.requires_grad or weight.is_meta:
        return []
    weights = weight.detach().double().reshape(-1)
    return [weights @ torch.arange(1, len(weights) + 1, device=weight.device).double().sqrt()]


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
