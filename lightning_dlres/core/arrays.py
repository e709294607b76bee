"""Views of a tensor's memory as a NumPy array, without `Tensor.numpy`.

`Tensor.numpy` forbids any later resizing of the tensor's storage, and FSDP frees parameters by
resizing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_dlres.core.errors import ConfigError


class _Memory:
    """Object with NumPy's array interface over a tensor's memory."""

    def __init__(self, tensor: Tensor) -> None:
        # The array holds this object, and so keeps the tensor alive.
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (tensor.numel(),),
            "data": (tensor.data_ptr(), False),
        }


def array_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a contiguous uint8[n] tensor on the CPU as an array.

    Raises:
        ConfigError: If the tensor is not contiguous or not on the CPU, or is fake.
    """
    if not tensor.numel():
        return np.empty(0, np.uint8)
    require_memory(tensor)
    return np.asarray(_Memory(tensor))


def require_memory(tensor: Tensor) -> None:
    """Raise unless the bytes of a tensor can be read in sequence from its address.

    Raises:
        ConfigError: If the tensor is not contiguous or not on the CPU, or is fake.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.data_ptr():
        raise ConfigError(
            f"tensor must be contiguous and on the CPU, got {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} on {tensor.device}. Use its contiguous() or cpu()."
        )
