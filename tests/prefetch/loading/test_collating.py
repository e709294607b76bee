"""Collation against torch's own, for all kinds of items."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lightning_dlres.prefetch.loading.workers import _MIN_REUSED_BYTES, Collator

Pair = namedtuple("Pair", "first second")


def tensor(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)


@pytest.mark.parametrize(
    "items",
    [
        [tensor(3, 4), tensor(3, 4) + 1],
        [tensor(3, 4).t(), tensor(3, 4).t()],
        [torch.tensor(1), torch.tensor(2)],
        [tensor(0, 2), tensor(0, 2)],
        [tensor(2, dtype=torch.bfloat16), tensor(2, dtype=torch.bfloat16)],
        [tensor(2, dtype=torch.complex64).conj(), tensor(2, dtype=torch.complex64)],
        [tensor(2, dtype=torch.bool), tensor(2, dtype=torch.bool)],
        [tensor(2).requires_grad_(), tensor(2)],
        [torch.nn.Parameter(tensor(2)), torch.nn.Parameter(tensor(2))],
        [(tensor(2), 1, "a"), (tensor(2), 2, "b")],
        [[tensor(2), 1.5], [tensor(2), 2.5]],
        [{"a": tensor(2), "b": (1, "y")}, {"b": (2, "x"), "a": tensor(2)}],
        [Pair(tensor(1), 2), Pair(tensor(1), 3)],
        [np.arange(3), np.arange(3)],
        [1, 2, 3],
        [],
        [tensor(2), tensor(3)],
        [tensor(2), tensor(2, dtype=torch.int64)],
        [(1, 2), (1,)],
        [{"a": 1}, {"b": 1}],
        [tensor(2), 3],
        [None, None],
    ],
    ids=str,
)
def test_batches_equal_those_of_torch(items: list[Any]) -> None:
    try:
        expected = default_collate(items)
    except Exception as error:
        with pytest.raises(type(error)):
            Collator()(items)
        return
    batch = Collator()(items)
    assert repr(batch) == repr(expected)
    assert type(batch) is type(expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bool, torch.float16])
def test_large_batches_reuse_the_memory_of_freed_batches(dtype: torch.dtype) -> None:
    collate = Collator()
    # A batch of four items is large enough for reuse, even with one byte per element.
    count = _MIN_REUSED_BYTES // 4

    def batch(value: int) -> Any:
        item = (torch.full((2, count // 2), value, dtype=dtype), value)
        return collate([item] * 4)[0]

    first = batch(1)
    # A view keeps the memory of the batch.
    view = first[1:, :1].numpy()
    address = first.data_ptr()
    del first
    second = batch(0)
    assert second.data_ptr() != address
    assert view.all()
    assert torch.equal(second, torch.zeros(4, 2, count // 2, dtype=dtype))
    del view
    third = batch(1)
    assert third.data_ptr() == address
    assert third.is_contiguous()
    assert third.all()
    assert not second.any()
