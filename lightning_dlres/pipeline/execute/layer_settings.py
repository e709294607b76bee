"""Settings that a training step must not change: `requires_grad` of parameters, and numbers,
strings and flags of layers.

A rank runs only a part of the step: up to the module's call, from the call on, or nothing. A change
in the step would come too late for its layers, or happen on some ranks only. Hooks may change
settings, because they run on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

_PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))
# Attributes of every module. One of them is `training`: steps may put layers into evaluation mode.
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


class LayerSettings:
    """The settings of a model.

    Args:
        root: The LightningModule.
        layers: Modules that stages run.
    """

    def __init__(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        inside = {module for layer in layers for module in layer.modules()}
        self._parameters = list(root.named_parameters())
        self._modules = [item for item in root.named_modules() if item[1] in inside]

    def trainable(self) -> list[bool]:
        """Return the current `requires_grad` of every parameter."""
        return [parameter.requires_grad for _, parameter in self._parameters]

    def values(self) -> list[dict[str, Any]]:
        """Return the current plain attributes of every module in the layers."""
        return [_plain_attributes(module) for _, module in self._modules]

    def restore_trainable(self, trainable: Sequence[bool]) -> str | None:
        """Restore `requires_grad` of all parameters; return an error message if one had changed."""
        error = None
        for (name, parameter), before in zip(self._parameters, trainable, strict=True):
            if parameter.requires_grad is not before:
                parameter.requires_grad_(before)
                error = error or _error(f"requires_grad of the parameter {name!r}")
        return error

    def restore(self, trainable: Sequence[bool], values: Sequence[dict[str, Any]]) -> str | None:
        """Restore all settings; return an error message that names a change, or None."""
        error = self.restore_trainable(trainable)
        for (path, module), before in zip(self._modules, values, strict=True):
            now = _plain_attributes(module)
            if now == before:
                continue
            names = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
            for name in names:
                error = error or _error(f"{name!r} of the layer {path!r}")
            for name in now.keys() - before.keys():
                del vars(module)[name]
            vars(module).update(before)
        return error


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    items = vars(module).items()
    return {
        name: value
        for name, value in items
        if type(value) in _PLAIN_TYPES and name not in _TORCH_ATTRIBUTES
    }


def _error(setting: str) -> str:
    return (
        f"training_step changes {setting}. Each rank runs only a part of the step, so some ranks "
        "would miss the change or see it too late. Change it in a hook such as "
        "on_train_batch_start."
    )
