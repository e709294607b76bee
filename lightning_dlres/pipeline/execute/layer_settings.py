"""Settings that a training step must not change.

These are `requires_grad` of parameters, and attributes of layers: numbers, strings, flags and
tensors. Tensors are compared by identity: of in-place changes, only those of buffers before the
layers' call are seen.

A rank runs only a part of the step: up to the module's call, from the call on, or nothing. So a
change in the step would happen on some ranks only, or after the rank's layers have run. Hooks
may change settings, because they run on all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_dlres.core._compat import (
    CALL,
    registered_buffers,
    registered_parameters,
    torch_function_disabled,
    version_of,
)
from lightning_dlres.pipeline.stage.module_attributes import (
    MANAGED_ATTRIBUTES,
    are_identical,
    hook_dicts,
)

_PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))
# Methods of modules that the pipeline replaces in their attributes.
_REPLACED = frozenset(("forward", CALL))
# Value of an attribute that a module does not have. None is a value that layers do have.
_ABSENT = object()


class SettingsSnapshot(NamedTuple):
    """The settings of a model at one point in time.

    Attributes:
        trainable: `requires_grad` of every parameter.
        attributes: The attributes of every module in the layers, also those that are no settings.
        buffers: The buffers of every module in the layers.
    """

    trainable: list[bool]
    attributes: list[dict[str, Any]]
    buffers: list[dict[str, Tensor | None]]


class LayerCode(NamedTuple):
    """Code in a call of the pipelined modules that is not of their classes, at one point in time.

    Attributes:
        hooks: Name of each module that has hooks, and its hooks.
        forwards: The forward that other code has given to each module; None for that of its class.
    """

    hooks: list[tuple[Any, ...]]
    forwards: list[Any]


class LayerBehaviour(NamedTuple):
    """All that a call of the pipelined modules depends on beside settings, at one point in time.

    Attributes:
        code: Hooks and forwards.
        modes: Whether each module is in training mode.
        weights: What the modules have as their parameters.
        buffers: Buffers of the layers, and how often each has changed.
    """

    code: LayerCode
    modes: list[bool]
    weights: list[Any]
    buffers: list[tuple[str, int]]


class LayerSettings:
    """Reader of a model's settings, which can also put them back.

    Args:
        root: The LightningModule. `requires_grad` of all its parameters is a setting.
        layers: Layers of the pipeline. Attributes of their modules are settings.
        shared: Modules that `training_step` may call itself. If layers have them, too, only their
            numbers, strings and flags are settings: a forward may replace tensors.
        around: Modules of the pipelined module outside of the layers, by name. Their modes, hooks
            and forwards count, too.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Iterable[nn.Module],
        shared: Iterable[nn.Module] = (),
        around: Iterable[tuple[str, nn.Module]] = (),
    ) -> None:
        layer_modules = {module for layer in layers for module in layer.modules()}
        tensor_owners = layer_modules.difference(shared)
        self._parameters = list(root.named_parameters())
        self._modules = [
            _ModuleSettings(path, module, module in tensor_owners)
            for path, module in root.named_modules()
            if module in layer_modules
        ]
        called = [(module.path, module.module) for module in self._modules]
        called += [(path, module) for path, module in around if module not in layer_modules]
        self._called = dict(called)
        # Every step reads all modules. A module keeps the dicts of its attributes, hooks and
        # tensors, so they are looked up only once.
        self._namespaces = [vars(module) for _, module in called]
        self._hooks = [(path, hooks) for path, module in called for hooks in hook_dicts(module)]
        self._weight_dicts = [registered_parameters(module) for _, module in called]
        self._buffer_dicts = [module.current_buffers() for module in self._modules]
        self._weights = self._current_weights()

    def behaviour(self) -> LayerBehaviour:
        """Return the mode, hooks, forward and weights of each module, now."""
        modes = [module.training for module in self._called.values()]
        buffers = [
            (f"{module.path}.{name}", version_of(buffer))
            for module, buffers in zip(self._modules, self._buffer_dicts, strict=True)
            for name, buffer in buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]
        return LayerBehaviour(self.code(), modes, self._current_weights(), buffers)

    def code(self) -> LayerCode:
        """Return the hooks and forward of each module, now."""
        hooks = [(path, *hooks.values()) for path, hooks in self._hooks if hooks]
        forwards = [namespace.get("forward") for namespace in self._namespaces]
        # The pipeline's own replacement of a forward, which is no change, knows what is below it.
        return LayerCode(hooks, [getattr(one, "user_forward", one) for one in forwards])

    def replaced_weight(self) -> str | None:
        """Return an error message if a layer has other parameters than at the start of the run."""
        now = self._current_weights()
        if are_identical(now, self._weights):
            return None
        known = set(self._weights)
        names = [
            f"{path}.{name}"
            for path, weights in zip(self._called, self._weight_dicts, strict=True)
            for name, weight in weights.items()
            if weight not in known
        ]
        got = f"another object for {names[0]!r}" if names else f"{len(now)} of {len(known)}"
        return (
            "Parameters of layers must stay the objects of the start of the run, which the "
            f"optimizer has, got {got}. Give it new values in place: parameter.copy_(...) under "
            "torch.no_grad()."
        )

    def change_before_call(self, settings: SettingsSnapshot, before: LayerBehaviour) -> str | None:
        """Return an error message that names a change until the layers are called; None without.

        Changed settings are put back. Others would be the caller's to put back after the call.
        """
        # Before the call, any other object is a change: the forward may read it.
        other = None if self._is_unchanged(settings) else self._other_object(settings)
        error, now = self.restore(settings) or other, self.behaviour()
        if now.modes != before.modes:
            pairs = zip(self._called, now.modes, before.modes, strict=True)
            path = next(path for path, mode, then in pairs if mode is not then)
            error = error or change_error(f"the mode (train or eval) of the layer {path!r}")
        if not are_identical(now.weights, before.weights):
            error = error or change_error("the parameters of a layer before its call")
        if now.buffers != before.buffers:
            path = min({one[0] for one in set(now.buffers) ^ set(before.buffers)})
            error = error or change_error(f"the buffer {path!r} before the call of its layer")
        return error or self.change_of_code(before.code)

    def change_of_code(self, before: LayerCode) -> str | None:
        """Return an error message that names a change of hooks or forwards; None without."""
        now = self.code()
        if now.hooks != before.hooks:
            path = min({one[0] for one in set(now.hooks) ^ set(before.hooks)}, default="")
            return change_error(f"the hooks of the layer {path!r}")
        if not are_identical(now.forwards, before.forwards):
            return change_error("the forward of a layer")
        return None

    def _is_unchanged(self, before: SettingsSnapshot) -> bool:
        namespaces = self._layer_namespaces()
        return _hold_same(namespaces, before.attributes) and _hold_same(
            self._buffer_dicts, before.buffers
        )

    def _other_object(self, before: SettingsSnapshot) -> str | None:
        """Return an error message that names an attribute with another object than before."""
        columns = zip(self._modules, self._layer_namespaces(), before.attributes, strict=True)
        for module, now, then in columns:
            for name in sorted((now.keys() | then.keys()) - _REPLACED - MANAGED_ATTRIBUTES):
                value, old = now.get(name, _ABSENT), then.get(name, _ABSENT)
                if value is not old and not (_is_plain(value) and _is_plain(old)):
                    return change_error(f"{name!r} of the layer {module.path!r} before its call")
        return None

    def _layer_namespaces(self) -> list[dict[str, Any]]:
        return self._namespaces[: len(self._modules)]

    def _current_weights(self) -> list[Any]:
        return [*chain.from_iterable(weights.values() for weights in self._weight_dicts)]

    def snapshot(self) -> SettingsSnapshot:
        """Return all settings now."""
        attributes = [dict(namespace) for namespace in self._layer_namespaces()]
        buffers = [dict(buffers) for buffers in self._buffer_dicts]
        return SettingsSnapshot(self.trainable(), attributes, buffers)

    def restore(self, before: SettingsSnapshot) -> str | None:
        """Put all settings back, and return an error message that names the first change.

        None if nothing has changed.
        """
        error = self.restore_trainable(before.trainable)
        # Steps hardly ever change a layer, and every step looks at all modules. So the common case
        # takes as few operations as possible.
        if self._is_unchanged(before):
            return error
        for module, *old in zip(self._modules, before.attributes, before.buffers, strict=True):
            for name in sorted(module.restore(*old)):
                error = error or change_error(f"{name!r} of the layer {module.path!r}")
        return error

    def trainable(self) -> list[bool]:
        """Return `requires_grad` of every parameter now."""
        # The guard of remote parameters would make each read take much longer.
        with torch_function_disabled():
            return [parameter.requires_grad for _, parameter in self._parameters]

    def restore_trainable(self, trainable: Sequence[bool]) -> str | None:
        """Put `requires_grad` of all parameters back; the result is as for `restore`."""
        now = self.trainable()
        if now == trainable:
            return None
        error = None
        columns = zip(self._parameters, trainable, now, strict=True)
        for (name, parameter), before, is_trainable in columns:
            if is_trainable is not before:
                parameter.requires_grad_(before)
                error = error or change_error(f"requires_grad of the parameter {name!r}")
        return error


@dataclass(frozen=True)
class _ModuleSettings:
    """Reader of one module's settings, which can also put them back.

    Attributes:
        path: Name of the module.
        module: The module.
        watches_tensors: Whether tensors are settings, too.
    """

    path: str
    module: nn.Module
    watches_tensors: bool

    def current_buffers(self) -> Mapping[str, Tensor | None]:
        """Return the buffers that are settings. Later changes show in the result."""
        return registered_buffers(self.module)[0] if self.watches_tensors else {}

    def restore(
        self, attributes: dict[str, Any], buffers: dict[str, Tensor | None]
    ) -> Collection[str]:
        """Put changed settings back, and return their names."""
        changed = self._changed_names(attributes, vars(self.module)) - MANAGED_ATTRIBUTES
        for name in changed:
            if name in attributes:
                vars(self.module)[name] = attributes[name]
            else:
                del vars(self.module)[name]
        changed_buffers = self._changed_names(buffers, self.current_buffers())
        for name in changed_buffers:
            setattr(self.module, name, buffers.get(name))
        return changed | changed_buffers

    def _changed_names(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
        return {
            name
            for name in before.keys() | now.keys()
            if self._is_change(before.get(name, _ABSENT), now.get(name, _ABSENT))
        }

    def _is_change(self, before: Any, now: Any) -> bool:
        """Return whether a setting has changed. Lists and other objects are no settings."""
        if before is now:
            return False
        if _is_plain(before) and _is_plain(now):
            return bool(before != now)
        return self._is_setting(before) or self._is_setting(now)

    def _is_setting(self, value: Any) -> bool:
        return _is_plain(value) or (self.watches_tensors and isinstance(value, Tensor))


def _hold_same(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether two lists of mappings hold the same objects under the same names.

    The order of the names counts, too.
    """
    if list(map(len, a)) != list(map(len, b)):
        return False
    # Equal lengths let the items of all mappings be compared at once.
    values = (chain.from_iterable(m.values() for m in mappings) for mappings in (a, b))
    same_names = all(map(operator.is_, chain.from_iterable(a), chain.from_iterable(b)))
    return same_names and all(map(operator.is_, *values))


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN_TYPES


def change_error(setting: str) -> str:
    """Return an error message that names something that a training step has changed."""
    return (
        f"training_step must not change {setting}: a rank runs only a part of the step, so that "
        "the change would come too late on some ranks. Change it in a hook such as "
        "on_train_batch_start."
    )
