"""Views of a tensor's memory as a NumPy array, without `Tensor.numpy`.

`Tensor.numpy` forbids any later resizing of the tensor's storage, and FSDP frees parameters by
resizing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_dlres.core.errors import ConfigError


class _Memory:
    """Object with NumPy's array interface over a tensor's memory."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor, address: int, kind: str, count: int) -> None:
        # The array holds this object, and so keeps the tensor alive.
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": kind,
            "shape": (count,),
            "data": (address, False),
        }


def array_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a contiguous uint8[n] tensor on the CPU as an array.

    Raises:
        ConfigError: If the tensor is not contiguous or not on the CPU, or is fake.
    """
    return _array(tensor, "|u1", 1)


def byte_array(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a contiguous tensor on the CPU as an array of bytes.

    Raises:
        ConfigError: If the tensor is not contiguous or not on the CPU, or is fake.
    """
    return _array(tensor, "|u1", tensor.element_size())


def typed_array(tensor: Tensor, kind: str) -> NDArray[Any]:
    """Return the elements of a contiguous tensor on the CPU as a flat array.

    Args:
        tensor: The tensor.
        kind: NumPy's name of the tensor's dtype, such as "<f4".

    Raises:
        ConfigError: If the tensor is not contiguous or not on the CPU, or is fake.
    """
    return _array(tensor, kind, 1)


def _array(tensor: Tensor, kind: str, items_per_element: int) -> NDArray[Any]:
    # Operations such as `view` would release the interpreter's lock, which other threads then take.
    count = tensor.numel()
    if not count:
        return np.empty(0, kind)
    address = address_of(tensor)
    return np.asarray(_Memory(tensor, address, kind, count * items_per_element))


def address_of(tensor: Tensor) -> int:
    """Return the address from which the bytes of a tensor can be read in sequence.

    Raises:
        ConfigError: If the tensor is not contiguous or not on the CPU, or is fake.
    """
    address = tensor.data_ptr() if tensor.is_cpu and tensor.is_contiguous() else 0
    if not address:
        raise ConfigError(
            f"tensor must be contiguous and on the CPU, got {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} on {tensor.device}. Use its contiguous() or cpu()."
        )
    return address
