"""A tensor's memory as a NumPy array. `Tensor.numpy` does that too, but forbids from then on to
resize the tensor's storage, which others do: FSDP frees parameters so."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_dlres.core.errors import ConfigError


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
    """Return the memory of uint8[n], contiguous and on the CPU, as an array.

    Raises:
        ConfigError: the tensor is not that, or has no memory (a fake one).
    """
    if not tensor.numel():
        return np.empty(0, np.uint8)
    require_memory(tensor)
    return np.asarray(_Memory(tensor))


def require_memory(tensor: Tensor) -> None:
    """Raise where the bytes of a tensor cannot be read one after another from its address.

    Raises:
        ConfigError: the tensor is not contiguous or not on the CPU, or has no memory (a fake one).
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.data_ptr():
        raise ConfigError(
            f"memory of a tensor: got {tuple(tensor.shape)} of strides {tensor.stride()} on "
            f"{tensor.device}, expected contiguous bytes of the CPU. Try contiguous() or cpu()."
        )
