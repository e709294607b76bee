"""Mode for the operations inside of blocks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_dlres.core.wire.nested import tensors_in
from lightning_dlres.pipeline.capture.operations import is_metadata, operation_name


class InsideOfBlocks(TorchFunctionMode):
    """Mode for the operations inside of blocks; it knows the tensors that they make.

    Args:
        note_use: Called with each tensor that an operation takes, the name of the block, and that
            of the operation.
    """

    def __init__(self, note_use: Callable[[Tensor, str, str], Any]) -> None:
        super().__init__()
        self._note_use, self._block = note_use, ""
        # By id: tensors that operations inside of blocks have returned.
        self.references: dict[int, weakref.ref[Tensor]] = {}

    def of(self, block: str) -> InsideOfBlocks:
        """Return the mode, for operations of a block with this name."""
        self._block = block
        return self

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(function)
        if not is_metadata(name, args, kwargs):
            for tensor in tensors_in((args, kwargs)):
                self._note_use(tensor, self._block, name)
        result = function(*args, **kwargs)
        for tensor in tensors_in(result):
            self.references[id(tensor)] = weakref.ref(tensor)
        return result

    def has(self, tensor: Tensor) -> bool:
        """Return True if an operation inside of a block has made a tensor."""
        reference = self.references.get(id(tensor))
        return reference is not None and reference() is tensor
