"""Delivery of gradients: they arrive in `.grad` as if backward had computed them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dlres.core._compat import hooks_suspended
from lightning_dlres.pipeline.execute.training import with_gradients
from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer
from lightning_dlres.pipeline.stage.stage import Stage


def parameters(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3)) for _ in range(count)]


def loss_of(*pairs: tuple[nn.Parameter, Tensor], value: float = 7.0, scale: float = 1.0) -> Tensor:
    return with_gradients(torch.tensor(value), dict(pairs), scale)


def test_gradients_arrive_and_the_loss_keeps_its_value() -> None:
    a, b = parameters()
    loss = loss_of((a, torch.ones(3)), (b, torch.arange(3.0)))
    assert loss.item() == 7.0
    assert a.grad is None, "before backward"
    loss.backward()
    assert a.grad is not None
    assert a.grad.tolist() == [1.0, 1.0, 1.0]
    assert b.grad is not None
    assert b.grad.tolist() == [0.0, 1.0, 2.0]


def test_gradients_are_added_to_existing_ones() -> None:
    (a,) = parameters(1)
    for step in range(3):
        (loss_of((a, torch.full((3,), 2.0**step))) / 2).backward()
    assert a.grad is not None
    assert a.grad.tolist() == [3.5] * 3


@given(st.sampled_from([1, 2, 4, 3]), st.sampled_from([1.0, 2.0**16, 0.5]))
def test_division_and_loss_scale_apply_to_gradients(accumulate: int, scale: float) -> None:
    (a,) = parameters(1)
    # As Lightning does: divide for accumulation, scale for mixed precision, run backward.
    loss = loss_of((a, torch.ones(3) * scale), scale=scale) / accumulate
    (loss * scale).backward()
    assert a.grad is not None
    assert torch.allclose(a.grad, torch.full((3,), scale / accumulate))


def test_an_infinite_gradient_arrives() -> None:
    (a,) = parameters(1)
    (loss_of((a, torch.tensor([1.0, float("inf"), float("nan")]))) * 2).backward()
    assert a.grad is not None
    assert torch.isfinite(a.grad).tolist() == [True, False, False]


def test_backward_works_on_a_stage_without_trainable_parameters() -> None:
    loss = loss_of()
    assert loss.requires_grad
    loss.backward()


def test_the_loss_can_be_read_and_changed_like_any_other() -> None:
    (a,) = parameters(1)
    original = torch.tensor(3.0, requires_grad=True)
    loss = with_gradients(original, {a: torch.ones(3)}, 1.0)
    assert loss.dim() == 0
    (loss * 2 + 1).backward()
    assert original.grad is None
    assert original.item() == 3.0
    assert a.grad is not None
    assert a.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_gradients_keep_their_dtype(dtype: torch.dtype) -> None:
    a = nn.Parameter(torch.zeros(3, dtype=dtype))
    (loss_of((a, torch.ones(3, dtype=dtype))) / 4).backward()
    assert a.grad is not None
    assert a.grad.dtype == dtype
    assert a.grad.tolist() == [0.25] * 3


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_gradients_with_shared_memory_get_separate_memory(factor: float) -> None:
    a, b = parameters()
    shared = torch.ones(3)
    (loss_of((a, shared), (b, shared)) * factor).backward()
    assert a.grad is not None
    assert b.grad is not None
    a.grad.mul_(5)
    assert a.grad.tolist() == [5 * factor] * 3
    assert b.grad.tolist() == [factor] * 3
    assert shared.tolist() == [1.0] * 3


def test_sparse_gradients_arrive() -> None:
    table = nn.Parameter(torch.zeros(4, 2))
    sparse = torch.sparse_coo_tensor(
        [[1, 1]], [[1.0, 2.0], [3.0, 4.0]], (4, 2), check_invariants=True
    )
    (loss_of((table, sparse)) / 2).backward()
    assert table.grad is not None
    assert table.grad.to_dense()[1].tolist() == [2.0, 3.0]


def test_post_accumulate_hooks_fire_once() -> None:
    a, b = parameters()
    calls: list[nn.Parameter] = []
    for parameter in (a, b):
        parameter.register_post_accumulate_grad_hook(calls.append)
    loss_of((a, torch.ones(3)), (b, torch.ones(3))).backward()
    assert sorted(map(id, calls)) == sorted(map(id, (a, b)))


def test_hooks_of_parameters_see_the_whole_gradient() -> None:
    (a,) = parameters(1)
    seen: list[list[float]] = []
    a.register_hook(lambda gradient: seen.append(gradient.tolist()))
    (loss_of((a, torch.ones(3))) / 2).backward()
    assert seen == [[0.5] * 3]


def test_parameter_hooks_fire_once_although_the_stage_computed_the_gradient() -> None:
    layer, x = nn.Linear(3, 1, bias=False), torch.ones(4, 3)
    layer.weight.register_hook(lambda gradient: gradient * 2)
    layer(x).mean().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    stage = Stage(
        [layer], [[layer.weight]], first_layer=0, device=torch.device("cpu"), context=nullcontext
    )
    buffer = GradientBuffer()
    with hooks_suspended(stage.parameters):
        for m, part in enumerate(x.chunk(2)):
            stage.backward(m, [torch.full_like(stage.forward(m, part, 1), 0.25)], buffer)
    with_gradients(torch.tensor(1.0), buffer.gradients, 1.0).backward()
    assert expected is not None
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, expected)
