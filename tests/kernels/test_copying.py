"""Tests that copies past the cache copy all bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.kernels import copying
from lightning_dlres.kernels.copying import copy_past_cache
from tests.support.examples import examples


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@settings(max_examples=examples(60))
@given(
    count=st.integers(1, 3000),
    to=st.integers(0, 70),
    start=st.integers(0, 70),
)
def test_any_bytes_are_copied_between_any_offsets(count: int, to: int, start: int) -> None:
    source = torch.randint(256, (start + count,), dtype=torch.uint8)[start:]
    target = torch.full((to + count + 100,), 7, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_LEAST_BYTES", 1)
        copy_past_cache(target[to : to + count], source)
    assert torch.equal(target[to : to + count], source)
    assert bool((target[:to] == 7).all())
    assert bool((target[to + count :] == 7).all())


def test_a_large_copy_is_complete_and_seen_by_autograd() -> None:
    source = torch.randint(256, ((5 << 20) + 13,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    version = target._version
    assert copy_past_cache(target, source) is target
    assert torch.equal(target, source)
    assert target._version > version


def test_overlapping_memory_is_copied_as_torch_does() -> None:
    memory = torch.arange(256, dtype=torch.uint8).repeat(1 << 13)
    count = 1 << 20
    assert not copying._can_stream(memory[:count], memory[100 : count + 100], count)
    if copying.has_avx2():
        assert copying._can_stream(memory[:count], memory[count : 2 * count], count)


def test_different_sizes_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="size"):
        copy_past_cache(
            torch.zeros(1 << 21, dtype=torch.uint8), torch.zeros(3, 5, dtype=torch.uint8)
        )
