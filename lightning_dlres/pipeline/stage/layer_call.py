"""One call of a layer outside of training, and what it changes of its inputs.

One rank makes the call, and all others go on with its result. So they must also get the inputs
that the call has changed in place. Where the output shares memory with an input, or within itself,
it must do so on all ranks: the caller may change it in place.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, flatten, tensors_of, unflatten
from lightning_dlres.pipeline.stage.output_views import views_in, with_views


def call_with_changes(name: str, inputs: Tree, call: Callable[[], Tree]) -> list[Tree]:
    """Call a layer; return its output, the inputs that it has changed, and what shares memory, for
    `with_changes_made`.

    Args:
        name: Name of the layer, for errors.
        inputs: Inputs of the call.
        call: Makes the call.

    Raises:
        ConfigError: If the inputs are not data.
        UnsupportedStepError: If the call changes a container among its inputs.
    """
    structure, tensors = flatten(inputs)
    before = [tensor.clone() for tensor in tensors]
    output = call()
    structure_now, tensors_now = flatten(inputs)
    is_same = len(tensors) == len(tensors_now) and all(
        old is new for old, new in zip(tensors, tensors_now, strict=True)
    )
    # Structures may hold a NaN, which does not equal itself.
    if not is_same or msgspec.msgpack.encode(structure) != msgspec.msgpack.encode(structure_now):
        raise UnsupportedStepError(
            f"The layer {name!r} must not change the lists and dicts that it gets, got a change, "
            "which other ranks would not see. Return the new values, or use evaluation='whole'."
        )
    pairs = enumerate(zip(tensors, before, strict=True))
    changed = [[index, now] for index, (now, old) in pairs if not torch.equal(now, old)]
    return [output, changed, views_in(tensors, tensors_of(output))]


def with_changes_made(inputs: Tree, result: Tree) -> Tree:
    """Change the inputs on this rank as the call did, and return the output.

    Args:
        inputs: Inputs of the call.
        result: What `call_with_changes` has returned on the rank that made the call, on the device
            of this rank.
    """
    output, changed, views = result
    tensors = tensors_of(inputs)
    for index, value in changed:
        tensors[index].copy_(value)
    structure, outputs = flatten(output)
    return unflatten(structure, with_views(views, tensors, outputs))
