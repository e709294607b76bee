"""Calls with other arguments than the first one: without a mask, with labels, with another flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.capture.forms import form_of, inputs_like, tensor_places
from lightning_dlres.pipeline.capture.placeholders.skeleton import Skeleton
from lightning_dlres.pipeline.capture.tracing.capturing import capture
from tests.support.captured_chains import assert_alike, chain_result, plain_result
from tests.support.examples import examples

FEATURES, BLOCKS = 4, 3


class Optional(nn.Module):
    """Module with arguments that may be left out, each of them used at some place.

    Args:
        places: Number of the block after which each argument is used.
    """

    def __init__(self, places: dict[str, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(BLOCKS))
        self.filler = nn.Parameter(torch.linspace(0.5, 1.5, FEATURES))
        self.places = places

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        pairs: list[Tensor] | None = None,
        labels: Tensor | None = None,
        features: bool = False,
        task: str = "sum",
    ) -> dict[str, Any]:
        kept = []
        for number, block in enumerate(self.blocks):
            x = block(x).tanh()
            if mask is not None and self.places["mask"] == number:
                x = x * mask + self.filler * (1 - mask)
            if pairs is not None and self.places["pairs"] == number:
                x = x + sum(pairs)
            if task == "product" and self.places["task"] == number:
                x = x * x.flip(1)
            kept.append(x)
        output = {"out": x}
        if labels is not None:
            output["loss"] = F.mse_loss(x, labels)
        if features:
            output["features"] = kept[self.places["features"]]
        return output


ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "mask": lambda draw: draw(4).round(),
    "pairs": lambda draw: [draw(4), draw(4)],
    "labels": lambda draw: draw(4),
    "features": lambda draw: True,
    "task": lambda draw: "product",
}
forms = st.permutations(sorted(ARGUMENTS)).flatmap(
    lambda names: st.integers(0, len(names)).map(lambda count: names[:count])
)


def call_of(names: list[str], seed: int, samples: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(features: int) -> Tensor:
        return torch.rand(samples, features, generator=generator)

    return (draw(FEATURES),), {name: ARGUMENTS[name](draw) for name in names}


@settings(max_examples=examples(40))
@given(
    first=forms,
    later=st.lists(forms, min_size=1, max_size=2),
    places=st.fixed_dictionaries({name: st.integers(0, BLOCKS - 1) for name in ARGUMENTS}),
    samples=st.integers(1, 4),
    cuts=st.sets(st.integers(1, BLOCKS - 1)).map(sorted),
    is_training=st.booleans(),
)
def test_a_call_may_have_other_arguments_than_the_first_one(
    first: list[str],
    later: list[list[str]],
    places: dict[str, int],
    samples: int,
    cuts: list[int],
    is_training: bool,
) -> None:
    module = Optional(places)
    captured = capture(module, call_of(first, 0, 3))
    module.train(is_training)
    for seed, names in enumerate([*later, first], start=1):
        inputs = call_of(names, seed, samples)
        assert_alike(chain_result(captured, inputs, cuts), plain_result(captured, inputs))


class Sequences(nn.Module):
    """Module that may get one bias for each place of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = self.first(x)
        return self.second(x if bias is None else x + bias)


def test_arguments_that_do_not_fit_the_first_samples_are_refused_with_a_way_out() -> None:
    captured = capture(Sequences(), ((torch.ones(3, 5, FEATURES),), {}))
    inputs = (torch.ones(3, 7, FEATURES),), {"bias": torch.ones(7, 1)}
    with pytest.raises(UnsupportedStepError, match="same arguments in each call, or cut the step"):
        chain_result(captured, inputs, [1])


class InPlace(nn.Module):
    """Module whose second submodule changes its input in place, so that it cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(FEATURES, FEATURES))

    def forward(self, x: Tensor, doubled: bool = False, as_dict: bool | None = None) -> Any:
        x = self.first(x)
        x = self.second(x * 2 if doubled else x)
        return {"out": x} if as_dict else x


def test_flags_without_other_operations_need_no_recording() -> None:
    captured = capture(InPlace(), ((torch.randn(3, FEATURES),), {}))
    for options in ({"as_dict": True}, {"as_dict": None}, {"doubled": False}):
        inputs = (torch.randn(3, FEATURES),), options
        assert_alike(chain_result(captured, inputs, [1]), plain_result(captured, inputs))
    with pytest.raises(UnsupportedStepError):
        chain_result(captured, ((torch.randn(3, FEATURES),), {"doubled": True}), [1])


def test_places_of_tensors_are_those_in_the_arguments() -> None:
    x, array = torch.ones(2), np.ones(2)
    form = form_of(Skeleton.of(((x, None, [x, 1]), {"a": (True, x), "b": array})))
    same = form_of(Skeleton.of(((x, 2, [x, "c"]), {"a": ("d", x), "b": array})))
    assert form != same
    assert len(tensor_places(form)) == 4
    assert tensor_places(form) == tensor_places(same)
    other = form_of(Skeleton.of(((x, None, [1, x]), {"a": (True, x), "b": array})))
    assert tensor_places(form) != tensor_places(other)


def test_numbers_and_names_of_samples_are_no_part_of_a_form() -> None:
    x = torch.ones(2, 3)
    same = [
        ((x, 1, 0.5), {"names": ["a", "b"]}),
        ((x[:1], 2, float("nan")), {"names": ["c", "d"]}),
    ]
    assert len({form_of(Skeleton.of(one)) for one in same}) == 1
    others = [
        ((x, 1, None), {"names": ["a", "b"]}),
        ((x, 1, True), {"names": ["a", "b"]}),
        ((x, 1, "a"), {"names": ["a", "b"]}),
        ((x, 1, "b"), {"names": ["a", "b"]}),
        ((x, 1, 0.5), {"names": ["a"]}),
        ((x, 1, 0.5), {"ids": ["a", "b"]}),
        ((1, x, 0.5), {"names": ["a", "b"]}),
    ]
    assert len({form_of(Skeleton.of(one)) for one in (same[0], *others)}) == 1 + len(others)


def test_known_tensors_are_those_of_the_first_call_and_others_fit_its_samples() -> None:
    first = (torch.rand(3, 2),), {"mask": torch.rand(3), "labels": torch.rand(3)}
    skeleton = Skeleton.of(
        ((torch.rand(5, 2),), {"labels": torch.rand(5), "weights": torch.rand(5, 4)})
    )
    (x,), others = inputs_like(first, skeleton, samples=5)
    assert x is first[0][0]
    assert list(others) == ["labels", "weights"]
    assert others["labels"] is first[1]["labels"]
    assert torch.equal(others["weights"], torch.zeros(3, 4))
