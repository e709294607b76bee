"""Parameters of a model, as the keys cut them: gradients go out, and values come in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.core.arrays import byte_array
from lightning_dlres.paramserver.plan.keys import Key


class KeyedParameters:
    """Parameters by name.

    Args:
        parameters: The parameters.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)

    def value(self, key: Key) -> Tensor:
        """Return a key's part of its parameter, flat and on the CPU."""
        return part_of(self._parameters[key.name].detach(), key)

    def land(self, values: Iterable[tuple[Key, memoryview]]) -> None:
        """Write values to the parameters.

        Contiguous parameters in host memory get the received bytes directly. For any other one, a
        contiguous copy in host memory gets them. It is copied back after the last of `values`.

        Args:
            values: Keys with the bytes that were received for them.
        """
        buffers: dict[str, Tensor] = {}
        for key, data in values:
            target = self._parameters[key.name].data
            if target.device.type == "cpu" and target.is_contiguous():
                flat = byte_array(target)
            else:
                if key.name not in buffers:
                    buffers[key.name] = target.cpu().contiguous()
                flat = byte_array(buffers[key.name])
            start = key.start * target.element_size()
            flat[start : start + key.nbytes] = np.frombuffer(data, np.uint8)
        for name, buffer in buffers.items():
            self._parameters[name].data.copy_(buffer)


def part_of(tensor: Tensor, key: Key) -> Tensor:
    """Return a key's part of a parameter or gradient: flat, contiguous, on the CPU."""
    flat = tensor.reshape(-1)[key.start : key.start + key.count]
    return flat.to("cpu", getattr(torch, key.dtype)).contiguous()
