"""The model as a profile sees it: layers and a loss, without a trainer."""

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

    def finish(self, output: Tree, microbatch: int | None, sizes: Sequence[int]) -> Tensor:
        """Return the loss of the layers' output."""

    def undo_metrics(self) -> None:
        """Take back what the run has changed in metrics."""


@dataclass(frozen=True, kw_only=True)
class ProfiledModel:
    """A model whose layers and loss can be run one by one.

    Attributes:
        root: the whole model.
        names: name of each layer within the root.
        modules: the layers, in the order in which they are applied.
        bind: returns the function that runs a given module as the layer of this index.
        device: where the layers run.
        non_pipelined: trainable parameters outside of the layers.
        start_loss: returns the run of the loss over a batch; it may raise what user code raises.
        warn: shows a warning to the user, on rank 0.
    """

    root: nn.Module
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    bind: Callable[[int, nn.Module], Layer]
    device: torch.device
    non_pipelined: Sequence[nn.Parameter]
    start_loss: Callable[[Any], LossRun]
    warn: Callable[[str], None]
