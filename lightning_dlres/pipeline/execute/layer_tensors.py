"""Tensors that layers make while they run, and that reach the step past the module's output: taken
by forward hooks, or kept on a layer.

Layers run on their stage's rank, one micro-batch at a time. Where the loss is computed, such a
tensor is missing, stale, or that of one micro-batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from lightning_dlres.core.errors import UnsupportedStepError


class LayerTensors:
    """The tensors that layers were seen to make, by identity; those that are gone do not count."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def __bool__(self) -> bool:
        return bool(self._made)

    def add(self, tensor: Tensor, layer: str) -> None:
        """Remember that a layer made a tensor."""
        # A parameter cannot be moved to another device while a weak reference to it exists.
        if not isinstance(tensor, nn.Parameter):
            self._made[id(tensor)] = (weakref.ref(tensor), layer)

    def layer_of(self, tensor: Tensor) -> str | None:
        """Return the layer that made a tensor; None if none did."""
        made = self._made.get(id(tensor))
        return made[1] if made is not None and made[0]() is tensor else None

    def layer_within(self, values: Iterable[Any]) -> str | None:
        """Return the layer that made one of the tensors in arguments of an operation."""
        for value in values:
            found = None
            if isinstance(value, Tensor):
                found = self.layer_of(value)
            elif isinstance(value, (list, tuple)):
                found = self.layer_within(value)
            if found is not None:
                return found
        return None

    def let_go_of_graphs(self) -> None:
        """Forget those that are gone, and detach the others: their graphs hold activations."""
        alive = {key: made for key, made in self._made.items() if made[0]() is not None}
        for reference, _ in alive.values():
            tensor = reference()
            if tensor is not None:
                # Torch does not detach views in place.
                with suppress(RuntimeError):
                    tensor.detach_()
        self._made = alive


def uses_layer_tensor(layer: str, where: str) -> UnsupportedStepError:
    """Return the error for a step that uses what a layer made past the module's output."""
    return UnsupportedStepError(
        f"training_step uses a tensor that layer {layer!r} made ({where}), taken by a forward hook "
        "or kept on the layer. Layers run on their stage's rank, one micro-batch at a "
        "time, so the tensor would be missing or stale where the loss is computed. Return it as a "
        "part of the layers' output, passed on by all later layers."
    )
