"""Autograd function that carries out a formula, and overwrites the input with its gradient.

Backward computes the parameters' gradients first. The input's gradient then goes into the input's
memory, if no other reader of that memory is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_dlres.core._compat import is_view, is_wrapped
from lightning_dlres.memory.execute.bitwise_check import are_same, layout_of
from lightning_dlres.memory.execute.reuse.formula import BackwardCall, Formula, Params

# Callback that gets True if a formula computes the same bits as PyTorch's own operation.
ReportMatch = Callable[[bool], None]
# Number of random gradients, besides the actual one, with which a check compares a formula with
# PyTorch's own operation.
_RANDOM_CHECKS = 4


class MemoryOwner(Protocol):
    """Owner of the memory that autograd saves: the engine."""

    def recording_unpacked(self) -> AbstractContextManager[list[Any]]:
        """Context manager that records the saved tensors that this thread unpacks."""

    def take_ownership(self, tensor: Tensor, unpacked: list[Any]) -> bool:
        """Hand a tensor's memory over to the caller, if nothing else can read it.

        Args:
            tensor: Unpacked tensor, which only the caller holds.
            unpacked: Record of `recording_unpacked`.

        Returns:
            True if the caller now owns the memory, and may overwrite it.
        """


class InPlaceGradient(torch.autograd.Function):
    """Autograd function of one call of a layer with a formula."""

    @staticmethod
    def forward(
        ctx: Any,
        formula: Formula,
        owner: MemoryOwner | None,
        report: ReportMatch | None,
        x: Tensor,
        *params: Tensor | None,
    ) -> Tensor:
        ctx.formula, ctx.owner, ctx.report, ctx.param_count = formula, owner, report, len(params)
        # An undefined gradient stays undefined: zeros would let optimizers change weights.
        ctx.set_materialize_grads(False)
        y, extras = formula.forward(x, params)
        if report is not None:
            plain = formula.differentiable_forward(x, params)
            if not are_same([y], [plain]):
                report(False)
            y = plain
        ctx.save_for_backward(x, *params, *extras)
        ctx.layout = layout_of(y)
        # Autograd forbids in-place changes of a view that a function returns.
        return y.detach() if is_view(y) else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        formula: Formula = ctx.formula
        owner: MemoryOwner | None = ctx.owner
        if gradient is None:
            return (None,) * int(4 + ctx.param_count)
        recording: AbstractContextManager[list[Any]] = (
            nullcontext([]) if owner is None else owner.recording_unpacked()
        )
        with recording as unpacked:
            x, *rest = ctx.saved_tensors
        params, extras = tuple(rest[: ctx.param_count]), tuple(rest[ctx.param_count :])
        needs_x, *needs_params = ctx.needs_input_grad[3:]
        needs_gradient = (needs_x, *needs_params)
        if torch.is_grad_enabled():
            gradients = _differentiable_gradients(formula, gradient, x, params, needs_gradient)
            return None, None, None, *gradients
        plain_gradients = partial(_plain_gradients, formula, x, params, needs_gradient)
        if is_wrapped(gradient) or layout_of(gradient) != ctx.layout:
            # For a gradient in another layout a kernel may sum in another order, so run PyTorch's
            # own operation.
            return None, None, None, *plain_gradients(gradient)
        expected = None
        if ctx.report is not None:
            try:
                expected = plain_gradients(gradient)
                for random_gradient in _random_like(gradient):
                    out = torch.empty_like(x) if needs_x else None
                    param_gradients = formula.backward(
                        BackwardCall(random_gradient, x, params, extras, needs_params, out)
                    )
                    ctx.report(are_same(plain_gradients(random_gradient), (out, *param_gradients)))
            except torch.OutOfMemoryError:
                # There is no memory for the comparison, so exactness is unknown.
                ctx.report(False)
        out = None
        if needs_x and owner is not None and owner.take_ownership(x, unpacked):
            # `.data` has a version counter of its own. Other saved parts of x can then be read
            # without an error about an in-place change.
            out = x.data
        elif needs_x:
            out = torch.empty_like(x)
        del unpacked, plain_gradients
        param_gradients = formula.backward(
            BackwardCall(gradient, x, params, extras, needs_params, out)
        )
        result: tuple[Tensor | None, ...] = (out, *param_gradients)
        if expected is not None:
            # In a step that compares, training uses PyTorch's own gradients.
            ctx.report(are_same(expected, result))
            result = expected
        return None, None, None, *result


def _random_like(gradient: Tensor) -> Iterator[Tensor]:
    """Yield random gradients: for a single one, two orders of summation may agree by chance."""
    generator = torch.Generator(gradient.device).manual_seed(0)
    for _ in range(_RANDOM_CHECKS):
        yield torch.empty_like(gradient).normal_(generator=generator)


def _plain_gradients(
    formula: Formula, x: Tensor, params: Params, needs_gradient: tuple[bool, ...], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients that autograd computes for PyTorch's own operation."""
    with torch.enable_grad():
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(is_needed)
            for tensor, is_needed in zip((x, *params), needs_gradient, strict=True)
        ]
        assert inputs[0] is not None
        y = formula.differentiable_forward(inputs[0], tuple(inputs[1:]))
        needed = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        gradients = iter(torch.autograd.grad(y, needed, gradient))
    return tuple(next(gradients) if is_needed else None for is_needed in needs_gradient)


def _differentiable_gradients(
    formula: Formula,
    gradient: Tensor,
    x: Tensor,
    params: Params,
    needs_gradient: tuple[bool, ...],
) -> list[Tensor | None]:
    """Return the gradients of the input and the parameters, for second derivatives."""
    with torch.enable_grad():
        # Differentiate views: if the input itself depends on a parameter, that path must not add
        # to the gradient of the parameter here.
        inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in (x, *params)]
        assert inputs[0] is not None
        y = formula.differentiable_forward(inputs[0], tuple(inputs[1:]))
        needed = [
            tensor
            for tensor, is_needed in zip(inputs, needs_gradient, strict=True)
            if is_needed and tensor is not None
        ]
        gradients = iter(
            torch.autograd.grad(y, needed, gradient, create_graph=True, allow_unused=True)
        )
    return [next(gradients) if is_needed else None for is_needed in needs_gradient]
