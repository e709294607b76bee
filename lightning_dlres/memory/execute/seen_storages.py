"""Registry of the storages of all tensors that a step saves.

A storage is identified by its storage key. A copy that the engine restored shares the saved
storages of its original.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_dlres.core._compat import (
    shares_counter,
    storage_key,
    storage_reference,
)
from lightning_dlres.core.saved_tensors import has_storage
from lightning_dlres.memory.execute.spans import ByteSpan

if TYPE_CHECKING:
    from lightning_dlres.memory.execute.saved_storage import SavedStorage


class SeenStorage:
    """Storage of a saved tensor, or a restored copy of a part of such a storage.

    Args:
        tensor: Tensor over the storage.
        is_exempt: Whether its bytes always stay on the device.
        original: Storage that it is a copy of; None: it is an original.
        shift: Offset of the copy's first byte in the original, in bytes.

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
        # While this reference is held, no other storage can get the same key.
        self._reference = storage_reference(tensor)
        self.is_exempt, self.shift = is_exempt, shift
        self._is_copy, self._nbytes = original is not None, tensor.untyped_storage().nbytes()
        # A span may have several saved storages: one for each version counter.
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

        The tensor must share the version counter of the saved storage, and the counter must not
        have changed since. Tensors over one storage may have different counters (`unsafe_chunk`,
        `.data`, arrays). A change through one tensor then leaves the other counters unchanged.
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
        references = self.saved.get(span)
        if references is None:
            self.saved[span] = [weakref.ref(saved_storage)]
        else:
            references[:] = [reference for reference in references if reference() is not None]
            references.append(weakref.ref(saved_storage))


class SeenStorages:
    """All storages of saved tensors in one step, by storage key."""

    def __init__(self) -> None:
        self._by_key: dict[int, SeenStorage] = {}
        self._exempt: list[SeenStorage] = []
        self._exempt_keys: list[int] = []

    def start(self, exempt: Iterable[Tensor]) -> None:
        """Start a step.

        Args:
            exempt: Tensors that always stay on the device, with all views of them.
        """
        tensors = [tensor for tensor in exempt if has_storage(tensor)]
        # If the parameters have the same storages as in the last step, reuse their entries. Equal
        # keys mean equal storages, because the entries hold references. An equal address would not:
        # the allocator may give it to a new storage.
        keys = [storage_key(tensor) for tensor in tensors]
        if keys != self._exempt_keys:
            self._exempt_keys = keys
            self._exempt = [SeenStorage(tensor, is_exempt=True) for tensor in tensors]
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
