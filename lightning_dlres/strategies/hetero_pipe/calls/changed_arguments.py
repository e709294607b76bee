"""Further arguments of a pipelined list's members, which a member may change.

User code may call the members of an `nn.ModuleList` with an object of its own that they fill, such
as a list of auxiliary losses. The members run on copies of it, on other ranks. So the changes
travel with the activations, and the code after the last member finds them in its own objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.pipeline.stage.microbatch import samples_in

# Keys from the arguments to an object in them. The first one is the number of a positional argument
# behind the first, or the name of a keyword argument.
Path = tuple[Any, ...]
# Keys of what `with_changes` returns.
_OUTPUT, _CHANGES = "output of the list", "changes by its members"
# Keys of what a member of an `nn.Sequential` returns: the user's own container while it is the
# output, and then the output beside the changes in that container.
_OWN, _OTHER = "container of the user", "output beside it"


class ArgumentChanges:
    """Finds what a call changes in its arguments. Make an instance before the call.

    Args:
        args: Positional arguments behind the first one.
        kwargs: Keyword arguments.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._arguments = _by_position(args, kwargs)
        self._before = {position: _state(value) for position, value in self._arguments.items()}

    def found(self) -> list[list[Any]]:
        """Return the changes since this object was made, as plain data for `with_changes`."""
        return [
            [list(path), is_in_place]
            for position, value in self._arguments.items()
            for path, is_in_place in _changes(value, self._before[position], (position,))
        ]


def with_changes(
    output: Tree, args: Sequence[Any], kwargs: Mapping[str, Any], changes: Sequence[list[Any]]
) -> Tree:
    """Return the output of the last member, with the values at the places that have changed.

    Args:
        output: The output.
        args: Positional arguments behind the first one, as they are now.
        kwargs: Keyword arguments, as they are now.
        changes: Changes that `ArgumentChanges` has found in the calls of all members.
    """
    if not changes:
        return output
    return {_OUTPUT: output, _CHANGES: _latest(_by_position(args, kwargs), changes)}


def given_back(crossing: Tree, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tree:
    """Return the output in what `with_changes` has returned, and make the changes.

    Args:
        crossing: Result of the last member.
        args: The user's own positional arguments behind the first one.
        kwargs: The user's own keyword arguments.

    Raises:
        UnsupportedStepError: If an object that has changed is among the arguments twice. Later
            members would have had two copies of it.
    """
    if not isinstance(crossing, dict) or crossing.keys() != {_OUTPUT, _CHANGES}:
        return crossing
    _make(crossing[_CHANGES], _by_position(args, kwargs))
    return crossing[_OUTPUT]


class SequentialMember:
    """A member of an `nn.Sequential` as one layer.

    User code may read the container that it gave to the first member. The members may change it,
    and return it or another one, beside which its changes then travel.

    Args:
        module: The member.
        is_first: Whether its input is the user's own.
    """

    def __init__(self, module: nn.Module, is_first: bool) -> None:
        self._module, self._is_first = module, is_first

    def __call__(self, inputs: Tree) -> Tree:
        if _carries(inputs) and _OTHER in inputs:
            return {**inputs, _OTHER: self._module(inputs[_OTHER])}
        own, changes = (inputs[_OWN], inputs[_CHANGES]) if _carries(inputs) else (inputs, [])
        is_container = not isinstance(own, Tensor | tuple) and _children(own) is not None
        if not is_container or not (_carries(inputs) or self._is_first):
            return self._module(own)
        samples, found = samples_in(own), ArgumentChanges([own], {})
        output = self._module(own)
        changes = [*changes, *found.found()]
        if output is own:
            return {_OWN: own, _CHANGES: changes}
        if not changes:
            return output
        return {_OTHER: output, _CHANGES: _with_samples(_latest({0: own}, changes), samples)}


def given_back_container(output: Tree, own: Any) -> Tree:
    """Return the output of an `nn.Sequential`, and make the changes of the members in the user's
    own container.

    Args:
        output: Result of the last member.
        own: The argument of the call.
    """
    if not _carries(output):
        return output
    if _OTHER in output:
        _make(output[_CHANGES], {0: own})
        return output[_OTHER]
    return _written(own, output[_OWN])


def _carries(value: Tree) -> bool:
    """Return whether a member's result holds the user's own container, or changes in it."""
    return isinstance(value, dict) and value.keys() in ({_OWN, _CHANGES}, {_OTHER, _CHANGES})


def _with_samples(changes: Sequence[list[Any]], samples: int | None) -> list[list[Any]]:
    """Return the changes with tensors of samples, and with nothing in the place of all else.

    Most often user code does not read the container again, and what layers have stored in it may be
    no data, or that of a single micro-batch. Code that reads it finds nothing there.
    """

    def is_kept(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == samples

    kept = []
    for path, is_in_place, values in changes:
        is_sent = bool(values) and is_kept(values[0])
        # An item of a list that goes would move those behind it.
        nothing = [None] if values and isinstance(path[-1], int) else []
        kept.append([path, is_in_place and is_sent, values if is_sent else nothing])
    return kept


def _latest(arguments: Mapping[Any, Any], changes: Sequence[list[Any]]) -> list[list[Any]]:
    """Return the changes with the values that are there now, for `_make`."""
    replaced = {tuple(path) for path, is_in_place in changes if not is_in_place}
    latest = {tuple(path): tuple(path) not in replaced for path, _ in changes}
    return [
        [list(path), is_in_place, _values_at(arguments, path)]
        for path, is_in_place in latest.items()
        # An object that has replaced another one already has its own changes.
        if not any(path[:depth] in replaced for depth in range(len(path)))
    ]


def _make(changes: Sequence[list[Any]], arguments: Mapping[Any, Any]) -> None:
    """Make the changes in the user's own objects.

    Raises:
        UnsupportedStepError: If an object that has changed is there twice.
    """
    changed = [
        # The object that has changed, and the key of what it has there now; no key for itself.
        (_values_at(arguments, path if is_in_place else path[:-1]), path[-1], is_in_place, values)
        for path, is_in_place, values in changes
    ]
    uses = Counter(id(o) for own in arguments.values() for o in _mutable_in(own))
    if any(uses[id(own)] > 1 for owners, *_ in changed for own in owners):
        raise UnsupportedStepError(
            "An object that the layers of a list change must be among their arguments once, got "
            "one that is there twice. Pass it once."
        )
    for owners, _, is_in_place, values in changed:
        if is_in_place and owners:
            # Other code may hold the same object, which then has the gradient's path, too.
            _write_into(owners[0], values[0])
    # Items at the end of lists go from the last one on, and new ones come from the first one on.
    replaced = sorted(
        (
            [owners[0], key, values]
            for owners, key, is_in_place, values in changed
            if not is_in_place and owners
        ),
        key=lambda change: change[1] if isinstance(change[0], list) else 0,
    )
    for own, key, values in reversed(replaced):
        if not values:
            _remove(own, key)
    for own, key, values in replaced:
        if values:
            _put(own, key, values[0])


def with_own_containers(inputs: Tree) -> Tree:
    """Return the inputs of a call with containers of their own.

    The run of the step up to the call is undone, and with it what the step has done to its own
    containers.
    """
    try:
        return map_tensors(lambda tensor: tensor, inputs)
    except ConfigError:
        # The rank that sends the inputs refuses them.
        return inputs


def _by_position(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    arguments: dict[Any, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    return arguments


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and elements of a container; None for anything else."""
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        # A field without an initial value may not be set yet.
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        return [(name, getattr(value, name)) for name in names]
    return None


def _values_at(arguments: Mapping[Any, Any], path: Sequence[Any]) -> list[Any]:
    """Return a list with what is at a place, empty if there is nothing."""
    found: Any = arguments
    for key in path:
        children = dict(_children(found) or ())
        if key not in children:
            return []
        found = children[key]
    return [found]


def _write_into(own: Any, value: Any) -> None:
    """Give a tensor or an array of the user's other values."""
    if isinstance(own, Tensor):
        own.copy_(value)
    else:
        own[...] = value


def _remove(own: Any, key: Any) -> None:
    if isinstance(own, list):
        del own[key : key + 1]
    elif isinstance(own, MutableMapping):
        own.pop(key, None)


def _put(own: Any, key: Any, value: Any) -> None:
    if isinstance(own, list):
        # The place behind the last item is the slice of no item.
        own[key : key + 1] = [value]
    elif isinstance(own, MutableMapping):
        own[key] = value
    else:
        setattr(own, key, value)


def _mutable_in(value: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and containers in a value that may change in place."""
    children = _children(value)
    if isinstance(value, Tensor | np.ndarray) or (
        children is not None and type(value) is not tuple
    ):
        yield value
    for _, child in children or ():
        yield from _mutable_in(child)


def _state(value: Any) -> Any:
    """Return what shows later if a value has been changed in place."""
    if isinstance(value, Tensor):
        # Tensors of the inference mode have no version.
        return value.clone() if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return value.copy()
    return {key: (child, _state(child)) for key, child in _children(value) or ()}


def _are_equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Return whether two arrays hold the same bytes: NaN does not equal itself."""
    if a.dtype.hasobject or b.dtype.hasobject:
        return np.array_equal(a, b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _changes(value: Any, state: Any, path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield where a value has changed, and whether the object there is still the same one."""
    if isinstance(value, Tensor):
        is_version = isinstance(state, int)
        if value._version != state if is_version else not torch.equal(value, state):
            yield path, True
    elif isinstance(value, np.ndarray):
        if not _are_equal(value, state):
            yield path, True
    else:
        children = dict(_children(value) or ())
        for key in dict.fromkeys([*children, *state]):
            is_kept = key in children and key in state and children[key] is state[key][0]
            if is_kept:
                yield from _changes(children[key], state[key][1], (*path, key))
            else:
                yield (*path, key), False


def _written(own: Any, value: Any) -> Any:
    """Give an object of the user's the content of another one; return what to use for it."""
    if isinstance(own, Tensor) and isinstance(value, Tensor):
        is_same = own.shape == value.shape and own.dtype == value.dtype
        return own if is_same and not value.requires_grad and torch.equal(own, value) else value
    if isinstance(own, np.ndarray) and isinstance(value, np.ndarray):
        return own if _are_equal(own, value) else value
    old, new = _children(own), _children(value)
    if old is None or new is None or type(own) is not type(value):
        return value
    held = dict(old)
    elements = {
        key: _written(held[key], element) if key in held else element for key, element in new
    }
    if isinstance(own, list):
        own[:] = elements.values()
    elif isinstance(own, tuple):
        is_same = all(elements.get(key) is child for key, child in old)
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
