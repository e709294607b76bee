"""Objects that autograd holds in place of the tensors that it saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lightning_dlres.core._compat import version_of
from lightning_dlres.memory.execute.spans import View, view_of

if TYPE_CHECKING:
    from lightning_dlres.memory.execute.saved_storage import SavedStorage


class SavedTensor:
    """Handle of a saved tensor whose storage the engine manages.

    Args:
        saved_storage: Storage that holds the tensor's bytes.
        tensor: Tensor that autograd saves.
        shift: Offset in bytes, see `ByteSpan.of`.

    Attributes:
        version: Version of the tensor when it was saved.
        alias: The tensor, if its storage stays where it is; else None, and `view` describes it.
        was_used: Whether backward has asked for it.
    """

    __slots__ = ("__weakref__", "alias", "saved_storage", "version", "view", "was_used")

    def __init__(self, saved_storage: SavedStorage, tensor: Tensor, shift: int) -> None:
        self.saved_storage, self.version = saved_storage, saved_storage.version
        self.was_used = False
        self.alias: Tensor | None = None
        self.view: View | None = None
        if saved_storage.is_original:
            # An alias instead of the tensor: an output's node would hold itself, and never be
            # freed.
            self.alias = tensor.detach()
        else:
            self.view = view_of(tensor, shift)


class UnmanagedTensor:
    """Handle of a saved tensor that the engine leaves alone.

    Attributes:
        alias: The tensor, with its version counter. It is an alias, since an output's node would
            hold itself, and never be freed.
        version: Version of the tensor when it was saved.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.version = version_of(self.alias)
