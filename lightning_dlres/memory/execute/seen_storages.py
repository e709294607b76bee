"""Registry of the storages that saved tensors of one step use.

A storage is known by identity. A copy that the engine restored counts as its original.
"""

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
    from lightning_dlres.memory.execute.saved_storage import SavedStorage


class SeenStorage:
    """A storage, or a copy of a part of one.

    Args:
        tensor: Tensor over the storage.
        is_exempt: Whether nothing in it ever moves.
        original: Storage that it is a copy of; None: it is an original.
        shift: Offset in bytes in the original of the copy's first byte.

    Attributes:
        saved: Saved storages of the original, by span. A copy shares this table.
    """

    __slots__ = ("_is_copy", "_nbytes", "_reference", "is_exempt", "saved", "shift")

    def __init__(
        self,
        tensor: Tensor,
        is_exempt: bool = False,
        original: SeenStorage | None = None,
        shift: int = 0,
    ) -> None:
        # This reference keeps the storage's key from being given to another storage.
        self._reference = storage_reference(tensor)
        self.is_exempt, self.shift = is_exempt, shift
        self._is_copy, self._nbytes = original is not None, tensor.untyped_storage().nbytes()
        # Several saved storages can have one span: tensors with version counters of their own.
        self.saved: dict[ByteSpan, list[weakref.ref[SavedStorage]]] = {}
        if original is not None:
            self._nbytes, self.saved = original._nbytes, original.saved

    def nbytes(self, tensor: Tensor) -> int:
        """Return the size of the original storage of a tensor.

        The size decides which tensors move. It must not depend on whether the tensor lies over the
        original or over a restored copy.
        """
        if not self._is_copy:
            self._nbytes = tensor.untyped_storage().nbytes()
        return self._nbytes

    def find(self, tensor: Tensor, span: ByteSpan) -> SavedStorage | None:
        """Return the saved storage that has a tensor's bytes, or None.

        It was saved by a tensor with the same version counter, which has not changed since. Tensors
        over one storage may have a counter each (`unsafe_chunk`, `.data`, arrays). A change through
        one of them does not count in the others.
        """
        for reference in self.saved.get(span, ()):
            saved_storage = reference()
            if (
                saved_storage is not None
                and saved_storage.is_current
                and shares_counter(saved_storage.witness, tensor)
            ):
                return saved_storage
        return None

    def add(self, span: ByteSpan, saved_storage: SavedStorage) -> None:
        """Register a new saved storage."""
        known = self.saved.get(span)
        if known is None:
            self.saved[span] = [weakref.ref(saved_storage)]
        else:
            known[:] = [reference for reference in known if reference() is not None]
            known.append(weakref.ref(saved_storage))


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has memory that can be copied byte for byte."""
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
    """All storages of one step, by storage key."""

    def __init__(self) -> None:
        self._by_key: dict[int, SeenStorage] = {}
        self._exempt: list[SeenStorage] = []
        self._exempt_keys: list[int] = []
        self._exempt_addresses: list[tuple[int, int]] = []

    def start(self, exempt: Iterable[Tensor]) -> None:
        """Start a step.

        Args:
            exempt: Tensors that never move, nor views of them.
        """
        tensors = [tensor for tensor in exempt if has_storage(tensor)]
        # Most steps have the same parameters at the same addresses: reuse their entries then.
        addresses = [(id(tensor), tensor.data_ptr()) for tensor in tensors]
        if addresses != self._exempt_addresses:
            self._exempt_addresses = addresses
            self._exempt = [SeenStorage(tensor, is_exempt=True) for tensor in tensors]
            self._exempt_keys = [storage_key(tensor) for tensor in tensors]
        self._by_key = dict(zip(self._exempt_keys, self._exempt, strict=True))

    def of(self, tensor: Tensor) -> SeenStorage:
        """Return the storage of a tensor."""
        key = storage_key(tensor)
        seen = self._by_key.get(key)
        if seen is None:
            seen = self._by_key[key] = SeenStorage(tensor)
        return seen

    def add_copy(self, tensor: Tensor, original: SeenStorage, shift: int) -> None:
        """Register a tensor's storage as a copy of bytes of another storage."""
        key = storage_key(tensor)
        if key not in self._by_key:
            self._by_key[key] = SeenStorage(tensor, False, original, shift)
