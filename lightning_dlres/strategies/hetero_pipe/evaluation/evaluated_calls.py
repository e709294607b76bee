"""A module, or the modules of a step, whose calls run on the ranks that hold them.

A module with a forward of its own is cut on training samples. A run that only validates, tests or
predicts has none. It needs no cut either: all ranks run the user's code, and each call of a layer
runs on one rank, which sends the result to all others. Samples and values of weights are not
needed, and code may decide by values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from lightning_dlres.pipeline.capture.tracing.blocks import candidate_blocks
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.pipeline.stage.stage import Layer
from lightning_dlres.strategies.hetero_pipe.step.pipelined_module import (
    PipelinedModule,
    has_several_layers,
)
from lightning_dlres.strategies.hetero_pipe.step.pipelined_step import PipelinedStep


@dataclass(frozen=True)
class EvaluatedCalls(PipelinedStep):
    """Modules whose calls run on the ranks that hold them; for evaluation only."""

    @classmethod
    def of_uncut(cls, pipelined: PipelinedModule | PipelinedStep) -> EvaluatedCalls | None:
        """Return the submodules of what is not cut, as layers; None if there are not several.

        Args:
            pipelined: The pipelined module or step.
        """
        module, is_step = pipelined.module, pipelined.is_step
        if pipelined.captured is not None or (not is_step and has_several_layers(module)):
            return None
        prefix = "" if is_step else f"{pipelined.path}."
        blocks: dict[nn.Module, str] = {}
        for name, block in candidate_blocks(module).items():
            blocks.setdefault(block, prefix + name)
        if len(blocks) < 2:
            return None
        layers = ModelLayers(
            pipelined.layers.root,
            tuple(blocks.values()),
            tuple(blocks),
            container="" if is_step else pipelined.path,
        )
        return cls(pipelined.path, module, layers)

    def bind(self, index: int, module: nn.Module) -> Layer:
        return partial(self.call, index)
