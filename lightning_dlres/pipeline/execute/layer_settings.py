"""Settings that a training step must not change: `requires_grad` of parameters, and numbers,
strings and flags of layers.

A rank runs the step up to the module's call, or from the call on after its layers, or not at all.
Such a change would come too late, or on some ranks only; in hooks it comes everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

_PLAIN = frozenset((bool, int, float, str, type(None)))
# Among them `training`: a step may put layers into evaluation mode again and again.
_OF_TORCH = frozenset(vars(nn.Module()))


class LayerSettings:
    """The settings of a model.

    Args:
        root: the LightningModule.
        layers: the modules that stages run.
    """

    def __init__(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        inside = {module for layer in layers for module in layer.modules()}
        self._parameters = list(root.named_parameters())
        self._modules = [item for item in root.named_modules() if item[1] in inside]

    def trainable(self) -> list[bool]:
        """Return which parameters ask for a gradient now."""
        return [parameter.requires_grad for _, parameter in self._parameters]

    def values(self) -> list[dict[str, Any]]:
        """Return the plain attributes of layers now."""
        return [_plain(module) for _, module in self._modules]

    def take_back_trainable(self, trainable: Sequence[bool]) -> str | None:
        """Put `requires_grad` of all parameters back, and return an error that names a change."""
        error = None
        for (name, parameter), before in zip(self._parameters, trainable, strict=True):
            if parameter.requires_grad is not before:
                parameter.requires_grad_(before)
                error = error or _error(f"requires_grad of the parameter {name!r}")
        return error

    def take_back(self, trainable: Sequence[bool], values: Sequence[dict[str, Any]]) -> str | None:
        """Put all settings back, and return an error that names a change."""
        error = self.take_back_trainable(trainable)
        for (path, module), before in zip(self._modules, values, strict=True):
            now = _plain(module)
            if now == before:
                continue
            names = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
            for name in names:
                error = error or _error(f"{name!r} of the layer {path!r}")
            for name in now.keys() - before.keys():
                del vars(module)[name]
            vars(module).update(before)
        return error


def _plain(module: nn.Module) -> dict[str, Any]:
    own = vars(module).items()
    return {name: v for name, v in own if type(v) in _PLAIN and name not in _OF_TORCH}


def _error(what: str) -> str:
    return (
        f"training_step changes {what}. A rank runs a part of the step only, so that not all ranks "
        "would see it in time. Change it in a hook such as on_train_batch_start."
    )
