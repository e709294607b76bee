"""Interface of the profiled model: its layers and its loss, independent of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.stage.stage import Layer


class LossRun(Protocol):
    """One run of the step's loss over a batch."""

    def finish(self, output: Tree, microbatch: int | None, sizes: Sequence[int]) -> Tensor | None:
        """Return the loss, computed from the output of the last layer; None without a loss.

        Args:
            output: Output of the last layer.
            microbatch: Index of the micro-batch; None for the whole batch.
            sizes: Number of samples of each micro-batch.
        """

    def restore_metrics(self) -> None:
        """Restore the state that metrics had before the run."""


@dataclass(frozen=True, kw_only=True)
class ProfiledModel:
    """A model whose layers and loss can be run one by one.

    Attributes:
        root: The whole model.
        names: Name of each layer within the root.
        modules: The layers, in the order of execution.
        bind: Takes a layer's index and a module, such as a copy of the layer. Returns a function
            that runs the module in the layer's place.
        device: Device of the layers.
        non_pipelined: Trainable parameters outside of the layers.
        start_loss: Takes a batch; returns a run of the loss over it. It may raise any error of the
            user's code.
        warn: Shows a warning to the user, on rank 0.
    """

    root: nn.Module
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    bind: Callable[[int, nn.Module], Layer]
    device: torch.device
    non_pipelined: Sequence[nn.Parameter]
    start_loss: Callable[[Any], LossRun]
    warn: Callable[[str], None]
