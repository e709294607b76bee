"""A tensor's memory as a NumPy array. `Tensor.numpy` does that too, but forbids from then on to
resize the tensor's storage, which others do: FSDP frees parameters so."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class _Memory:
    def __init__(self, tensor: Tensor) -> None:
        # Lives as long as the array.
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (tensor.numel(),),
            "data": (tensor.data_ptr(), False),
        }


def array_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the memory of uint8[n], contiguous and on the CPU, as an array."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return np.asarray(_Memory(tensor))
