"""Buffers of a layer that is recomputed (Method E, E8): running again, it sees the values it saw
before, and what it does to them counts once.

BatchNorm's statistics are the usual case; a power iteration that lives in a buffer is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

# Of every buffer its module, its name there, and a value.
BufferStates = list[tuple[nn.Module, str, Tensor]]


def snapshot_buffers(layer: nn.Module, latest: BufferStates) -> BufferStates:
    """Return the values of a layer's buffers; those that have not changed since `latest` are shared
    with it."""
    known = {(module, name): value for module, name, value in latest}
    found: BufferStates = []
    for module in layer.modules():
        for name, buffer in module.named_buffers(recurse=False):
            value = known.get((module, name))
            if value is None or value.shape != buffer.shape or not value.equal(buffer):
                value = buffer.detach().clone()
            found.append((module, name, value))
    return found


@contextmanager
def with_buffers(states: BufferStates) -> Iterator[None]:
    """Put copies of these values in the place of the buffers meanwhile. The buffers themselves are
    not written to: a graph may hold them."""
    outside = [(module, name, getattr(module, name)) for module, name, _ in states]
    for module, name, value in states:
        setattr(module, name, value.clone())
    try:
        yield
    finally:
        for module, name, buffer in outside:
            setattr(module, name, buffer)
