"""Further arguments of a pipelined list's members, which a member may change.

User code may call the members of an `nn.ModuleList` with an object of its own that they fill, such
as a list of auxiliary losses. The members run on copies of it, on other ranks. So the changes
travel with the activations, and the code after the last member finds them in its own objects.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dlres.core.wire.tree import Tree

# Number of a positional argument behind the first one, or name of a keyword argument.
Position = int | str
# Keys of what `with_changes` returns.
_OUTPUT, _CHANGES = "output of the list", "arguments that its members have changed"
# Key of a container that all members of an `nn.Sequential` so far have returned.
_SAME = "container that the members return"


class ArgumentChanges:
    """Finds the arguments that a call changes. Make an instance before the call.

    Args:
        args: Positional arguments behind the first one.
        kwargs: Keyword arguments.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._arguments: dict[Position, Any] = dict(enumerate(args))
        self._arguments.update(kwargs)
        self._before = {position: _state(value) for position, value in self._arguments.items()}

    def positions(self) -> list[Position]:
        """Return the arguments that have changed since this object was made."""
        arguments, before = self._arguments, self._before
        return [p for p, value in arguments.items() if _is_changed(value, before[p])]


def with_changes(
    output: Tree, args: Sequence[Any], kwargs: Mapping[str, Any], positions: Sequence[Position]
) -> Tree:
    """Return the output of the last member, with the arguments at some positions."""
    changes = [[p, args[p] if isinstance(p, int) else kwargs[p]] for p in positions]
    return {_OUTPUT: output, _CHANGES: changes} if changes else output


def given_back(crossing: Tree, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tree:
    """Return the output in what `with_changes` has returned, and make the changes.

    Args:
        crossing: What the last member has returned.
        args: The user's own positional arguments behind the first one.
        kwargs: The user's own keyword arguments.
    """
    if not isinstance(crossing, dict) or crossing.keys() != {_OUTPUT, _CHANGES}:
        return crossing
    for position, value in crossing[_CHANGES]:
        own = args[position] if isinstance(position, int) else kwargs[position]
        if isinstance(own, Tensor):
            # User code reads its own tensor, which must get the gradient's path, too.
            own.copy_(value)
        else:
            _written(own, value)
    return crossing[_OUTPUT]


class SequentialMember:
    """A member of an `nn.Sequential` as one layer.

    User code may read the container that it gave to the first member. The members may change it,
    and return it.

    Args:
        module: The member.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, inputs: Tree) -> Tree:
        is_wrapped = isinstance(inputs, dict) and inputs.keys() == {_SAME}
        own = inputs[_SAME] if is_wrapped else inputs
        output = self._module(own)
        is_container = not isinstance(own, Tensor | tuple) and _children(own) is not None
        return {_SAME: output} if output is own and is_container else output


def given_back_container(output: Tree, own: Any) -> Tree:
    """Return the output of an `nn.Sequential`, which is the user's own container if all members
    have returned what they got.

    Args:
        output: What the last member has returned.
        own: The argument of the call.
    """
    is_same = isinstance(output, dict) and output.keys() == {_SAME}
    return _written(own, output[_SAME]) if is_same else output


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and elements of a container; None for anything else."""
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def _state(value: Any) -> Any:
    """Return what shows later if a value has been changed in place."""
    if isinstance(value, Tensor):
        # Tensors of the inference mode have no version.
        return value.clone() if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return value.copy()
    return [(key, child, _state(child)) for key, child in _children(value) or ()]


def _is_changed(value: Any, state: Any) -> bool:
    if isinstance(value, Tensor):
        is_version = isinstance(state, int)
        return value._version != state if is_version else not torch.equal(value, state)
    if isinstance(value, np.ndarray):
        return not np.array_equal(value, state)
    children = _children(value) or []
    return len(children) != len(state) or any(
        key != old_key or child is not old or _is_changed(child, old_state)
        for (key, child), (old_key, old, old_state) in zip(children, state, strict=True)
    )


def _written(own: Any, value: Any) -> Any:
    """Give the user's object another value, in place if possible; return the object to use."""
    if isinstance(own, Tensor) and isinstance(value, Tensor):
        if value.requires_grad or own.shape != value.shape or own.dtype != value.dtype:
            return value
        # Other code may hold the same tensor.
        return own if torch.equal(own, value) else own.copy_(value)
    if isinstance(own, np.ndarray) and isinstance(value, np.ndarray) and own.shape == value.shape:
        own[...] = value
        return own
    old, new = _children(own), _children(value)
    if old is None or new is None or type(own) is not type(value):
        return value
    held = dict(old)
    elements = {key: _written(held[key], e) if key in held else e for key, e in new}
    if isinstance(own, list):
        own[:] = elements.values()
    elif isinstance(own, tuple):
        is_same = all(elements[key] is child for key, child in old)
        return own if is_same and len(old) == len(new) else value
    elif isinstance(own, MutableMapping):
        for key in held.keys() - elements.keys():
            del own[key]
        own.update(elements)
    elif isinstance(own, Mapping):
        return value
    else:
        for key, element in elements.items():
            if element is not held[key]:
                setattr(own, key, element)
    return own
