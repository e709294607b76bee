"""Changes of a training step to buffers that belong to no layer.

Examples are a running centre, a queue, and the statistics of a norm before or after the pipelined
module. As for attributes, each run of the step works on copies of the values before the step. After
the last run, every rank applies the values that one of the runs left.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.strategies.hetero_pipe.replay.user_objects import same_tensors

Buffers = dict[str, Tensor]


class NonPipelinedBuffers:
    """The buffers of a model that belong to no layer.

    A buffer that several modules share has one name per module. Make a new instance for every step:
    it looks up the modules only once, and user code may add some between steps.

    Args:
        layers: The model's layers.
        device: Device of this rank, for buffers that `apply` makes: those without a buffer of the
            same shape and dtype on this rank.
    """

    def __init__(self, layers: ModelLayers, device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._modules = list(layers.non_pipelined_modules())

    def snapshot(self) -> Buffers:
        """Return the buffers by name: the tensors themselves, not copies."""
        return {
            f"{name}.{key}" if name else key: buffer
            for name, module in self._modules
            for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        }

    def isolate(self, before: Buffers) -> None:
        """Replace the buffers of a snapshot by copies. A buffer with two names gets one copy, so
        that it stays shared."""
        copies = {id(buffer): buffer.detach().clone() for buffer in before.values()}
        for name, buffer in before.items():
            _set_buffer(self._layers.root, name, copies[id(buffer)])

    def diff(self, before: Buffers) -> Mapping[str, Tensor | None]:
        """Return copies of the buffers whose values differ from the snapshot; None for a buffer
        that the run has removed or set to None."""
        now = self.snapshot()
        return dict.fromkeys(name for name in before if name not in now) | {
            name: buffer.detach().clone()
            for name, buffer in now.items()
            # Compared by value: a norm changes its running statistics without raising the version
            # counter.
            if name not in before or not same_tensors(buffer, before[name])
        }

    def restore(self, before: Buffers) -> None:
        """Put the buffers of a snapshot back, and set all others to None."""
        for name, buffer in before.items():
            _set_buffer(self._layers.root, name, buffer)
        for name in self.snapshot().keys() - before.keys():
            _set_buffer(self._layers.root, name, None)

    def apply(self, changes: Mapping[str, Tensor | None]) -> None:
        """Give the buffers the values of a `diff`. A buffer stays the same tensor if its shape and
        dtype allow it, since user code may hold references to it."""
        buffers = self.snapshot()
        with torch.no_grad():
            for name, value in changes.items():
                buffer = buffers.get(name)
                if value is None:
                    _set_buffer(self._layers.root, name, None)
                elif buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                    new = value.to(self._device, copy=True)
                    _set_buffer(self._layers.root, name, new)
                else:
                    buffer.copy_(value)


def _set_buffer(root: nn.Module, name: str, buffer: Tensor | None) -> None:
    owner, _, key = name.rpartition(".")
    setattr(root.get_submodule(owner), key, buffer)
