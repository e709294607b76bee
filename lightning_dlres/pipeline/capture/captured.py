"""A captured module: its layers, and the run of some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

from torch import nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.capture.crossing import Returned
from lightning_dlres.pipeline.capture.forms import form_of
from lightning_dlres.pipeline.capture.modes import TRAINING, Mode, device_of, mode_of
from lightning_dlres.pipeline.capture.paths import Paths
from lightning_dlres.pipeline.capture.placeholders.shape_inference import ShapeInference
from lightning_dlres.pipeline.capture.placeholders.skeleton import Skeleton
from lightning_dlres.pipeline.capture.running import SegmentRun
from lightning_dlres.pipeline.capture.segment_state import OpenStep
from lightning_dlres.pipeline.capture.trace import Trace
from lightning_dlres.pipeline.stage.microbatch import parted
from lightning_dlres.pipeline.stage.module_attributes import are_identical

# Called with the index of a layer before it runs, such as to seed its random numbers.
BeforeLayer = Callable[[int], None]
# Traces for several samples, and those for one: code may treat a single sample in another way.
PathsBySize = tuple[Paths, Paths]


def _nothing(layer: int) -> None:
    pass


class CapturedModule:
    """A module as a chain of layers, which run with the module's own code, or with that of a step.

    Args:
        module: The module.
        blocks: Block of each layer, by name.
        paths: Traces of the forward, by the mode of the module.
        shared_parameters: For each layer, trainable parameters that its glue uses.
        step: Training step that calls the blocks; None if the module's forward does. Its run must
            leave nothing behind once its context has ended.

    Attributes:
        module: The module.
        names: Name of each layer's block in the module.
        blocks: Block of each layer.
        shared_parameters: For each layer, trainable parameters that its glue uses.
        step: Training step that calls the blocks; None if the module's forward does.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        paths: Mapping[Mode, PathsBySize],
        shared_parameters: Sequence[Sequence[nn.Parameter]],
        step: OpenStep | None = None,
    ) -> None:
        self.module, self.names, self.blocks = module, tuple(blocks), tuple(blocks.values())
        self.shared_parameters = tuple(map(tuple, shared_parameters))
        self._paths, self._shapes, self.step = paths, ShapeInference(), step
        self._block_parameters = frozenset(id(p) for b in self.blocks for p in b.parameters())
        self._submodules = tuple(module.modules())

    def with_step(self, step: OpenStep) -> CapturedModule:
        """Return the same layers for the step of another run."""
        other = copy(self)
        other.step = step
        return other

    @property
    def is_up_to_date(self) -> bool:
        """True if the module has the same submodules as when it was captured."""
        return are_identical(tuple(self.module.modules()), self._submodules)

    def form(self, inputs: Tree, sizes: Sequence[int]) -> object:
        """Return what decides whether `accepts` is true for a call.

        Args:
            inputs: (args, kwargs) of a call of the module.
            sizes: Samples of its micro-batches.
        """
        kinds = sorted({size == 1 for size in sizes})
        return mode_of(self.module), form_of(Skeleton.of(inputs)), tuple(kinds)

    def accepts(self, inputs: Tree, sizes: Sequence[int]) -> bool:
        """Return whether the module is known to run with arguments of this form.

        Args:
            inputs: (args, kwargs) of a call of the module.
            sizes: Samples of its micro-batches.
        """
        several, single = self._paths[mode_of(self.module)]
        paths = {single if size == 1 else several for size in sizes}
        try:
            for one in paths:
                one.for_inputs(Skeleton.of(inputs), sum(sizes))
        except UnsupportedStepError:
            return False
        return True

    @property
    def is_step(self) -> bool:
        """True if a training step calls the blocks."""
        return self.step is not None

    def opened(self) -> AbstractContextManager[Callable[..., Any]]:
        """Return the context in which the code that calls the blocks runs."""
        return nullcontext(self.module.forward) if self.step is None else self.step()

    def run(
        self,
        layers: range,
        inputs: Tree,
        *,
        before_layer: BeforeLayer = _nothing,
        copies: Mapping[int, nn.Module] | None = None,
    ) -> Tree:
        """Run consecutive layers.

        Args:
            layers: The layers.
            inputs: For the first layer, (args, kwargs) of the module's call, or what `begin` has
                returned for a step; else what the layers before have returned.
            before_layer: Called with the index of a layer before it runs.
            copies: Modules that run in the place of blocks, by layer.

        Returns:
            What the next layer takes, and `output` after the last layer.

        Raises:
            UnsupportedStepError: If the module's code takes a path that cannot be cut.
        """
        run = self._segment(layers, inputs, before_layer, copies or {}, self.step)
        return run.begin(inputs) if layers.start == 0 and not self.is_step else run.run(inputs)

    def output(self, crossing: Tree) -> Tree:
        """Return the module's output, given what the last layer has returned."""
        crossing = parted(crossing)
        return self._segment(self._end, crossing, _nothing, {}, None).run(crossing)

    def begin(
        self, step: OpenStep, arguments: Tree, before_layer: BeforeLayer = _nothing
    ) -> Tree | Returned:
        """Run a step up to its first layer, on the whole batch.

        Args:
            step: The training step.
            arguments: (args, kwargs) of its call.
            before_layer: Called with -1 before the run.

        Returns:
            What the first layer takes, once it is cut; `Returned` if the step calls no layer.
        """
        return self._segment(range(0), arguments, before_layer, {}, step).begin(arguments)

    def finish(
        self,
        step: OpenStep,
        crossing: Tree,
        arguments: Tree,
        before_layer: BeforeLayer = _nothing,
    ) -> Any:
        """Run a step to its end, given what the last layer has returned; return its result.

        Args:
            step: The training step.
            crossing: What the last layer has returned.
            arguments: (args, kwargs) of its call.
            before_layer: Called with the number of layers after the last one.
        """
        crossing = parted(crossing)
        run = self._segment(self._end, crossing, before_layer, {}, step)
        return run.finish(crossing, arguments)

    @property
    def _end(self) -> range:
        return range(len(self.blocks), len(self.blocks))

    @property
    def trace(self) -> Trace:
        """First trace in the present mode of the module."""
        return self._paths[TRAINING if self.step else mode_of(self.module)][0].trace(())

    @property
    def has_sample_outputs(self) -> bool:
        """True if the first dimension of each tensor in the module's output is the samples."""
        return self.trace.of_samples.issuperset(self.trace.outputs)

    def _segment(
        self,
        layers: range,
        inputs: Tree,
        before_layer: BeforeLayer,
        copies: Mapping[int, nn.Module],
        step: OpenStep | None,
    ) -> SegmentRun:
        return SegmentRun(
            self.module,
            self.blocks,
            self._paths[TRAINING if step else mode_of(self.module)],
            copies=copies,
            layers=layers,
            device=device_of(inputs),
            before_layer=before_layer,
            shapes=self._shapes,
            step=step,
            block_parameters=self._block_parameters,
        )
