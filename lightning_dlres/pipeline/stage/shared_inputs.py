"""Inputs of a layer that share memory, which a change in place of one shows in the others.

Between two stages each tensor travels by itself, so that a change of one would not show. The copies
of `shared_memory` would not do here: they are for attributes, without gradients and on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dlres.core._compat import storage_reference, version_of
from lightning_dlres.core.wire.tree import Tree, flatten, unflatten


class SharedInputs:
    """Copies of a layer's inputs that share memory as the inputs do.

    Args:
        inputs: Inputs of the layer.

    Attributes:
        copies: The copies, in the same containers. None is a leaf, so a layer may change them in
            place.
    """

    def __init__(self, inputs: Tree) -> None:
        structure, tensors = flatten(inputs)
        copies: list[Tensor] = []
        self._groups = [group for group in _groups(tensors) if len(group) > 1]
        shared = {at: group for group in self._groups for at in group}
        wholes: dict[int, Tensor] = {}
        for at, tensor in enumerate(tensors):
            if at not in shared:
                copies.append(tensor.clone())
                continue
            first = shared[at][0]
            if first not in wholes:
                wholes[first] = _whole(tensors[first], [tensors[one] for one in shared[at]])
            layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
            copies.append(wholes[first].as_strided(*layout))
        self._originals, self._copies = tensors, copies
        self._versions = [version_of(copy) for copy in copies]
        self.copies = unflatten(structure, copies)

    def are_changed(self) -> bool:
        """Return True if a copy has changed whose elements are also those of another one."""
        return any(
            version_of(self._copies[at]) != self._versions[at]
            for group in self._groups
            for at in group
            if any(
                other != at and _overlap(self._originals[at], self._originals[other])
                for other in group
            )
        )


def _groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of tensors with the same storage; of those of other dtypes apart."""
    groups: list[list[int]] = []
    for at, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            continue
        for group in groups:
            first = tensors[group[0]]
            is_alike = first.dtype == tensor.dtype and first.device == tensor.device
            if is_alike and storage_reference(first) == storage_reference(tensor):
                group.append(at)
                break
        else:
            groups.append([at])
    return groups


def _whole(tensor: Tensor, members: Sequence[Tensor]) -> Tensor:
    """Return a copy of all memory of a tensor, which needs a gradient if one of its views does."""
    copy = _memory(tensor).clone()
    if any(member.requires_grad for member in members):
        copy = copy.requires_grad_().clone()
    return copy


def _memory(tensor: Tensor) -> Tensor:
    """Return all memory of a tensor, flat."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((size,), (1,), 0)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if two views of the same memory have an element in common."""
    marks = torch.zeros(_memory(one).numel(), dtype=torch.bool)
    layout = (one.shape, one.stride(), one.storage_offset())
    marks.as_strided(*layout).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())
