"""Snapshots of the buffers of recomputed layers.

A recomputed layer runs twice. The second run must see the buffers that the first one saw, and its
changes to them must not count. BatchNorm's statistics are the usual case; a power iteration with
its vector in a buffer is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

# One (module, name of the buffer in the module, value) for each buffer.
BufferStates = list[tuple[nn.Module, str, Tensor]]


def snapshot_buffers(layer: nn.Module, previous: BufferStates) -> BufferStates:
    """Return copies of a layer's buffers.

    A buffer that has not changed since `previous` reuses its copy there, to save memory.
    """
    previous_values = {(module, name): value for module, name, value in previous}
    states: BufferStates = []
    for module in layer.modules():
        for name, buffer in module.named_buffers(recurse=False):
            value = previous_values.get((module, name))
            if value is None or value.shape != buffer.shape or not value.equal(buffer):
                value = buffer.detach().clone()
            states.append((module, name, value))
    return states


@contextmanager
def buffers_replaced(states: BufferStates) -> Iterator[None]:
    """Context manager in which the modules have copies of these values as their buffers.

    The original buffers are not written to, because an autograd graph may hold them.
    """
    originals = [(module, name, getattr(module, name)) for module, name, _ in states]
    for module, name, value in states:
        setattr(module, name, value.clone())
    try:
        yield
    finally:
        for module, name, buffer in originals:
            setattr(module, name, buffer)
