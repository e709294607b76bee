"""Operations on tensors that another stage holds: writes do nothing, and reads are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.stage.remote_parameters import mark_remote, remote_buffer


def remote_weight() -> nn.Parameter:
    weight = nn.Parameter(torch.ones(3, 2, device="meta"))
    mark_remote(weight)
    return weight


def set_data(weight: Tensor, values: Tensor) -> None:
    weight.data = values


# The rank that holds the weight does the same write.
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda weight, values: weight.copy_(values),
    "lerp_": lambda weight, values: weight.lerp_(values, 0.1),
    "lerp_ by tensor": lambda weight, values: weight.lerp_(values, values),
    "mul_ and add_": lambda weight, values: weight.mul_(0.9).add_(values, alpha=0.1),
    "addcmul_": lambda weight, values: weight.addcmul_(values, values, value=0.5),
    "masked_fill_": lambda weight, values: weight.masked_fill_(values > 0, 0.0),
    "where": lambda weight, values: weight.copy_(torch.where(values > 0, values, 0.0)),
    "data": set_data,
    "data.copy_": lambda weight, values: weight.data.copy_(values),
}
READS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "lerp_": lambda weight, values: values.lerp_(weight, 0.1),
    "add_": lambda weight, values: values.add_(weight, alpha=0.1),
    "copy_": lambda weight, values: values.copy_(weight),
    "item": lambda weight, values: weight.sum().item(),
    "stack": lambda weight, values: torch.stack([weight, values]),
}


@pytest.mark.parametrize("name", WRITES)
@torch.no_grad()
def test_a_write_to_a_remote_tensor_leaves_it_remote(name: str) -> None:
    values = torch.rand(3, 2)
    before = values.clone()
    for remote in (remote_weight(), remote_buffer(torch.ones(3, 2))):
        kind = type(remote)
        WRITES[name](remote, values)
        assert remote.is_meta
        assert type(remote) is kind
    assert torch.equal(values, before)


@pytest.mark.parametrize("name", READS)
@torch.no_grad()
def test_a_read_of_a_remote_tensor_is_refused(name: str) -> None:
    values = torch.ones(3, 2)
    with pytest.raises(UnsupportedStepError, match="needs the values of a weight or buffer"):
        READS[name](remote_weight(), values)
    assert torch.equal(values, torch.ones(3, 2))


@torch.no_grad()
def test_a_write_of_another_shape_fails_as_on_the_rank_that_holds_the_weight() -> None:
    with pytest.raises(RuntimeError, match="broadcast"):
        remote_weight().lerp_(torch.ones(3, 5), 0.1)
