"""Storages in which saved tensors lie: known by identity, the original and copies of its bytes as
one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_dlres.core._compat import (
    is_wrapped,
    is_zeros_without_memory,
    shares_counter,
    storage_key,
    storage_reference,
)
from lightning_dlres.memory.execute.spans import ByteSpan

if TYPE_CHECKING:
    from lightning_dlres.memory.execute.saved import SavedStorage


class SeenStorage:
    """A storage, or a copy of a part of one.

    Args:
        tensor: over the storage.
        stays: whether nothing in it ever moves.
        original: the storage that it is a copy of.
        shift: the place in the original of the copy's first byte.

    Attributes:
        data: the original's data.
    """

    __slots__ = ("_is_copy", "_nbytes", "_reference", "data", "shift", "stays")

    def __init__(
        self,
        tensor: Tensor,
        stays: bool = False,
        original: SeenStorage | None = None,
        shift: int = 0,
    ) -> None:
        # While this is held, no other storage can have the same key.
        self._reference = storage_reference(tensor)
        self.stays, self.shift = stays, shift
        self._is_copy, self._nbytes = original is not None, tensor.untyped_storage().nbytes()
        self.data: dict[ByteSpan, list[weakref.ref[SavedStorage]]] = {}
        if original is not None:
            self._nbytes, self.data = original._nbytes, original.data

    def nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of the original of a tensor's storage: what is small, and what moves,
        must not depend on where the plan has put the data."""
        if not self._is_copy:
            self._nbytes = tensor.untyped_storage().nbytes()
        return self._nbytes

    def find(self, tensor: Tensor, span: ByteSpan) -> SavedStorage | None:
        """Return the saved_storage that has a tensor's bytes: they were saved by a tensor with the same
        version counter, and that has not moved since. Tensors over one storage may have a counter
        each (`unsafe_chunk`, `.data`, arrays): a change through one is unseen by the others."""
        for reference in self.data.get(span, ()):
            saved_storage = reference()
            if (
                saved_storage is not None
                and saved_storage.is_current
                and shares_counter(saved_storage.witness, tensor)
            ):
                return saved_storage
        return None

    def add(self, span: ByteSpan, saved_storage: SavedStorage) -> None:
        """Note a new saved_storage."""
        known = self.data.get(span)
        if known is None:
            self.data[span] = [weakref.ref(saved_storage)]
        else:
            known[:] = [reference for reference in known if reference() is not None]
            known.append(weakref.ref(saved_storage))


def has_storage(tensor: Tensor) -> bool:
    """Return whether there is memory behind a tensor that can be copied byte for byte."""
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


class SeenStorages:
    """All storages in which tensors of one step were seen."""

    def __init__(self) -> None:
        self._seen: dict[int, SeenStorage] = {}
        self._staying: list[SeenStorage] = []
        self._keys: list[int] = []
        self._places: list[tuple[int, int]] = []

    def start(self, stays: Iterable[Tensor]) -> None:
        """A step begins.

        Args:
            stays: tensors that never move, nor views of them.
        """
        tensors = [tensor for tensor in stays if has_storage(tensor)]
        # Mostly the same tensors with the same memory, step for step.
        places = [(id(tensor), tensor.data_ptr()) for tensor in tensors]
        if places != self._places:
            self._places = places
            self._staying = [SeenStorage(tensor, stays=True) for tensor in tensors]
            self._keys = [storage_key(tensor) for tensor in tensors]
        self._seen = dict(zip(self._keys, self._staying, strict=True))

    def of(self, tensor: Tensor) -> SeenStorage:
        """Return the storage of a tensor."""
        key = storage_key(tensor)
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = SeenStorage(tensor)
        return found

    def add_copy(self, tensor: Tensor, original: SeenStorage, shift: int) -> None:
        """Note that a tensor's storage has bytes of another one."""
        key = storage_key(tensor)
        if key not in self._seen:
            self._seen[key] = SeenStorage(tensor, False, original, shift)
