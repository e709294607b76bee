"""One call of a layer outside of training, and what it changes beside its result.

One rank makes the call, and all others go on with its result. So they must also get the inputs
that the call has changed in place, and the attributes that it has set in its modules, such as an
auxiliary loss that other code reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, flatten, map_tensors, tensors_of
from lightning_dlres.pipeline.stage.module_attributes import TORCH_ATTRIBUTES


def call_with_changes(name: str, layer: nn.Module, inputs: Tree, call: Callable[[], Tree]) -> Tree:
    """Call a layer; return its output and its other changes, as one tree for `with_changes_made`.

    Args:
        name: Name of the layer, for errors.
        layer: The layer.
        inputs: Inputs of the call.
        call: Makes the call.

    Raises:
        ConfigError: If the inputs are not data.
        UnsupportedStepError: If the call changes a container among its inputs.
    """
    structure, tensors = flatten(inputs)
    before = [tensor.clone() for tensor in tensors]
    attributes = {path: dict(vars(module)) for path, module in layer.named_modules()}
    output = call()
    structure_now, tensors_now = flatten(inputs)
    is_same = len(tensors) == len(tensors_now) and all(
        old is new for old, new in zip(tensors, tensors_now, strict=True)
    )
    # Structures may hold a NaN, which does not equal itself.
    if not is_same or msgspec.msgpack.encode(structure) != msgspec.msgpack.encode(structure_now):
        raise UnsupportedStepError(
            f"The layer {name!r} must not change the lists and dicts that it gets, got a change, "
            "which other ranks would not see. Return the new values instead."
        )
    pairs = enumerate(zip(tensors, before, strict=True))
    changed = [[index, now] for index, (now, old) in pairs if not torch.equal(now, old)]
    new = [
        [path, attribute, map_tensors(Tensor.detach, value)]
        for path, module in layer.named_modules()
        for attribute, value in _new_data(attributes.get(path, {}), vars(module))
    ]
    return [output, changed, new]


def with_changes_made(layer: nn.Module, inputs: Tree, result: Tree, device: torch.device) -> Tree:
    """Make the changes of a call on this rank, and return the output.

    Args:
        layer: The layer.
        inputs: Inputs of the call.
        result: What `call_with_changes` has returned on the rank that made the call.
        device: Device of this rank.
    """
    output, changed, new = map_tensors(lambda tensor: tensor.to(device), result)
    tensors = tensors_of(inputs)
    for index, value in changed:
        tensors[index].copy_(value)
    for path, name, value in new:
        vars(layer.get_submodule(path))[name] = value
    return output


def _new_data(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that have another value now, if that is data."""
    for name, value in now.items():
        if name in TORCH_ATTRIBUTES or (name in before and before[name] is value):
            continue
        try:
            flatten(value)
        except ConfigError:
            continue
        yield name, value
