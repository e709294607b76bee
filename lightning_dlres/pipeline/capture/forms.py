"""Forms of a call's arguments: code may take another path if a mask is None or a flag is set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from lightning_dlres.core.wire.nested import named_tensors_in
from lightning_dlres.core.wire.tree import Structure, Tree, unflatten
from lightning_dlres.pipeline.capture.modes import device_of
from lightning_dlres.pipeline.capture.placeholders.skeleton import Skeleton
from lightning_dlres.pipeline.stage.microbatch import samples_in


def form_of(inputs: Skeleton) -> bytes:
    """Return the form of the inputs of a call.

    It has the places of tensors, None, booleans, and texts that are arguments themselves, such as
    the name of a task. It has neither numbers, which may differ in each call, nor texts in
    containers, such as the names of samples.

    Args:
        inputs: Skeleton of (args, kwargs).
    """
    return msgspec.msgpack.encode(_form(inputs.structure, depth=0))


# Tags of nodes, see `core.wire.tree`: those with a list of nodes, and those with pairs.
_SEQUENCES, _MAPPINGS, _TENSORS = ("l", "u", "n"), ("d", "m", "c"), ("t", "a", "g")
# Depth of the arguments themselves in the structure of (args, kwargs).
_ARGUMENTS = 2


def _form(node: Structure, depth: int) -> Any:
    tag, content = node[0], node[-1]
    if tag in _SEQUENCES and isinstance(content, list):
        return [*node[:-1], [_form(child, depth + 1) for child in content]]
    if tag in _MAPPINGS and isinstance(content, list):
        return [*node[:-1], [[key, _form(value, depth + 1)] for key, value in content]]
    if tag in _TENSORS:
        return tag
    is_kept = content is None or isinstance(content, bool) or tag in ("e", "k")
    is_kept |= isinstance(content, str) and tag == "v" and depth == _ARGUMENTS
    return node if is_kept else tag


def tensor_places(form: bytes) -> list[str]:
    """Return the places of tensors and arrays in a form, in order."""
    return list(_places(msgspec.msgpack.decode(form), ""))


def _places(node: Any, at: str) -> Iterator[str]:
    if isinstance(node, str):
        if node in _TENSORS:
            yield at
        return
    tag, content = node[0], node[-1]
    if tag in _SEQUENCES and isinstance(content, list):
        for index, child in enumerate(content):
            yield from _places(child, f"{at}.{index}")
    elif tag in _MAPPINGS and isinstance(content, list):
        for key, value in content:
            yield from _places(value, f"{at}.{key}")


def inputs_like(first: Tree, inputs: Skeleton, samples: int | None) -> Tree:
    """Return inputs of a form with the tensors of the first call, and zeros for those it had not.

    Args:
        first: Inputs of the first call, (args, kwargs).
        inputs: Skeleton of a call of the form.
        samples: Samples of that call; None if they are not known.
    """
    known, of_first = dict(named_tensors_in(first)), samples_in(first)
    zeros = []
    for shape, dtype, _ in inputs.tensors:
        is_batch = shape[:1] == (samples,)
        sizes = (of_first, *shape[1:]) if is_batch and of_first is not None else shape
        zeros.append(torch.zeros(sizes, dtype=getattr(torch, dtype), device=device_of(first)))
    named = named_tensors_in(unflatten(inputs.structure, zeros))
    places = {id(tensor): place for place, tensor in named}
    tensors = [known.get(places.get(id(zero), ""), zero) for zero in zeros]
    return unflatten(inputs.structure, tensors)
