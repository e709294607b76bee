"""Equal batches have the same fingerprint, and different batches have different ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.pipeline.execute.digest import digest
from tests.support.examples import examples

# Largest tensor that is read completely; larger ones are sampled.
WHOLE_BYTES = 1 << 20


def rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 37, generator=torch.Generator().manual_seed(1)).to(dtype)


SMALL, LARGE = rows(50), rows(40_000)
# Rows of one 8-byte word each: their sum does not depend on the order.
WORDS = torch.arange(400_000, dtype=torch.int32).view(-1, 2)


def distinct(*trees: Any) -> bool:
    return len({digest(tree) for tree in trees}) == len(trees)


def test_structure_dtype_shape_and_content_change_the_fingerprint() -> None:
    x = torch.arange(6.0)
    assert distinct(
        x,
        x.view(2, 3),
        x.view(3, 2),
        x.to(torch.float64),
        x.to(torch.int32),
        x.view(torch.int32),
        x.numpy(),
        x.flip(0),
        -x,
        [x],
        (x,),
        {"x": x},
        {"y": x},
        [x, x],
        [x, None],
        [x, 0],
        [x, 0.0],
        [x, False],
        [x, ""],
        [x, "a"],
        [x[:3], x[3:]],
        [x[:2], x[2:]],
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.zeros(()),
        None,
    )


def test_an_equal_batch_has_the_same_fingerprint() -> None:
    tree = {"x": [SMALL, LARGE], "y": ("label", 3)}
    copy = {"x": [SMALL.clone(), LARGE.clone()], "y": ("label", 3)}
    assert digest(tree) == digest(copy)
    assert 0 <= digest(tree) < 2**32
    assert digest(SMALL) == digest(SMALL.clone().requires_grad_()), "only the content counts"


@settings(max_examples=examples(60))
@given(st.sampled_from([SMALL, LARGE]), st.data())
def test_one_changed_bit_changes_the_fingerprint(x: torch.Tensor, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, x.numel() - 1))
    bit = data.draw(st.integers(0, 31))
    other = x.clone()
    other.view(-1).view(torch.int32)[index] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert digest(other) != digest(x)


@settings(max_examples=examples(30))
@given(st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("x", [SMALL, LARGE, WORDS], ids=["small", "large", "words"])
def test_a_shuffle_changes_the_fingerprint(x: torch.Tensor, seed: int) -> None:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    assert digest(x[order]) != digest(x)


@pytest.mark.parametrize("offset", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("count", [1000, WHOLE_BYTES, WHOLE_BYTES + 1, WHOLE_BYTES + 4101])
def test_alignment_does_not_change_the_fingerprint(count: int, offset: int) -> None:
    storage = torch.arange(count + 8, dtype=torch.int32).to(torch.uint8)
    view = storage[offset : offset + count]
    assert digest(view) == digest(view.clone())
    raw = np.frombuffer(storage.numpy().tobytes(), dtype=np.uint8)[offset : offset + count]
    assert digest(torch.from_numpy(raw.copy())) == digest(view)
    end = view.clone()
    end[-1] += 1
    assert digest(end) != digest(view), "bytes after the last whole word count"


@pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
def test_strides_do_not_change_the_fingerprint(x: torch.Tensor) -> None:
    spread = torch.zeros(len(x), 80)
    spread[:, 3:77:2] = x
    for view in (x.t().contiguous().t(), spread[:, 3:77:2], x.flip(0).flip(0)):
        assert digest(view) == digest(x)
    z = torch.complex(x, -x)
    assert digest(z.conj()) == digest(torch.complex(x, x))
    assert digest(z.conj().imag) == digest(x)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64],
    ids=str,
)
@pytest.mark.parametrize("count", [0, 3, 60_000])
def test_every_dtype_has_a_fingerprint(dtype: torch.dtype, count: int) -> None:
    x = rows(count).to(dtype)
    assert digest(x) == digest(x.clone())
    assert distinct(x, x.view(-1))


def test_a_one_element_view_has_one_fingerprint() -> None:
    assert digest(SMALL[:1, 0]) == digest(SMALL[0, :1])
