"""Comparison of tensors of every layout, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dlres.strategies.hetero_pipe.replay.buffers import NonPipelinedBuffers
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import same_tensors
from lightning_dlres.strategies.hetero_pipe.step.module_search import find_pipelined_module
from tests.support.training_cases import Classifier

NAN = float("nan")


def coo(values: Sequence[float], columns: Sequence[int] = (1, 3)) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2], list(columns)]), list(values), (4, 4))


def dense(values: Sequence[float]) -> Tensor:
    result = torch.zeros(4, 4)
    result[0, 1], result[1, 0] = values
    return result


def nested(values: Sequence[float], layout: torch.layout = torch.strided) -> Tensor:
    parts = [torch.tensor(values), torch.tensor([*values, 7.0])]
    result: Tensor = torch.nested.nested_tensor(parts, layout=layout)
    return result


def quantized(values: Sequence[float]) -> Tensor:
    values = [9.0 if value != value else value for value in values]
    return torch.quantize_per_tensor(torch.tensor(values), 0.1, 0, torch.quint8)


MAKERS: dict[str, Callable[[Sequence[float]], Tensor]] = {
    "dense": dense,
    "coo": coo,
    "coalesced coo": lambda values: coo(values).coalesce(),
    "csr": lambda values: coo(values).to_sparse_csr(),
    "csc": lambda values: coo(values).to_sparse_csc(),
    "bsr": lambda values: dense(values).to_sparse_bsr((2, 2)),
    "bsc": lambda values: dense(values).to_sparse_bsc((2, 2)),
    "nested": nested,
    "jagged": lambda values: nested(values, torch.jagged),
    "quantized": quantized,
    "mkldnn": lambda values: torch.tensor(values).to_mkldnn(),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_tensors_of_any_layout_are_compared_by_value(kind: str) -> None:
    make = MAKERS[kind]
    one = make([1.0, NAN])
    assert same_tensors(one, one)
    assert same_tensors(one, one.clone())
    assert same_tensors(one, make([1.0, NAN]))
    assert not same_tensors(one, make([1.0, 2.0]))
    for other in MAKERS.keys() - {kind}:
        assert not same_tensors(one, MAKERS[other]([1.0, NAN]))


@pytest.mark.parametrize("kind", [one for one in MAKERS if one != "quantized"])
def test_zeros_of_different_signs_differ(kind: str) -> None:
    assert not same_tensors(MAKERS[kind]([0.0, 1.0]), MAKERS[kind]([-0.0, 1.0]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (coo([1, 2]), coo([1, 2], columns=[1, 2])),
        (coo([1, 2]), coo([1, 2]).double()),
        (coo([1, 2]), torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 4), (4, 4))),
        (nested([1, 2]), nested([1, 2, 3])),
        (torch.empty(2, device="meta"), torch.empty(3, device="meta")),
        (torch.empty(2, device="meta"), torch.empty(2)),
    ],
)
def test_tensors_of_other_indices_shapes_or_dtypes_differ(one: Tensor, other: Tensor) -> None:
    assert not same_tensors(one, other)
    assert not same_tensors(other, one)


def test_tensors_without_values_are_the_same_if_their_shapes_are() -> None:
    assert same_tensors(torch.empty(2, device="meta"), torch.empty(2, device="meta"))


@pytest.mark.parametrize("kind", [one for one in MAKERS if one != "mkldnn"])
def test_a_buffer_of_any_layout_may_stay_as_it_is(kind: str) -> None:
    model: Any = Classifier()
    model.register_buffer("graph", MAKERS[kind]([1.0, 2.0]))
    buffers = NonPipelinedBuffers(find_pipelined_module(model, None).layers, torch.device("cpu"))
    before = buffers.snapshot()
    buffers.isolate(before)
    assert buffers.diff(before) == {}
    model.graph = MAKERS[kind]([1.0, 3.0])
    assert list(buffers.diff(before)) == ["graph"]
