"""A training step that calls several modules, cut into stages where it calls them.

All stages run the user's `training_step` itself: up to the first call on the first stage, for the
whole batch; for each micro-batch on every stage, around the calls of its layers; and to the end on
the last stage. Outside of training every call runs on the rank that holds the module, and all ranks
get its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dlres._compat import is_compiled
from lightning_dlres.core._compat import CALL
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, tensors_of
from lightning_dlres.pipeline.capture.captured import CapturedModule
from lightning_dlres.pipeline.capture.crossing import Returned
from lightning_dlres.pipeline.capture.segment_state import OpenStep
from lightning_dlres.pipeline.capture.tracing.capturing import capture_step
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.pipeline.stage.microbatch import output_of
from lightning_dlres.pipeline.stage.stage import Chain, Layer
from lightning_dlres.strategies.hetero_pipe.step.forward_replacement import (
    forwards_replaced,
    original_forward,
)
from lightning_dlres.strategies.hetero_pipe.step.module_list import RunsHere
from lightning_dlres.strategies.hetero_pipe.step.pipelined_module import (
    Handler,
    LocalLayers,
    RecordCall,
)

# Name of the step as the pipelined module, in options and plans.
TRAINING_STEP = "training_step"


@dataclass(frozen=True)
class PipelinedStep:
    """The training step that is cut into stages; see `PipelinedModule` for the methods.

    Attributes:
        path: "training_step".
        module: The LightningModule.
        layers: Its layers, with their names; before `captured_on` its children with parameters.
        captured: The step, cut into layers; None before `captured_on`.
    """

    path: str
    module: nn.Module
    layers: ModelLayers
    captured: CapturedModule | None = None

    @classmethod
    def of(cls, root: nn.Module) -> PipelinedStep:
        """Return the step of a LightningModule, which is not yet cut."""
        children = {n: m for n, m in root.named_children() if any(True for _ in m.parameters())}
        layers = ModelLayers(root, tuple(children), tuple(children.values()), container="")
        return cls(TRAINING_STEP, root, layers)

    @property
    def is_step(self) -> bool:
        """True, since the inputs of the first layer are known only once the step is cut."""
        return True

    def bind(self, index: int, module: nn.Module) -> Layer:
        captured = self._captured()
        copies = {} if module is captured.blocks[index] else {index: module}
        return partial(captured.run, range(index, index + 1), copies=copies)

    @property
    def chain(self) -> Chain | None:
        return None if self.captured is None else partial(_run, self.captured)

    def output(self, crossing: Tree) -> Tree:
        return crossing

    @property
    def called_modules(self) -> list[tuple[str, nn.Module]]:
        """Empty, since every rank runs the code around the calls of its layers."""
        return []

    def captured_on(
        self, root: nn.Module, inputs: Tree, step: OpenStep, *, is_whole: bool = False
    ) -> PipelinedStep:
        if self.captured is not None:
            return replace(self, captured=self.captured.with_step(step))
        captured = capture_step(root, step, inputs, is_whole=is_whole)
        layers = ModelLayers(
            root, captured.names, captured.blocks, container="", shared=captured.shared_parameters
        )
        return replace(self, layers=layers, captured=captured)

    def cut_like(self, other: Any) -> PipelinedStep:
        is_same = type(other) is PipelinedStep and other.module is self.module
        return other if is_same and other.layers.are_present() else self

    @contextmanager
    def intercepted(self, handler: Handler, runs_here: RunsHere | None = None) -> Iterator[None]:
        modules = self.layers.modules

        def forward_of(index: int) -> Callable[..., Tree]:
            return lambda *args, **kwargs: handler((args, kwargs), index)

        forwards = [forward_of(index) for index in range(len(modules))]
        if is_compiled(self.layers.root):
            # A compiled module around a layer must not trace the messages between ranks.
            forwards = [torch.compiler.disable(forward) for forward in forwards]
        with forwards_replaced(self.path, modules, CALL, forwards):
            yield

    def call(self, layer: int, inputs: Tree) -> Tree:
        args, kwargs = inputs
        # A layer may contain another one. Its call inside of the first belongs to the first.
        with original_forward(self.layers.modules, CALL):
            return self.layers.modules[layer](*args, **kwargs)

    def run_here(self, inputs: Tree, layer: int | None = None) -> Any:
        assert layer is not None
        return self.call(layer, inputs)

    def inputs_of(
        self, step: Callable[..., Any], args: tuple[Any, ...], check: Callable[[], None]
    ) -> Tree | Returned:
        # No check: every rank runs the code around the calls of its layers.
        result = self._captured().begin(lambda: nullcontext(step), (args, {}))
        if isinstance(result, Returned) and result.result is not None:
            raise UnsupportedStepError(
                f"{type(self.module).__name__}.training_step must call the same modules in every "
                "step, got a step that returned without a call. Return None to skip a batch."
            )
        return result

    def finish(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        output: Tree,
        record_call: RecordCall,
    ) -> Any:
        if output is None:
            # The step skips its batch.
            return step(*args)
        # Raises if micro-batches have given what cannot be joined, such as other numbers.
        output = output_of(output, lambda crossing: crossing, lambda: True)
        record_call([], tensors_of(output))
        return self._captured().finish(lambda: nullcontext(step), output, (args, {}))

    def run_locally(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        layers: LocalLayers,
        record_call: RecordCall,
    ) -> Any:
        def handle(inputs: Tree, layer: int | None = None) -> Tree:
            assert layer is not None
            return layers.run_one(layer, inputs, partial(self.call, layer))

        with self.intercepted(handle):
            return step(*args)

    def _captured(self) -> CapturedModule:
        assert self.captured is not None
        return self.captured


def _run(
    captured: CapturedModule, layers: range, inputs: Tree, before_layer: Callable[[int], None]
) -> Tree:
    return captured.run(layers, inputs, before_layer=before_layer)
