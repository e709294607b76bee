"""Detection of parameters that other code has changed.

The servers hold the parameters. Changes of a rank to its own copy would be lost with the next
values, without a word, and its gradients would be those of other weights. Frozen parameters get no
values, so code may change them; that shows when they are trained again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from lightning_dlres.core.arrays import byte_array
from lightning_dlres.core.wire.checksum import checksum_of

# Integers of the same size as elements, and elements that are taken at a time, for the digests of
# tensors on a device.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 1 << 20


class EditedParameters:
    """Digests of parameters, to compare them later.

    Args:
        parameters: Parameters by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._digests: dict[str, int] = {}
        self._addresses: list[tuple[int, bool]] = []

    def remember(self, landed: Set[Tensor] = frozenset()) -> None:
        """Remember the present values of all trained parameters.

        Args:
            landed: Parameters that have got values from the servers. Those of other frozen
                parameters are remembered only at the first call.
        """
        for name, parameter in self._parameters.items():
            if parameter.requires_grad or parameter in landed or name not in self._digests:
                self._digests[name] = digest_of(parameter.detach())

    def have_moved(self) -> bool:
        """Return True at the first call, and if parameters have other memory than at the last, or
        others are trained."""
        before = self._addresses
        self._addresses = [(p.data_ptr(), p.requires_grad) for p in self._parameters.values()]
        return self._addresses != before

    def names(self, *, are_trained: bool = True) -> list[str]:
        """Return the names of the parameters that have changed since.

        Args:
            are_trained: False returns those of frozen parameters, and not those that are trained.
        """
        return [
            name
            for name, parameter in self._parameters.items()
            if parameter.requires_grad == are_trained
            and digest_of(parameter.detach()) != self._digests[name]
        ]


def digest_of(tensor: Tensor) -> int:
    """Return a number that depends on the bits and the order of a tensor's elements.

    It passes once over the memory. Equal numbers of different values are possible, but rare.
    """
    if tensor.device.type == "cpu":
        return checksum_of(byte_array(tensor.contiguous()).data)
    flat = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # Odd factors, so that a change of any bit changes the product.
    factors = 2 * torch.arange(min(len(flat), _PART), device=tensor.device) + 1
    for start in range(0, len(flat), _PART):
        part = flat[start : start + _PART].to(torch.int64)
        total = 31 * total + (part * factors[: len(part)]).sum()
    # The device is waited for once.
    return int(total)
