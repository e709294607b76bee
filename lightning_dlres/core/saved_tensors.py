"""Parts of hooks on saved tensors: checks that autograd leaves out under them, and claims.

Only the innermost `torch.autograd.graph.saved_tensors_hooks` sees a tensor. So engines that manage
different tensors share one pair of hooks: an engine claims the tensors that are its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from lightning_dlres.core._compat import (
    is_wrapped,
    is_zeros_without_memory,
    storage_key,
    storage_owner_count,
    version_of,
)

# Function that returns a saved tensor for backward.
Restore = Callable[[], Tensor]


# Functions of torch whose operations save a tensor before they write it: the noise of rrelu.
_WRITTEN_LATER = frozenset({F.rrelu.__code__})
# Frames between a hook on saved tensors and the function that saves one: `untraced` adds one.
_FRAMES = 4


def is_written_later() -> bool:
    """Return True if the hook that asks gets a tensor whose values its operation has yet to write.

    A copy would have other values.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_code in _WRITTEN_LATER:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def has_storage(tensor: Tensor) -> bool:
    """Return True if a tensor has memory that can be copied byte for byte."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and not is_lazy(tensor)
        and not is_wrapped(tensor)
        and not is_zeros_without_memory(tensor)
        and not tensor.is_quantized
        and tensor.numel() > 0
    )


class UnmanagedTensor:
    """Handle of a saved tensor that stays where it is.

    Attributes:
        alias: Detached alias that shares the tensor's version counter. The tensor itself refers to
            its node in the graph. If a node saved its own output, it would therefore hold itself,
            and would never be freed.
        version: Version of the tensor when it was saved.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.version = version_of(self.alias)


def require_unchanged(tensor: Tensor, version: int) -> None:
    """Check that a tensor was not changed in place since it was saved.

    Autograd does not check versions itself where hooks replace saved tensors.

    Args:
        tensor: Tensor that shares the version counter of the saved tensor.
        version: Version when it was saved.

    Raises:
        RuntimeError: If it was changed. The text is that of autograd's own error.
    """
    now = version_of(tensor)
    if now != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: it is at version {now}; expected version {version} instead."
        )


class SharedMemoryGuard:
    """Guard of saved tensors that backward gets while other code holds their memory, too.

    A custom function may return a tensor that it has saved. Under hooks autograd takes it for a new
    tensor, and makes it `.grad`. Clipping, the optimizer or DDP would then write to the saved
    tensor, even to a weight.
    """

    def __init__(self) -> None:
        # Second references, by storage key. Autograd takes over only tensors without other holders.
        self._shared: dict[int, Tensor] = {}

    @contextmanager
    def protecting(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Context manager in which the gradients of parameters share no memory with saved tensors.

        Args:
            parameters: Parameters; those without gradients are left out.
        """
        self._shared.clear()
        leaves = (p for p in parameters if p.requires_grad and p.is_leaf)
        handles = [leaf.register_hook(self._unshared_gradient) for leaf in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._shared.clear()

    def hand_over(self, tensor: Tensor, known_owners: int) -> None:
        """Note a tensor that backward gets.

        Args:
            tensor: The tensor.
            known_owners: Number of tensors over its memory that the caller itself holds.
        """
        if has_storage(tensor) and storage_owner_count(tensor) > known_owners:
            self._shared.setdefault(storage_key(tensor), tensor)

    def _unshared_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """Return a clone of a gradient that shares memory with a saved tensor, or None."""
        if gradient is None or not self._shared or not has_storage(gradient):
            return None
        return gradient.clone() if storage_key(gradient) in self._shared else None


class Claimant(Protocol):
    """Engine that manages some saved tensors, such as those over streamed parameters."""

    def claim(self, tensor: Tensor) -> Restore | None:
        """Return the function that restores a tensor; None if the engine does not manage it."""


_claimants: list[Claimant] = []


@contextmanager
def claiming(claimant: Claimant) -> Iterator[None]:
    """Context manager in which an engine is asked first about every saved tensor."""
    _claimants.append(claimant)
    try:
        yield
    finally:
        _claimants.remove(claimant)


def claimed(tensor: Tensor) -> Restore | None:
    """Return the function that restores a saved tensor for an engine that claims it; or None."""
    # A copy: the step of another thread may end during the walk.
    for claimant in tuple(_claimants):
        restore = claimant.claim(tensor)
        if restore is not None:
            return restore
    return None
