"""Detection of parameters that other code has changed.

The servers hold the parameters. Changes of a rank to its own copy would be lost with the next
values, without a word, and its gradients would be those of other weights. Frozen parameters get no
values, so code may change them; that shows when they are trained again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.core.arrays import byte_array

# Integer of the same size, for sums of the bits of elements.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class EditedParameters:
    """Sums of the bits of parameters, to compare them later.

    Args:
        parameters: Parameters by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._sums: dict[str, int] = {}

    def remember(self) -> None:
        """Remember the present values of all trained parameters.

        Values of frozen parameters are remembered only at the first call.
        """
        for name, parameter in self._parameters.items():
            if parameter.requires_grad or name not in self._sums:
                self._sums[name] = bit_sum(parameter.detach())

    def names(self) -> list[str]:
        """Return the names of the parameters that are trained and have changed since."""
        return [
            name
            for name, parameter in self._parameters.items()
            if parameter.requires_grad and bit_sum(parameter.detach()) != self._sums[name]
        ]


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bits, read as integers, modulo 2**64.

    It passes once over the memory. Equal sums of different values are possible, but rare.
    """
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        data = byte_array(tensor)
        whole = len(data) // 8 * 8
        words = int(data[:whole].view(np.uint64).sum(dtype=np.uint64))
        return words + int(data[whole:].sum(dtype=np.uint64))
    flat = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
    return int(flat.sum(dtype=torch.int64))
