"""Copies of tensors and arrays share memory exactly where their originals do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dlres.pipeline.stage.shared_memory import (
    copies_in_shared_memory,
)

BASE = 48


def view_of(base: Any, part: tuple[int, int, int, bool]) -> Any:
    """Return every n-th element of a part of a tensor or array, some as arrays of another dtype."""
    start, length, step, as_bytes = part
    if isinstance(base, Tensor):
        piece = base[start : start + length]
        return piece.view(torch.int32)[::step] if as_bytes else piece[::step]
    piece = base[start : start + length]
    return piece.view(np.uint8)[::-step] if as_bytes else piece[::-step]


PARTS = st.tuples(st.integers(0, BASE - 1), st.integers(1, BASE), st.integers(1, 3), st.booleans())


@given(
    views=st.lists(st.tuples(st.integers(0, 1), PARTS), min_size=2, max_size=6),
    writes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4),
)
def test_writes_show_in_the_same_copies_as_in_originals(
    views: list[tuple[int, Any]], writes: list[tuple[int, int]]
) -> None:
    memory = torch.arange(BASE, dtype=torch.float32)
    bases: list[Any] = [memory, memory.numpy()]
    originals = [view_of(bases[kind], part) for kind, part in views]
    found = copies_in_shared_memory(originals)
    pairs = [(original, found[id(original)]) for original in originals if id(original) in found]
    for original, copy in pairs:
        assert type(copy) is type(original)
        assert not np.shares_memory(np.asarray(original), np.asarray(copy))
    for index, value in writes:
        if index < len(pairs):
            for side in pairs[index]:
                side[:] = value
    for original, copy in pairs:
        assert np.array_equal(np.asarray(original), np.asarray(copy))
    alone = [original for original in originals if id(original) not in found]
    for original in alone:
        others = [np.asarray(other) for other in originals if other is not original]
        assert not any(np.shares_memory(np.asarray(original), other) for other in others)


@pytest.mark.parametrize(
    "others",
    [
        [torch.zeros(3, device="meta"), torch.empty(0)],
        [torch.zeros(3, requires_grad=True), np.array([object()])],
        [torch.zeros(2, dtype=torch.complex64).conj(), torch.eye(2).to_sparse()],
    ],
)
def test_others_are_left_alone(others: list[Any]) -> None:
    shared = torch.zeros(4)
    found = copies_in_shared_memory([shared, shared[1:], shared.numpy(), *others])
    assert len(found) == 3
    found[id(shared)].fill_(2.0)
    assert {float(copy[0]) for copy in found.values()} == {2.0}


def test_read_only_arrays_stay_read_only() -> None:
    array = np.zeros(4)
    view = array[1:]
    view.flags.writeable = False
    found = copies_in_shared_memory([array, view])
    assert not found[id(view)].flags.writeable
    found[id(array)][1] = 3.0
    assert found[id(view)][0] == 3.0
