"""Optimizers on a server: made from a name and options, and applied to one key at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.mirror.profile.history import PER_PARAMETER
from lightning_dlres.paramserver.plan.keys import Key
from lightning_dlres.paramserver.protocol import OptimizerSetup

# Optimizers of torch that update each parameter by itself, but not each element.
_WHOLE_PARAMETER: tuple[type[Optimizer], ...] = (optim.Adafactor,)
# Options that other hosts cannot use, or that need a graph.
_LOCAL_OPTIONS = frozenset({"capturable", "differentiable"})
_registry: dict[str, type[Optimizer]] = {}


def register_server_optimizer(optimizer: type[Optimizer]) -> type[Optimizer]:
    """Let servers of this process make an optimizer of a class that is not torch's.

    Each key gets its own update, so the optimizer must treat every parameter by itself. It may be
    used as a decorator. `dlres ps serve --optimizer module:Class` registers a class, too.
    """
    _registry[optimizer_name(optimizer)] = optimizer
    return optimizer


def optimizer_name(optimizer: type[Optimizer]) -> str:
    """Return the name of a class in the registry: its module and qualified name."""
    return f"{optimizer.__module__}:{optimizer.__qualname__}"


for _known in (*PER_PARAMETER, *_WHOLE_PARAMETER):
    register_server_optimizer(_known)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise unless servers can make an optimizer of this class.

    Raises:
        ConfigError: If the class is not registered.
    """
    if optimizer_name(type(optimizer)) not in _registry:
        known = ", ".join(sorted(name.rpartition(":")[2] for name in _registry))
        raise ConfigError(
            "the optimizer must be one that updates each parameter by itself for a parameter "
            f"server ({known}), got {type(optimizer).__name__}. Use one of these, or call "
            "register_server_optimizer(YourOptimizer) and pass it to `dlres ps serve --optimizer`."
        )


def wire_options(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options as they are sent to servers.

    Args:
        group: Group of an optimizer.
        defaults: The optimizer's `defaults`.

    Raises:
        ConfigError: If the value of an option is neither a number, nor text, nor a tuple of these.
    """
    options = {}
    for name in defaults:
        if name in _LOCAL_OPTIONS:
            continue
        value = group.get(name, defaults[name])
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (tuple, list)):
            value = tuple(v.item() if isinstance(v, Tensor) else v for v in value)
        if not _is_plain(value):
            raise ConfigError(
                f"the optimizer's option {name} must be a number, text or a tuple of numbers for a "
                f"parameter server, got {value!r}. Leave it out."
            )
        options[name] = value
    return options


class ServerOptimizers:
    """Optimizers of one server.

    Args:
        setups: Names and options of the optimizers.
        keys: Keys of this server.
        parameters: Parameter of each key.

    Raises:
        ProtocolError: If a class is not registered, or its options are wrong.
    """

    def __init__(
        self,
        setups: Sequence[OptimizerSetup],
        keys: Sequence[Key],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._optimizers: list[Optimizer | None] = []
        for index, setup in enumerate(setups):
            pairs = zip(keys, parameters, strict=True)
            own = [(key.group, p) for key, p in pairs if key.optimizer == index]
            self._optimizers.append(_make_optimizer(setup, own) if own else None)

    def update(self, key: Key, parameter: nn.Parameter, options: Mapping[str, Any]) -> None:
        """Update a key's parameter, whose `grad` is the merged gradient.

        Raises:
            ProtocolError: If an option is unknown, or the optimizer refuses it.
        """
        optimizer = self._of(key)
        checked = _checked_options(options, optimizer.defaults)
        groups = optimizer.param_groups
        optimizer.param_groups = [{**optimizer.defaults, **checked, "params": [parameter]}]
        try:
            optimizer.step()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ProtocolError(f"{type(optimizer).__name__} refused {key}: {error}") from error
        finally:
            optimizer.param_groups = groups

    def state(self, key: Key, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a key: tensors and numbers by name; empty before the first update."""
        return dict(self._of(key).state.get(parameter, {}))

    def set_state(self, key: Key, parameter: nn.Parameter, name: str, value: Any) -> None:
        """Set a part of a key's state."""
        self._of(key).state[parameter][name] = value

    def _of(self, key: Key) -> Optimizer:
        optimizer = self._optimizers[key.optimizer]
        assert optimizer is not None
        return optimizer


def _make_optimizer(setup: OptimizerSetup, own: list[tuple[int, nn.Parameter]]) -> Optimizer:
    kind = _registry.get(setup.name)
    if kind is None:
        raise ProtocolError(
            f"the optimizer {setup.name} is not known to this server. Start it with `dlres ps "
            f"serve --optimizer {setup.name}`."
        )
    groups = [
        {**options, "params": [p for group, p in own if group == index]}
        for index, options in enumerate(setup.groups)
    ]
    try:
        return kind([group for group in groups if group["params"]])  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{setup.name} refused its options: {error}") from error


def _checked_options(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a message in the form that the optimizer expects."""
    checked = {}
    for name, value in options.items():
        if name not in defaults or name in _LOCAL_OPTIONS:
            raise ProtocolError(f"the optimizer has no option {name!r}.")
        if isinstance(value, list):
            value = tuple(value)
        if not _is_plain(value):
            raise ProtocolError(f"the optimizer's option {name!r} has the value {value!r}.")
        checked[name] = value
    return checked


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= 8 and all(map(_is_plain, value))
    if isinstance(value, float):
        return not math.isnan(value)
    return value is None or isinstance(value, (bool, int, str))
