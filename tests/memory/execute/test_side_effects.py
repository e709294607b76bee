"""Side effects of a forward, and the checksums that find them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.memory.execute import side_effects
from lightning_dlres.memory.execute.side_effects import SideEffectProbe, checksum

DTYPES = [
    *(torch.bool, torch.uint8, torch.float8_e5m2, torch.int16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.int64, torch.complex64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksums_differ_if_any_two_elements_change_places(dtype: torch.dtype) -> None:
    for one in range(7):
        x = torch.zeros(7).index_fill_(0, torch.tensor(one), 1).to(dtype)
        assert checksum(x) == checksum(x.clone())
        others = {checksum(x.roll(by)) for by in range(7)}
        assert len(others) == 7


# Sums with the weights 1, 2, 3, ... are equal, or those of rows and columns.
@pytest.mark.parametrize(
    ("some", "others"),
    [([1, 0, 0, 1], [0, 1, 1, 0]), ([[1, 0], [0, 1]], [[0, 1], [1, 0]]), ([[1, 2]], [[1], [2]])],
)
def test_checksums_of_similar_tensors_differ(some: list[float], others: list[float]) -> None:
    assert checksum(torch.tensor(some)) != checksum(torch.tensor(others))
    assert checksum(torch.tensor(some)) != checksum(torch.tensor(some).float())


def test_checksums_depend_on_the_order_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_effects, "_CHUNK", 4)
    x = torch.arange(10.0)
    # The last chunk is a short one.
    sums = {checksum(x.roll(by)) for by in range(10)}
    assert len(sums) == 10


def test_checksums_depend_on_values_not_on_strides() -> None:
    x = torch.randn(3, 5)
    assert checksum(x) == checksum(x.t().contiguous().t()) != checksum(-x)


def test_checksums_leave_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    checksum(torch.ones(3))
    assert torch.equal(before, torch.get_rng_state())


class Changes(nn.Module):
    """Module that changes its buffer without a new version."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("order", torch.arange(4.0))

    def forward(self) -> None:
        self.order.data = self.change(self.order.data)


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: x.flip(0), lambda x: x.view(2, 2)])
def test_a_change_of_a_buffers_data_is_a_side_effect(change: Callable[[Tensor], Tensor]) -> None:
    module = Changes(change)
    probe = SideEffectProbe(module)
    assert not probe.has_side_effects()
    module()
    assert probe.has_side_effects()
