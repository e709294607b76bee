"""Hooks on saved tensors that hold no copy of a parameter on the device for backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_dlres.core.saved_tensors import (
    Restore,
    SharedMemoryGuard,
    UnmanagedTensor,
    claimed,
    require_unchanged,
)
from lightning_dlres.core.untraced import untraced


class ParameterHooks:
    """Hooks for a step in which no other engine manages saved tensors."""

    def __init__(self) -> None:
        self._guard = SharedMemoryGuard()

    @contextmanager
    def hooks(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Context manager in which claimed tensors are restored by their claimant.

        Args:
            parameters: Parameters of the model.
        """
        with (
            self._guard.protecting(parameters),
            torch.autograd.graph.saved_tensors_hooks(untraced(_pack), untraced(self._unpack)),
        ):
            yield

    def _unpack(self, packed: Restore | UnmanagedTensor) -> Tensor:
        if not isinstance(packed, UnmanagedTensor):
            return packed()
        require_unchanged(packed.alias, packed.version)
        self._guard.hand_over(packed.alias, 1)
        return packed.alias


def _pack(tensor: Tensor) -> Restore | UnmanagedTensor:
    return claimed(tensor) or UnmanagedTensor(tensor)
