"""Optimizers on a server: made from a name and options, and applied to one key at a time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_dlres.core.errors import ConfigError, ProtocolError, got_expected, text_of
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.mirror.profile.history import PER_PARAMETER
from lightning_dlres.paramserver.execute.server.push_updates import PushStep
from lightning_dlres.paramserver.plan.keys import Key
from lightning_dlres.paramserver.protocol import STATE_DTYPES, OptimizerSetup

# Optimizers of torch that update each parameter by itself, but not each element.
_WHOLE_PARAMETER: tuple[type[Optimizer], ...] = (optim.Adafactor,)
# Options that other hosts cannot use, or that need a graph.
_LOCAL_OPTIONS = frozenset({"capturable", "differentiable"})
# Largest number of optimizers of a job, and of groups of an optimizer.
_MAX_OPTIMIZERS, _MAX_GROUPS = 64, 65_536
# Largest number of checked options that are remembered. In one step, the pushes of a group mostly
# have the same options, which are then checked only once.
_MAX_CHECKED = 64
# Finite options beyond it overflow a float32.
_LARGEST = torch.finfo(torch.float32).max
_registry: dict[str, type[Optimizer]] = {}


def register_server_optimizer(optimizer: type[Optimizer]) -> type[Optimizer]:
    """Let servers of this process make an optimizer of a class that is not torch's.

    Each key gets its own update, so the optimizer must treat every parameter by itself. All parts
    of its state must be there after the first update, as numbers and tensors. What it counts must
    be there, too, and not in its groups. Servers make it from parameters alone, call `step()`
    without a closure, and ranks call it with all gradients None. The function may be used as a
    decorator.
    `dlres ps serve --optimizer module:Class` registers a class, too.

    Raises:
        ConfigError: If its `step` needs a closure.
    """
    parameters = list(inspect.signature(optimizer.step).parameters.values())
    # The first parameter is the optimizer itself.
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[1:]):
        got = f"{optimizer.__name__}.step{inspect.signature(optimizer.step)}"
        rule = "a class whose step() needs no closure"
        raise ConfigError(got_expected("optimizer", got, rule, "such a class, or another strategy"))
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
    if not optimizer.param_groups:
        raise ConfigError(
            "configure_optimizers must return an optimizer for a parameter server, got none. "
            "Return one, or use another strategy."
        )
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
        value = _plain(group.get(name, defaults[name]))
        if not _is_plain(value):
            raise ConfigError(
                f"the optimizer's option {name} must be a number, text or a tuple of numbers for a "
                f"parameter server, got {value!r}. Leave it out."
            )
        options[name] = value
    return options


def group_options(optimizer: Optimizer, group: int) -> dict[str, Any]:
    """Return the options of a group as they are sent to servers.

    A class of the user's own may read options that only a group has; those without a plain value
    are left out.

    Raises:
        ConfigError: See `wire_options`.
    """
    own, defaults = optimizer.param_groups[group], optimizer.defaults
    options = wire_options(own, defaults)
    if not _is_of_torch(type(optimizer)):
        others = {n: _plain(v) for n, v in own.items() if n not in defaults and n != "params"}
        options |= {name: value for name, value in others.items() if _is_plain(value)}
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
        if len(setups) > _MAX_OPTIMIZERS:
            raise ProtocolError(f"{len(setups)} optimizers, expected at most {_MAX_OPTIMIZERS}.")
        own: list[list[nn.Parameter]] = [[] for _ in setups]
        for key, parameter in zip(keys, parameters, strict=True):
            own[key.optimizer].append(parameter)
        self._optimizers = [
            _make_optimizer(setup, of_setup) if of_setup else None
            for setup, of_setup in zip(setups, own, strict=True)
        ]
        self._setups = setups
        # The state of each optimizer of the user's own is tried with one key.
        tried = {key.optimizer: (key, p) for key, p in zip(keys, parameters, strict=True)}
        for key, parameter in tried.values():
            if not _is_of_torch(type(self._of(key))):
                _require_sendable(setups[key.optimizer].name, self._first_state(key, parameter))
        # Checked options by optimizer and message.
        self._checked: dict[tuple[int, bytes], dict[str, Any]] = {}

    def checked(self, key: Key, options: bytes) -> dict[str, Any]:
        """Return the options of a push, in the form that `update` expects.

        Raises:
            ProtocolError: If they are malformed, an option is unknown, or the optimizer refuses it.
        """
        checked = self._checked.get((key.optimizer, options))
        if checked is None:
            try:
                decoded = from_msgpack(options, dict[str, Any])
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"options of {key} that are malformed: {error}") from error
            checked = _checked_options(self._of(key), decoded)
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            self._checked[key.optimizer, options] = checked
        return checked

    def update(
        self,
        key: Key,
        parameter: nn.Parameter,
        options: Mapping[str, Any],
        pushes_per_step: int = 1,
    ) -> None:
        """Update a key's parameter, whose `grad` is the merged gradient, and may be changed.

        Args:
            key: The key.
            parameter: Its parameter.
            options: Options from `checked`.
            pushes_per_step: Number of workers if the gradient is that of one of them.

        Raises:
            ProtocolError: If the optimizer fails; the parameter is then in any state.
        """
        optimizer = self._of(key)
        if not _is_of_torch(type(optimizer)) and parameter.grad is not None:
            # A class of the user's own may keep the gradient, and its memory is used again.
            parameter.grad = parameter.grad.clone()
        self._step(optimizer, key, parameter, options, pushes_per_step)

    def state(self, key: Key, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a key: tensors and numbers by name; empty before the first update."""
        return dict(self._of(key).state.get(parameter, {}))

    def set_state(self, key: Key, parameter: nn.Parameter, name: str, value: Any) -> None:
        """Set a part of a key's state, which need not be checked."""
        self._of(key).state[parameter][name] = value

    def load_state(self, key: Key, parameter: nn.Parameter, name: str, value: Any) -> None:
        """Set a part of a key's state, in the form that the optimizer itself would give it.

        Raises:
            ProtocolError: If the optimizer has no such state, or one of another shape.
        """
        states = self._of(key).state
        if parameter not in states:
            states[parameter] = self._first_state(key, parameter)
        own = states[parameter]
        if name not in own:
            if value is None:
                return
            raise ProtocolError(f"{key} has no optimizer state {name!r}.")
        own[name] = _like(own[name], value, f"the optimizer state {name!r} of {key}")

    def _first_state(self, key: Key, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state after a first update, of a parameter like the given one.

        An optimizer does not check what is in its state. Its kernels would read and write beyond a
        tensor that is too small.
        """
        optimizer, probe = self._of(key), nn.Parameter(torch.zeros_like(parameter), False)
        probe.grad = torch.zeros_like(parameter)
        options = _checked_options(optimizer, self._setups[key.optimizer].groups[key.group])
        try:
            self._step(optimizer, key, probe, options, 1)
        finally:
            state = optimizer.state.pop(probe, {})
        return dict(state)

    @staticmethod
    def _step(
        optimizer: Optimizer,
        key: Key,
        parameter: nn.Parameter,
        options: Mapping[str, Any],
        pushes: int,
    ) -> None:
        groups = optimizer.param_groups
        try:
            step = PushStep(type(optimizer), {**optimizer.defaults, **options}, pushes)
            optimizer.param_groups = [{**step.options, "params": [parameter]}]
            with torch.no_grad():
                step.before(parameter)
            optimizer.step()
            _require_same_options(optimizer, step.options)
            with torch.no_grad():
                step.after(parameter, optimizer.state[parameter])
        except Exception as error:  # An optimizer may raise anything for options that it accepted.
            raise ProtocolError(
                f"{type(optimizer).__name__} failed at {key}: {type(error).__name__}: "
                f"{text_of(error)}"
            ) from error
        finally:
            optimizer.param_groups = groups

    def _of(self, key: Key) -> Optimizer:
        optimizer = self._optimizers[key.optimizer]
        assert optimizer is not None
        return optimizer


def _make_optimizer(setup: OptimizerSetup, parameters: list[nn.Parameter]) -> Optimizer:
    kind = _registry.get(setup.name)
    if kind is None:
        raise ProtocolError(
            f"the optimizer {setup.name} is not known to this server. Start it with `dlres ps "
            f"serve --optimizer {setup.name}`."
        )
    if len(setup.groups) > _MAX_GROUPS:
        raise ProtocolError(f"{len(setup.groups)} groups, expected at most {_MAX_GROUPS}.")
    try:
        # One group: each update comes with the options of its own.
        optimizer = kind(parameters)  # type: ignore[call-arg]
    except Exception as error:  # A registered class may raise anything.
        raise ProtocolError(
            f"{setup.name} cannot be made from parameters alone: {text_of(error)}. Give its other "
            "arguments defaults."
        ) from error
    for options in setup.groups:
        _checked_options(optimizer, options)
    return optimizer


def _is_of_torch(kind: type[Optimizer]) -> bool:
    return kind.__module__.startswith("torch.")


def _require_sendable(name: str, state: Mapping[str, Any]) -> None:
    """Raise if the state of an optimizer cannot be sent or kept in a snapshot.

    Raises:
        ProtocolError: If it cannot.
    """
    for part, value in state.items():
        if isinstance(value, Tensor):
            fits = str(value.dtype).removeprefix("torch.") in STATE_DTYPES
        else:
            fits = value is None or isinstance(value, (bool, int, float))
        if not fits:
            got = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else repr(value)[:80]
            raise ProtocolError(
                f"the state of {name} must have numbers, and tensors of numbers, for a parameter "
                f"server, got {got} in {part!r}. Let it keep these only."
            )


def _require_same_options(optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    """Raise if a step has changed the options, which come anew with each push.

    Raises:
        ValueError: If it has.
    """
    (group,) = optimizer.param_groups
    after = {name: value for name, value in group.items() if name != "params"}
    changed = sorted(n for n in {*after, *options} if _is_other(after.get(n), options.get(n)))
    if changed:
        raise ValueError(
            f"its step changes {changed[0]!r} in its group, which servers do not keep. Let it "
            "count in the state of each parameter."
        )


def _checked_options(optimizer: Optimizer, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a message in the form that the optimizer expects.

    Raises:
        ProtocolError: If one is unknown or of a wrong type, or the optimizer refuses it.
    """
    checked, is_of_torch = {}, _is_of_torch(type(optimizer))
    for name, value in options.items():
        if name in _LOCAL_OPTIONS or (is_of_torch and name not in optimizer.defaults):
            raise ProtocolError(f"the optimizer has no option {name!r}.")
        if isinstance(value, list):
            value = tuple(value)
        if not _is_plain(value) or not _is_like(optimizer.defaults.get(name, value), value):
            raise ProtocolError(f"the optimizer's option {name!r} has the value {value!r}.")
        checked[name] = value
    kind = type(optimizer)
    # Its constructor checks ranges, and which options go together.
    accepted = {n: v for n, v in checked.items() if n in inspect.signature(kind).parameters}
    try:
        # Some classes take matrices only.
        dims = max(p.dim() for group in optimizer.param_groups for p in group["params"])
        kind([nn.Parameter(torch.zeros([1] * max(dims, 1)))], **accepted)
    except Exception as error:  # A registered class may raise anything.
        raise ProtocolError(f"{kind.__name__} refused its options: {text_of(error)}") from error
    return checked


def _is_other(value: Any, before: Any) -> bool:
    """Return True if an option was changed, or added, by a step."""
    if isinstance(value, Tensor) or isinstance(before, Tensor):
        return value is not before
    return bool(value != before)


def _is_like(default: Any, value: Any) -> bool:
    """Return True if a value may take the place of an option's default."""
    if isinstance(default, (tuple, list)):
        is_pair = isinstance(value, tuple) and len(value) == len(default)
        return is_pair and all(map(_is_like, default, value))
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, (int, float, Tensor)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and (abs(value) <= _LARGEST or math.isinf(value))
    if isinstance(default, str):
        return isinstance(value, str)
    return not isinstance(value, str)


def _like(own: Any, value: Any, what: str) -> Any:
    """Return a value of a state in the form of the state that an optimizer made itself.

    Raises:
        ProtocolError: If it has another shape.
    """
    if isinstance(own, Tensor):
        given = value if isinstance(value, Tensor) else None
        if given is None and own.dim() == 0 and isinstance(value, (int, float)):
            # Earlier versions of torch count steps by plain numbers.
            given = torch.tensor(float(value))
        if given is None or given.shape != own.shape:
            shape = "no tensor" if given is None else f"the shape {tuple(given.shape)}"
            raise ProtocolError(f"{what} has {shape}, expected {tuple(own.shape)}.")
        return given.to(own.dtype)
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ProtocolError(f"{what} has the shape {tuple(value.shape)}, expected a number.")
        value = value.item()
    if own is not None and (value is None or isinstance(own, bool) != isinstance(value, bool)):
        raise ProtocolError(f"{what} has the value {value!r}.")
    return value


def _plain(value: Any) -> Any:
    """Return an option as a number, text or tuple of Python's own, if it is like one."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    if isinstance(value, (np.generic, np.ndarray)):
        return value.item() if value.size == 1 else value
    # A schedule may compute it with a class of its own.
    base = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    return value if base is None else base(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= 8 and all(map(_is_plain, value))
    if isinstance(value, float):
        return not math.isnan(value)
    return value is None or isinstance(value, (bool, int, str))
