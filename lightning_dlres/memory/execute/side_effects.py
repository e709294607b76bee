"""Detection of side effects of a module's forward.

A second run would repeat them, or compute with the changed state.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_dlres.core._compat import is_wrapped, version_of

# Containers in attributes are compared by content up to this nesting depth.
_MAX_DEPTH = 4
# Types of immutable values, which are compared by value.
PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Number of elements that a checksum multiplies by their weights at a time. It fits in a processor's
# cache, and on a GPU it needs few kernels.
_CHUNK = 1 << 17
# Factors (odd, as signed 64-bit integers) and shifts that mix the bits of a number.
_MIXING = ((-7046029254386353131, 32), (-4658895280553007687, 29))


class SideEffectProbe:
    """Snapshot of a module's state before a forward, for comparison with the state after it.

    The state is made of the module's parameters, buffers and attributes, and of the global random
    generators of Python and NumPy. Those of torch are left out, since a second run restores them.
    Other state outside of the module is not covered.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = _state(module)

    def has_side_effects(self) -> bool:
        """Return whether the state has changed since construction."""
        return not _is_same(self._before, _state(self._module))


def _state(module: nn.Module) -> list[Any]:
    """Return the state that a forward could change."""
    numpy_state: Any = np.random.get_state(legacy=True)
    state: list[Any] = [random.getstate(), numpy_state[1].tobytes(), *numpy_state[2:]]
    for inner in module.modules():
        state += [_content(value, 0) for value in vars(inner).values()]
    return state


def _content(value: Any, depth: int) -> Any:
    """Return a value's content in a comparable form; the value itself if it cannot be read."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            # A write of equal values counts, too: recomputation refuses a new version.
            return value, None if value.is_inference() else version_of(value), checksum(value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return [(key, _content(inner, depth + 1)) for key, inner in value.items()]
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return [_content(inner, depth + 1) for inner in value]
    return value


def checksum(tensor: Tensor) -> Any:
    """Return dtype, shape and a weighted sum of a tensor's bits; None without plain memory.

    The sum differs if an element differs or has moved, except by rare accident.
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or is_lazy(tensor):
        return None
    if not tensor.numel() or tensor.is_nested or tensor.is_quantized or is_wrapped(tensor):
        return None
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    dtype = {1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32)
    return tensor.dtype, tensor.shape, int(_weighted_sum(flat.view(dtype)))


def _weighted_sum(elements: Tensor) -> Tensor:
    """Return the sum of the elements times pseudo-random weights, modulo 2**64."""
    # Chunks bound the temporary memory: the products take up to 8 times that of the elements.
    chunks = elements.split(_CHUNK)
    weights = _weights(len(chunks[0]), elements.device)
    sums = torch.stack([(chunk * weights[: len(chunk)]).sum() for chunk in chunks])
    # The weight of an element is that of its place in the chunk times that of the chunk.
    return (sums * _weights(len(chunks), elements.device)).sum()


def _weights(count: int, device: torch.device) -> Tensor:
    """Return the first of a fixed sequence of pseudo-random 64-bit weights.

    They come from the finaliser of a hash, without a random generator, whose state the user would
    see change. Small or regular weights would give equal sums for some reorderings.
    """
    weights = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor, shift in _MIXING:
        weights.mul_(factor)
        weights.bitwise_xor_(weights >> shift)
    return weights


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        same = (_is_same(a, b) for a, b in zip(one, other, strict=False))
        return len(one) == len(other) and all(same)
    if isinstance(one, PLAIN) and type(one) is type(other):
        # NaN is not equal to itself. Here it must count as unchanged.
        return bool(one == other) or one != one
    return one is other


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the strided tensors with memory from nested containers and dataclasses."""
    if isinstance(value, Tensor):
        if is_lazy(value) or value.layout is not torch.strided or value.is_nested:
            return
        if is_wrapped(value):
            return
        if value.device.type != "meta" and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple, set)):
        for inner in value:
            yield from tensors_in(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from tensors_in(getattr(value, item.name, None))
