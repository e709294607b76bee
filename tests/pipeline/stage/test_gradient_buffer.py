"""The buffer sums dense and sparse gradients, and never writes to tensors of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer


def test_the_buffer_never_writes_to_gradients_that_share_storage() -> None:
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    gradient, expanded = torch.ones(3), torch.ones(1).expand(3)
    buffer = GradientBuffer()
    for _ in range(3):
        buffer.add(a, gradient)
        buffer.add(b, gradient)
        buffer.add(b, expanded)
    assert torch.equal(gradient, torch.ones(3))
    assert torch.equal(expanded, torch.ones(3))
    assert buffer.gradients[a].tolist() == [3.0] * 3
    assert buffer.gradients[b].tolist() == [6.0] * 3


def sparse() -> Tensor:
    return torch.sparse_coo_tensor([[1]], [[1.0, 1.0]], (3, 2), check_invariants=True)


def total_of(*gradients: Tensor) -> Tensor:
    parameter, buffer = nn.Parameter(torch.zeros(3, 2)), GradientBuffer()
    for gradient in gradients:
        buffer.add(parameter, gradient)
    return buffer.gradients[parameter].to_dense()


def test_sparse_gradients_are_summed() -> None:
    expected = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert torch.equal(total_of(sparse(), sparse(), sparse()), 3 * expected)
    dense = torch.ones(3, 2)
    assert torch.equal(total_of(dense, sparse(), sparse(), dense), 2 * expected + 2)
    assert torch.equal(dense, torch.ones(3, 2))


def test_a_dense_gradient_can_follow_a_sparse_one() -> None:
    assert float(total_of(sparse(), torch.ones(3, 2)).sum()) == 8.0


def test_autograd_never_writes_to_a_sum_that_was_put_in() -> None:
    parameter, shared, buffer = nn.Parameter(torch.ones(3)), torch.ones(3), GradientBuffer()
    buffer.add(parameter, shared)
    with buffer.as_grad([parameter]):
        (2 * parameter.sum()).backward()  # type: ignore[no-untyped-call]
    assert shared.tolist() == [1.0] * 3
    assert buffer.gradients[parameter].tolist() == [3.0] * 3


def test_a_sum_can_change_while_it_is_lent() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    buffer, total = GradientBuffer(keeps_grad=True), torch.full((3,), 5.0)
    for _ in range(2):
        with buffer.as_grad([first, second]):
            (first.sum() + second.sum()).backward()  # type: ignore[no-untyped-call]
    buffer.add(first, torch.ones(3))
    buffer.put(second, total)
    for _ in range(2):
        with buffer.as_grad([first, second]):
            (first.sum() + second.sum()).backward()  # type: ignore[no-untyped-call]
    # A hook of a layer may replace a gradient.
    first.grad = 10 * first.grad if first.grad is not None else None
    buffer.give_back()
    assert first.grad is None
    assert second.grad is None
    assert total.tolist() == [5.0] * 3
    assert buffer.gradients[first].tolist() == [50.0] * 3
    assert buffer.gradients[second].tolist() == [7.0] * 3


def test_only_new_sums_are_reported_as_new_storages() -> None:
    parameter, buffer = nn.Parameter(torch.ones(3)), GradientBuffer(keeps_grad=True)
    counts = []
    for _ in range(3):
        with buffer.as_grad([parameter]):
            parameter.sum().backward()  # type: ignore[no-untyped-call]
        counts.append(len(buffer.pop_new_storages()))
    buffer.give_back()
    assert counts == [1, 0, 0]
    assert buffer.gradients[parameter].tolist() == [3.0] * 3


@pytest.mark.parametrize("keeps_grad", [False, True])
def test_sums_are_lent_to_autograd_and_previous_gradients_come_back(keeps_grad: bool) -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    previous = torch.full((3,), 7.0)
    first.grad = previous
    buffer = GradientBuffer(keeps_grad=keeps_grad)
    for factor in (1.0, 2.0):
        with buffer.as_grad([first, second]):
            (factor * first.sum()).backward()  # type: ignore[no-untyped-call]
        assert (first.grad is previous) is not keeps_grad
    assert second not in buffer.gradients
    total = buffer.pop(first)
    assert total is not None
    assert total.tolist() == [3.0] * 3
    # A sum that was taken is not added to again.
    with buffer.as_grad([first, second]):
        (first.sum() + second.sum()).backward()  # type: ignore[no-untyped-call]
    buffer.give_back()
    assert first.grad is previous
    assert previous.tolist() == [7.0] * 3
    assert second.grad is None
    assert total.tolist() == [3.0] * 3
    assert {p: g.tolist() for p, g in buffer.gradients.items()} == {
        first: [1.0] * 3,
        second: [1.0] * 3,
    }
