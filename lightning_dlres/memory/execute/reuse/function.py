"""The autograd function that carries out a formula: parameters first, then the input's gradient,
into the input's memory where nobody else is left who reads it (Method A, A6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_dlres.core._compat import is_view, is_wrapped
from lightning_dlres.memory.execute.bitwise_check import are_same, layout_of
from lightning_dlres.memory.execute.reuse.formula import Backward, Formula, Params

Report = Callable[[bool], None]
# So many random gradients are looked at beside the one that comes.
_LOOKS = 4


class Owner(Protocol):
    """Knows who reads what autograd has saved."""

    def asking(self) -> AbstractContextManager[list[Any]]:
        """Inside of it, what this thread asks for is noted."""

    def take_ownership(self, tensor: Tensor, asked: list[Any]) -> bool:
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
        # Where no gradient comes, none goes on: zeros would let optimizers change weights.
        ctx.set_materialize_grads(False)
        y, extras = formula.forward(x, params)
        if report is not None:
            plain = formula.plain(x, params)
            if not are_same([y], [plain]):
                report(False)
            y = plain
        ctx.save_for_backward(x, *params, *extras)
        ctx.layout = layout_of(y)
        # Autograd does not let anybody change a view that a function returns.
        return y.detach() if is_view(y) else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        formula: Formula = ctx.formula
        owner: Owner | None = ctx.owner
        if gradient is None:
            return (None,) * int(4 + ctx.count)
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
        plainly = partial(_plain_gradients, formula, x, params, (wants_x, *wanted))
        if is_wrapped(gradient) or layout_of(gradient) != ctx.layout:
            # In another layout sums may be added up in another order.
            return None, None, None, *plainly(gradient)
        expected = None
        if ctx.report is not None:
            try:
                expected = plainly(gradient)
                for other in _random_like(gradient):
                    room = torch.empty_like(x) if wants_x else None
                    own = formula.backward(Backward(other, x, params, extras, wanted, room))
                    ctx.report(are_same(plainly(other), (room, *own)))
            except torch.OutOfMemoryError:
                # There is no room to look: then it is not known.
                ctx.report(False)
        into = None
        if wants_x and owner is not None and owner.take_ownership(x, asked):
            # Not counted as a change: other parts of what x was saved for may still be read.
            into = x.data
        elif wants_x:
            into = torch.empty_like(x)
        del asked, plainly
        gradients: tuple[Tensor | None, ...] = (
            into,
            *formula.backward(Backward(gradient, x, params, extras, wanted, into)),
        )
        if expected is not None:
            # While it is looked at, what autograd computes counts.
            ctx.report(are_same(expected, gradients))
            gradients = expected
        return None, None, None, *gradients


def _random_like(gradient: Tensor) -> Iterator[Tensor]:
    """Yield gradients of random numbers: with one alone, sums in another order may be the same by
    accident."""
    generator = torch.Generator(gradient.device).manual_seed(0)
    for _ in range(_LOOKS):
        yield torch.empty_like(gradient).normal_(generator=generator)


def _plain_gradients(
    formula: Formula, x: Tensor, params: Params, wanted: tuple[bool, ...], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients that autograd computes of the layer as it is."""
    with torch.enable_grad():
        given = [
            None if tensor is None else tensor.detach().requires_grad_(is_wanted)
            for tensor, is_wanted in zip((x, *params), wanted, strict=True)
        ]
        assert given[0] is not None
        y = formula.plain(given[0], tuple(given[1:]))
        asked = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
        found = iter(torch.autograd.grad(y, asked, gradient))
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
