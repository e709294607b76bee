"""Results of operations without data: what they depend on, and what is not kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dlres.pipeline.capture.placeholders.shape_inference import UNKNOWN, ShapeInference

CPU = torch.device("cpu")


class Counted:
    """Function of torch that counts its runs."""

    def __init__(self, function: Any) -> None:
        self.function, self.runs = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.function(*args, **kwargs)


def test_a_result_is_computed_once_for_equal_shapes() -> None:
    shapes, add = ShapeInference(), Counted(torch.add)
    for _ in range(3):
        result = shapes.result(add, (torch.zeros(2, 3), torch.zeros(3)), {}, CPU)
        assert result.shape == (2, 3)
    assert add.runs == 1
    assert shapes.result(add, (torch.zeros(4, 3), torch.zeros(3)), {}, CPU).shape == (4, 3)
    assert add.runs == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((torch.zeros(2), 1), (torch.zeros(2), 1.0)),
        ((torch.zeros(2, dtype=torch.int64), 1), (torch.zeros(2, dtype=torch.int64), True)),
        ((torch.zeros(2), 1), (torch.zeros(2, requires_grad=True), 1)),
        ((torch.zeros(2), 1), (torch.zeros(2, dtype=torch.float64), 1)),
    ],
)
def test_arguments_that_differ_have_results_of_their_own(first: Any, second: Any) -> None:
    shapes = ShapeInference()
    for args in (first, second):
        result, expected = shapes.result(torch.add, args, {}, CPU), torch.add(*args)
        assert (result.dtype, result.requires_grad) == (expected.dtype, expected.requires_grad)


def test_settings_of_torch_are_part_of_what_a_result_depends_on() -> None:
    shapes = ShapeInference()
    args = torch.zeros(2, 2, requires_grad=True), torch.zeros(2, 2)

    def product() -> Tensor:
        result: Tensor = shapes.result(torch.matmul, args, {}, CPU)
        return result

    assert product().requires_grad
    with torch.no_grad():
        assert not product().requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert product().dtype == torch.bfloat16
    assert product().dtype == torch.float32


def test_an_operation_without_tensors_runs_each_time() -> None:
    shapes, change = ShapeInference(), Counted(lambda value: torch._C._set_grad_enabled(value))
    with torch.enable_grad():
        for _ in range(2):
            shapes.result(change, (False,), {}, CPU)
    assert change.runs == 2


def test_a_result_that_depends_on_values_is_unknown() -> None:
    shapes = ShapeInference()
    assert shapes.result(torch.nonzero, (torch.zeros(3),), {}, CPU) is UNKNOWN


def test_an_argument_without_a_hash_is_allowed() -> None:
    shapes, function = ShapeInference(), Counted(lambda tensor, names: tensor + len(names))
    for _ in range(2):
        assert shapes.result(function, (torch.zeros(3), {1, 2}), {}, CPU).shape == (3,)
    assert function.runs == 2
