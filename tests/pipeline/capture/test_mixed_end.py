"""Code after a module's last layer must fit the code before it, which runs on micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.pipeline.capture.tracing.capturing import capture
from lightning_dlres.pipeline.capture.tracing.coupling import may_mix_at_end, mixed_end

Code = Callable[[Tensor], Tensor]


class Ends(nn.Module):
    """Two layers with code around them.

    Args:
        before: Code before the first layer.
        after: Code after the last layer, which also gets the module's input.
    """

    def __init__(self, before: Code, after: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.last(torch.tanh(self.first(self.before(x)))), x)


def order(x: Tensor) -> Tensor:
    return x[:, 0].argsort()


def is_mixed(before: Code, after: Callable[[Tensor, Tensor], Tensor]) -> bool:
    torch.manual_seed(0)
    module, inputs = Ends(before, after), ((torch.randn(2, 4),), {})
    captured = capture(module, inputs)
    return may_mix_at_end(captured) and bool(mixed_end(captured, inputs))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda x: x[order(x)], lambda y, x: y[order(x).argsort()]),
        (lambda x: x.flip(0), lambda y, x: y.flip(0)),
        (lambda x: x / x.abs().max(), lambda y, x: y * x.abs().max()),
        (lambda x: x / len(x), lambda y, x: y * len(x)),
        (lambda x: x - x.mean(0), lambda y, x: y + x.mean(0)),
    ],
    ids=["sort", "flip", "scale", "count", "mean"],
)
def test_values_that_both_ends_compute_are_found(
    before: Code, after: Callable[[Tensor, Tensor], Tensor]
) -> None:
    assert is_mixed(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda x: x * 2, lambda y, x: y[order(x)]),
        (lambda x: x, lambda y, x: y - y.mean(0)),
        (lambda x: x - x.mean(0), lambda y, x: y * 2),
        (lambda x: x * x.mean(1, keepdim=True), lambda y, x: y / x.mean(1, keepdim=True)),
        (lambda x: x[order(x)], lambda y, x: y),
    ],
    ids=["order after", "mean after", "mean before", "alone", "sort before"],
)
def test_code_that_fits_is_not_refused(
    before: Code, after: Callable[[Tensor, Tensor], Tensor]
) -> None:
    assert not is_mixed(before, after)
