"""Settings that a training step must not change.

These are `requires_grad` of parameters, and numbers, strings and flags of layers.

A rank runs only a part of the step: up to the module's call, from the call on, or nothing. So a
change in the step would happen on some ranks only, or after the rank's layers have run. Hooks
may change settings, because they run on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

_PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))
# Attributes of every module. One of them is `training`: steps may put layers into evaluation mode.
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


class SettingsSnapshot(NamedTuple):
    """The settings of a model at one point in time.

    Attributes:
        trainable: `requires_grad` of every parameter.
        attributes: The plain attributes of every module in the layers.
    """

    trainable: list[bool]
    attributes: list[dict[str, Any]]


class LayerSettings:
    """Reader of a model's settings, which can also put them back.

    Args:
        root: The LightningModule. `requires_grad` of all its parameters is a setting.
        layers: Layers of the pipeline. Numbers, strings and flags of their modules are settings.
    """

    def __init__(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        layer_modules = {module for layer in layers for module in layer.modules()}
        self._parameters = list(root.named_parameters())
        self._modules = [item for item in root.named_modules() if item[1] in layer_modules]

    def snapshot(self) -> SettingsSnapshot:
        """Return all settings now."""
        attributes = [_plain_attributes(module) for _, module in self._modules]
        return SettingsSnapshot(self.trainable(), attributes)

    def restore(self, before: SettingsSnapshot) -> str | None:
        """Put all settings back, and return an error message that names the first change.

        None if nothing has changed.
        """
        error = self.restore_trainable(before.trainable)
        for (path, module), old in zip(self._modules, before.attributes, strict=True):
            now = _plain_attributes(module)
            if now == old:
                continue
            names = sorted(n for n in old.keys() | now.keys() if old.get(n) != now.get(n))
            for name in names:
                error = error or _change_error(f"{name!r} of the layer {path!r}")
            for name in now.keys() - old.keys():
                del vars(module)[name]
            vars(module).update(old)
        return error

    def trainable(self) -> list[bool]:
        """Return `requires_grad` of every parameter now."""
        return [parameter.requires_grad for _, parameter in self._parameters]

    def restore_trainable(self, trainable: Sequence[bool]) -> str | None:
        """Put `requires_grad` of all parameters back; the result is as for `restore`."""
        error = None
        for (name, parameter), before in zip(self._parameters, trainable, strict=True):
            if parameter.requires_grad is not before:
                parameter.requires_grad_(before)
                error = error or _change_error(f"requires_grad of the parameter {name!r}")
        return error


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    attributes = vars(module).items()
    return {
        name: v
        for name, v in attributes
        if type(v) in _PLAIN_TYPES and name not in _TORCH_ATTRIBUTES
    }


def _change_error(setting: str) -> str:
    return (
        f"training_step must not change {setting}: a rank runs only a part of the step, so that "
        "the change would come too late on some ranks. Change it in a hook such as "
        "on_train_batch_start."
    )
