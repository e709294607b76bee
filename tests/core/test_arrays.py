"""Arrays over the memory of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_dlres.core.arrays import array_of, byte_array, typed_array
from lightning_dlres.core.errors import ConfigError


def test_an_array_shares_the_tensors_memory_and_keeps_it() -> None:
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    floats, doubles = typed_array(tensor, "<f4"), typed_array(tensor.double(), "<f8")
    floats[1] = 9
    assert tensor[0, 1] == 9
    assert floats.tolist() == [0, 9, 2, 3, 4, 5]
    # The tensor of these numbers has no other reference.
    assert doubles.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_bytes_are_those_of_the_elements(dtype: torch.dtype) -> None:
    tensor = torch.arange(5).to(dtype)
    assert byte_array(tensor).tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_an_empty_tensor_has_an_empty_array() -> None:
    assert array_of(torch.empty(0, dtype=torch.uint8)).dtype == np.uint8
    assert typed_array(torch.empty(0), "<f4").shape == byte_array(torch.empty(0)).shape == (0,)


def test_memory_that_is_not_in_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor must be contiguous and on the CPU"):
        typed_array(torch.zeros(4, 4).t(), "<f4")
