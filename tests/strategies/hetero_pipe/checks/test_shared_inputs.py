"""Inputs of a layer that share memory, one of which the layer changes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres import PipelinePlan, UnsupportedStepError
from lightning_dlres.pipeline.stage.shared_inputs import SharedInputs
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, Classifier, differences_in, fit, no_differences_in

VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "the same": lambda x: (x, x),
    "a part": lambda x: (x, x[:, :2]),
    "overlapping parts": lambda x: (x[:, :4], x[:, 3:]),
    "a transposed view": lambda x: (x, x.T),
    "an expanded view": lambda x: (x[:1], x[:1].expand(3, -1)),
}
APART: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "two tensors": lambda x: (x, x.clone()),
    "halves": lambda x: (x[:, :3], x[:, 3:]),
    "every other column": lambda x: (x[:, ::2], x[:, 1::2]),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", [*VIEWS, *APART])
def test_a_change_is_seen_in_all_views_as_in_the_inputs(name: str, requires_grad: bool) -> None:
    views = {**VIEWS, **APART}[name]
    x = torch.arange(18.0).view(3, 6)
    inputs = tuple(view.detach().requires_grad_(requires_grad) for view in views(x))
    shared = SharedInputs({"pair": inputs, "other": [torch.ones(2, dtype=torch.bool)]})
    assert isinstance(shared.copies, dict)
    first, second = shared.copies["pair"]
    assert not shared.are_changed()
    assert torch.equal(first, inputs[0])
    assert torch.equal(second, inputs[1])
    first += 1
    assert shared.are_changed() == (name in VIEWS)
    changed, other = views(torch.arange(18.0).view(3, 6))
    changed += 1
    assert torch.equal(first, changed)
    assert torch.equal(second, other)
    # The inputs stay as they are.
    assert torch.equal(x, torch.arange(18.0).view(3, 6))
    if requires_grad:
        (first.sum() + second.sum()).backward()


def test_a_tensor_without_partners_may_change() -> None:
    x = torch.zeros(3)
    shared = SharedInputs([x, x, torch.zeros(3)])
    shared.copies[2].add_(1)  # type: ignore[index, union-attr, call-overload]
    assert not shared.are_changed()


class Pair(nn.Module):
    """Layer that returns a stream and a skip connection."""

    def __init__(self, views: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.linear, self.views = nn.Linear(16, 16), views

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.views(self.linear(x))


class Passes(nn.Module):
    """Layer that hands both on as they are."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair


class Adds(nn.Module):
    """Layer that changes the stream in place, and uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(5)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Any:
        stream, skip = pair
        stream += 1
        return self.linear(torch.cat([stream, skip.tanh()], 1))


class Skips(Classifier):
    def __init__(self, views: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(1)
        net = nn.Sequential(Pair(views), Passes(), Adds())
        with torch.no_grad():
            net(torch.ones(2, 16))
        self.net = net


def same(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :8], x[:, 8:]


def case(views: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Case:
    plan = PipelinePlan(replicas=((0, 1),), split=(2, 1))
    return Case(lambda: Skips(views), options={"plan": plan})


def refusal(context: RankContext) -> str:
    with pytest.raises(UnsupportedStepError) as error:
        fit(context, case(same))
    return str(error.value)


def test_a_change_of_an_input_that_shares_memory_is_refused(pool: RankPool) -> None:
    for message in pool.run(refusal, 2):
        assert "Adds must not change one of its inputs in place" in message
        assert "clone()" in message


def train_on_halves(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, {"halves": case(halves)})


def test_parts_of_one_tensor_that_do_not_overlap_may_change(pool: RankPool) -> None:
    assert pool.run(train_on_halves, 2) == no_differences_in({"halves": case(halves)})
