"""Buffers outside of the layers (a centre, a queue, the statistics of a norm before or after the
pipelined module) that a training step changes.

As with plain attributes, every run of the step starts from the same values, on copies, and what one
run left is made so on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_dlres.pipeline.execute.partition import ModelLayers

Buffers = dict[str, Tensor]


class NonPipelinedBuffers:
    """The buffers of a model that belong to no layer; one that several modules have, under a name
    in each. Made anew for every step: the modules are looked up once."""

    def __init__(self, layers: ModelLayers, device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._modules = list(layers.non_pipelined_modules())

    def snapshot(self) -> Buffers:
        """Return the buffers themselves."""
        return {
            f"{name}.{key}" if name else key: buffer
            for name, module in self._modules
            for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        }

    def lend(self, buffers: Buffers) -> None:
        """Put copies of these buffers in their place; one with two names stays one."""
        copies = {id(buffer): buffer.detach().clone() for buffer in buffers.values()}
        for name, buffer in buffers.items():
            _put(self._layers.root, name, copies[id(buffer)])

    def restore(self, buffers: Buffers) -> None:
        """Put these buffers in their place, and nothing else."""
        for name, buffer in buffers.items():
            _put(self._layers.root, name, buffer)
        for name in self.snapshot().keys() - buffers.keys():
            _put(self._layers.root, name, None)

    def changes_since(self, buffers: Buffers) -> Buffers:
        """Return the values that are no longer those of the buffers that were lent."""
        return {
            name: buffer.detach().clone()
            for name, buffer in self.snapshot().items()
            if name not in buffers or not _same(buffer, buffers[name])
        }

    def apply(self, changes: Mapping[str, Tensor]) -> None:
        """Follow the changes of another rank: in place, where shape and dtype allow it."""
        buffers = self.snapshot()
        with torch.no_grad():
            for name, value in changes.items():
                buffer = buffers.get(name)
                if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                    _put(self._layers.root, name, value.to(self._device, copy=True))
                else:
                    buffer.copy_(value)


def _put(root: nn.Module, name: str, buffer: Tensor | None) -> None:
    owner, _, key = name.rpartition(".")
    setattr(root.get_submodule(owner), key, buffer)


def _same(a: Tensor, b: Tensor) -> bool:
    # By value: the running statistics of a norm change without a trace in the version counter.
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
