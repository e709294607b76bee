"""The autograd function that carries out a formula: parameters first, then the input's gradient,
into the input's memory where nobody else is left who reads it (Method A, A6)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_dlres.memory.audit import are_same
from lightning_dlres.memory.reuse.formula import Formula, Params

Report = Callable[[bool], None]


class Owner(Protocol):
    """Knows who reads what autograd has saved."""

    def asking(self) -> AbstractContextManager[list[Any]]:
        """Inside of it, what this thread asks for is noted."""

    def give_up(self, tensor: Tensor, asked: list[Any]) -> bool:
        """Return whether a tensor's memory is the caller's from now on, to write to.

        Args:
            tensor: that was asked for, and that only the caller holds.
            asked: what was noted meanwhile.
        """


class InPlaceGradient(torch.autograd.Function):
    """Computes what a formula says."""

    @staticmethod
    def forward(
        ctx: Any,
        formula: Formula,
        owner: Owner | None,
        report: Report | None,
        x: Tensor,
        *params: Tensor | None,
    ) -> Tensor:
        ctx.formula, ctx.owner, ctx.report, ctx.count = formula, owner, report, len(params)
        y, extras = formula.forward(x, params)
        if report is not None:
            plain = formula.plain(x, params)
            report(are_same([y], [plain]))
            y = plain
        ctx.save_for_backward(x, *params, *extras)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        formula, owner = ctx.formula, ctx.owner
        asking: AbstractContextManager[list[Any]] = (
            nullcontext([]) if owner is None else owner.asking()
        )
        with asking as asked:
            x, *rest = ctx.saved_tensors
        params, extras = tuple(rest[: ctx.count]), tuple(rest[ctx.count :])
        wants_x, *wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            found = _differentiable(formula, gradient, x, params, (wants_x, *wanted))
            return None, None, None, *found
        expected = None if ctx.report is None else _plain_gradients(ctx, gradient, x, params)
        into = None
        if wants_x and owner is not None and owner.give_up(x, asked):
            into = x.detach()
        elif wants_x:
            into = torch.empty_like(x)
        del asked
        gradients: tuple[Tensor | None, ...] = (
            into,
            *formula.backward(gradient, x, params, extras, wanted, into),
        )
        if expected is not None:
            # While it is looked at, what autograd computes counts.
            ctx.report(are_same(expected, gradients))
            gradients = expected
        elif ctx.report is not None:
            ctx.report(False)
        return None, None, None, *gradients


def _plain_gradients(
    ctx: Any, gradient: Tensor, x: Tensor, params: Params
) -> tuple[Tensor | None, ...] | None:
    """Return the gradients that autograd computes of the layer as it is; None where there is no
    room for that."""
    wanted = ctx.needs_input_grad[3:]
    with torch.enable_grad():
        given = [
            None if tensor is None else tensor.detach().requires_grad_(is_wanted)
            for tensor, is_wanted in zip((x, *params), wanted, strict=True)
        ]
        assert given[0] is not None
        try:
            y = ctx.formula.plain(given[0], tuple(given[1:]))
            asked = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
            found = iter(torch.autograd.grad(y, asked, gradient))
        except torch.OutOfMemoryError:
            return None
    return tuple(next(found) if is_wanted else None for is_wanted in wanted)


def _differentiable(
    formula: Formula,
    gradient: Tensor,
    x: Tensor,
    params: Params,
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Return the gradients of the input and the parameters by what autograd can follow once
    more."""
    with torch.enable_grad():
        # Views: an input may depend on a parameter, which is none of this layer's business.
        given = [None if tensor is None else tensor.view_as(tensor) for tensor in (x, *params)]
        assert given[0] is not None
        y = formula.plain(given[0], tuple(given[1:]))
        asked = [
            t for t, is_wanted in zip(given, wanted, strict=True) if is_wanted and t is not None
        ]
        found = iter(torch.autograd.grad(y, asked, gradient, create_graph=True, allow_unused=True))
    return [next(found) if is_wanted else None for is_wanted in wanted]
