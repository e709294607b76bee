"""Tensors that layers make, and that the step gets by another way than the module's output.

Such a way is a forward hook, or an attribute of a layer.

Layers run on their stage's rank, one micro-batch at a time. On the rank that computes the loss,
such a tensor is missing, stale, or that of a single micro-batch. So its use is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from lightning_dlres.core.errors import UnsupportedStepError


class LayerTensors:
    """The tensors that layers have made. References are weak, so that the tensors can be freed."""

    def __init__(self) -> None:
        # By id(tensor): the tensor and the name of its layer.
        self._references: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def __bool__(self) -> bool:
        return bool(self._references)

    def add(self, tensor: Tensor, layer: str) -> None:
        """Remember that a layer made a tensor."""
        # Parameters are left out: one with a weak reference cannot be moved to another device.
        if not isinstance(tensor, nn.Parameter):
            self._references[id(tensor)] = (weakref.ref(tensor), layer)

    def layer_of(self, tensor: Tensor) -> str | None:
        """Return the name of the layer that made a tensor; None if no layer did."""
        entry = self._references.get(id(tensor))
        # The id of a freed tensor may belong to another one now.
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def layer_within(self, values: Iterable[Any]) -> str | None:
        """Return the name of the layer that made a tensor among an operation's arguments.

        Lists and tuples are searched, too. None if no layer made any of the tensors.
        """
        for value in values:
            layer = None
            if isinstance(value, Tensor):
                layer = self.layer_of(value)
            elif isinstance(value, (list, tuple)):
                layer = self.layer_within(value)
            if layer is not None:
                return layer
        return None

    def detach_all(self) -> None:
        """Detach the tensors, as their graphs hold activations; forget those that were freed."""
        alive = {key: entry for key, entry in self._references.items() if entry[0]() is not None}
        for reference, _ in alive.values():
            tensor = reference()
            if tensor is not None:
                # Torch cannot detach views in place.
                with suppress(RuntimeError):
                    tensor.detach_()
        self._references = alive


def layer_tensor_error(layer: str, where: str) -> UnsupportedStepError:
    """Return the error for a step that uses a layer's tensor which is not in the module's output.

    Args:
        layer: Name of the layer.
        where: Place of the use, such as "as the loss".
    """
    return UnsupportedStepError(
        f"training_step uses a tensor that layer {layer!r} made ({where}), from a forward hook or "
        "an attribute of the layer. Layers run on their stage's rank, one micro-batch at a time, "
        "so the tensor would be missing or stale on the rank that computes the loss. Return it as "
        "a part of the layers' output, passed on by all later layers."
    )
