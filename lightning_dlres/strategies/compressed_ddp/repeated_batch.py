"""Batch that a rank repeats after its loader has ended, and that must leave no trace.

The rank runs the step because layers and logs in it may wait for all ranks. Its gradients are zero,
also if the loss is NaN, and what the step changes in buffers, metrics and logs is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dlres._compat import (
    EpochLogs,
    metric_defaults,
    metric_progress,
    set_metric_progress,
)


class RepeatedBatch:
    """Buffers, metrics and logs from before the step of a repeated batch.

    Args:
        module: Module whose step begins. It belongs to a Trainer in `fit`.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        self._metrics = [
            (
                metric,
                {name: _copy(getattr(metric, name)) for name in metric_defaults(metric)},
                metric_progress(metric),
            )
            for metric in module.modules()
            if isinstance(metric, Metric)
        ]
        self._logs = EpochLogs(module.trainer)
        self._logs.ignore_batch()

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Context manager of a backward in which all gradients of parameters are zero.

        A weight of zero would not be enough: zero times infinity is NaN.
        """
        parameters = (p for p in self._module.parameters() if p.requires_grad)
        handles = [parameter.register_hook(torch.zeros_like) for parameter in parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take_back(self) -> None:
        """Undo the changes of the step; called after its backward, whose graph may need them."""
        with torch.no_grad():
            for owner, name, buffer, saved in self._buffers:
                _restore_buffer(owner, name, buffer, saved)
        for metric, states, progress in self._metrics:
            for name, state in states.items():
                setattr(metric, name, _copy(state))
            set_metric_progress(metric, *progress)
        self._logs.restore()


def _restore_buffer(owner: nn.Module, name: str, buffer: Tensor, saved: Tensor) -> None:
    buffer.copy_(saved)
    if getattr(owner, name) is not buffer:
        setattr(owner, name, buffer)


def _copy(state: Any) -> Any:
    """Return a copy of a metric's state: a tensor, or a list to which tensors are appended."""
    return state.clone() if isinstance(state, Tensor) else list(state)
