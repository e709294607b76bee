"""A captured module: its layers, and the run of some of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.capture.agreement import check_agreement
from lightning_dlres.pipeline.capture.blocks import candidate_blocks
from lightning_dlres.pipeline.capture.modes import (
    EVALUATION,
    MODES,
    TRAINING,
    Mode,
    mode_of,
    seed_layer,
    trial,
)
from lightning_dlres.pipeline.capture.paths import Decisions, Paths
from lightning_dlres.pipeline.capture.placeholders.block_output import BlockOutput
from lightning_dlres.pipeline.capture.placeholders.shape_inference import ShapeInference
from lightning_dlres.pipeline.capture.recording import NotALayer, Recorder
from lightning_dlres.pipeline.capture.running import SegmentRun
from lightning_dlres.pipeline.capture.trace import Trace
from lightning_dlres.pipeline.stage.initialise import fill_deferred
from lightning_dlres.pipeline.stage.microbatch import parted, samples_in

# Called with the index of a layer before it runs, such as to seed its random numbers.
BeforeLayer = Callable[[int], None]


def _nothing(layer: int) -> None:
    pass


class CapturedModule:
    """A module as a chain of layers, which run with the module's own code.

    Args:
        paths: Traces of the forward, by the mode of the module.

    Attributes:
        module: The module.
        names: Name of each layer's block in the module.
        blocks: Block of each layer.
        shared_parameters: For each layer, trainable parameters that its glue uses.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        paths: Mapping[Mode, Paths],
        shared_parameters: Sequence[Sequence[nn.Parameter]],
    ) -> None:
        self.module, self.names, self.blocks = module, tuple(blocks), tuple(blocks.values())
        self.shared_parameters = tuple(map(tuple, shared_parameters))
        self._paths, self._shapes = paths, ShapeInference()

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
            inputs: (args, kwargs) of the module's call for the first layer; else what the layers
                before have returned.
            before_layer: Called with the index of a layer before it runs.
            copies: Modules that run in the place of blocks, by layer.

        Returns:
            What the next layer takes, and `output` after the last layer.

        Raises:
            UnsupportedStepError: If the module's code takes a path that cannot be cut.
        """
        return self._segment(layers, inputs, before_layer, copies or {})

    def output(self, crossing: Tree) -> Tree:
        """Return the module's output, given what the last layer has returned."""
        end = range(len(self.blocks), len(self.blocks))
        return self._segment(end, parted(crossing), _nothing, {})

    @property
    def has_sample_outputs(self) -> bool:
        """True if the first dimension of each tensor in the module's output is the samples."""
        trace = self._paths[mode_of(self.module)].trace(())
        return trace.of_samples.issuperset(trace.outputs)

    def _segment(
        self,
        layers: range,
        inputs: Tree,
        before_layer: BeforeLayer,
        copies: Mapping[int, nn.Module],
    ) -> Tree:
        run = SegmentRun(
            self.module,
            self.blocks,
            self._paths[mode_of(self.module)],
            copies=copies,
            layers=layers,
            device=_device_of(inputs),
            before_layer=before_layer,
            shapes=self._shapes,
        )
        return run.run(inputs)


def capture(module: nn.Module, inputs: Tree) -> CapturedModule:
    """Capture a module, and check that its layers give what the module gives.

    Args:
        module: The module. It runs in training mode and in evaluation mode; buffers and random
            state are restored.
        inputs: (args, kwargs) of a call of it.

    Raises:
        UnsupportedStepError: If the module cannot be cut, for instance because it uses a tensor of
            a submodule that the submodule does not return.
    """
    closed: set[str] = set()
    glue: set[str] = set()
    reason = "no submodule has parameters"
    while True:
        blocks = {n: b for n, b in candidate_blocks(module, closed).items() if n not in glue}
        if not blocks:
            raise UnsupportedStepError(
                f"{type(module).__name__} must be a module that calls several submodules once each "
                f"to be cut into stages, got one that cannot be cut: {reason}. Name another module "
                "with HeteroPipeStrategy(module=...)."
            )
        try:
            return _captured(module, blocks, inputs)
        except NotALayer as refused:
            reason = str(refused)
            parent = "" if refused.is_glue else _called_parent(module, refused.name)
            if parent:
                closed.add(parent)
            else:
                glue.add(refused.name)


def _captured(module: nn.Module, blocks: Mapping[str, nn.Module], inputs: Tree) -> CapturedModule:
    device, samples = _device_of(inputs), samples_in(inputs)
    _fill_glue(module, blocks.values(), device)
    with trial(module, TRAINING, device):
        order = _recorded(module, blocks, inputs)[0].order
    names = [list(blocks)[index] for index in order]
    if not names:
        raise NotALayer(next(iter(blocks)), "is not called", is_glue=True)
    ordered = {name: blocks[name] for name in names}
    paths, shared = {}, [list[nn.Parameter]() for _ in names]
    for mode in MODES:
        with trial(module, mode, device):
            recorder, trace = _recorded(module, ordered, inputs)
        twice, larger = None, None
        # Code may work for few samples only; its outputs are then not joined.
        with suppress(Exception), trial(module, mode, device):
            twice, larger = _recorded(module, ordered, _doubled(inputs))
        trace = _with_samples(trace, recorder, larger, twice, samples)
        if recorder.order != sorted(recorder.order):
            raise NotALayer(names[recorder.order[0]], "is called in another order in evaluation")
        for layer in range(1, len(names) + 1):
            boundary = trace.boundary(layer)
            if isinstance(boundary, str):
                raise NotALayer(names[layer - 1], f"cannot end a stage: {boundary}")

        def record(
            decisions: Decisions,
            recorder: Recorder = recorder,
            twice: Recorder | None = twice,
            mode: Mode = mode,
            writes: bool = any(event.written for event in trace.calls.values()),
        ) -> Trace:
            if writes:
                raise UnsupportedStepError(
                    f"The forward of {type(module).__name__} must not decide by the values of "
                    "tensors if a submodule changes its inputs in place. Set inplace=False."
                )
            try:
                with trial(module, mode, device):
                    first, trace = _recorded(module, ordered, inputs, recorder.outputs, decisions)
                if twice is None:
                    return trace
                with trial(module, mode, device):
                    second, larger = _recorded(
                        module, ordered, _doubled(inputs), twice.outputs, decisions
                    )
                return _with_samples(trace, first, larger, second, samples)
            except Exception as error:
                # The samples may not fit the decisions.
                raise UnsupportedStepError(
                    f"The forward of {type(module).__name__} must run on the first samples for any "
                    f"of its decisions by values, got {type(error).__name__}: {error}. Move the "
                    "code that decides into a submodule."
                ) from error

        paths[mode] = Paths(trace, record)
        for index, tensors in recorder.used.items():
            layer = max(sum(e.block is not None for e in trace.events[: index + 1]) - 1, 0)
            shared[layer] += [t for t in tensors if isinstance(t, nn.Parameter)]
    captured = CapturedModule(module, ordered, paths, shared)
    for mode in (TRAINING, EVALUATION):
        check_agreement(captured, inputs, mode, device)
    return captured


def _fill_glue(module: nn.Module, blocks: Collection[nn.Module], device: torch.device) -> None:
    """Give values to deferred tensors outside of the blocks, which every stage holds anyway."""
    inside = {id(m) for block in blocks for m in block.modules()}
    for outer in module.modules():
        if id(outer) not in inside:
            fill_deferred(outer, device)


def _recorded(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    inputs: Tree,
    outputs: Mapping[int, BlockOutput] | None = None,
    decisions: Decisions = (),
) -> tuple[Recorder, Trace]:
    recorder = Recorder(module, blocks, seed_layer, outputs, decisions)
    args, kwargs = map_tensors(Tensor.clone, inputs)
    return recorder, recorder.run(args, kwargs)


def _doubled(inputs: Tree) -> Tree:
    """Return inputs with all samples twice."""
    samples = samples_in(inputs)
    return map_tensors(
        lambda t: torch.cat([t, t]) if t.dim() and t.shape[0] == samples else t, inputs
    )


def _with_samples(
    trace: Trace,
    recorder: Recorder,
    larger: Trace | None,
    twice: Recorder | None,
    samples: int | None,
) -> Trace:
    """Return a trace that knows which values have the samples in their first dimension.

    Args:
        trace: The trace.
        recorder: Its recorder.
        larger: Trace of the same operations on twice as many samples; None without one.
        twice: Its recorder.
        samples: Samples of the first run.
    """
    if larger is None or twice is None or samples is None:
        return trace
    if [event.name for event in trace.events] != [event.name for event in larger.events]:
        return trace
    of_samples = frozenset(
        value
        for value, shape in recorder.shapes.items()
        if shape[:1] == (samples,) and twice.shapes.get(value, ())[:1] == (2 * samples,)
    )
    return replace(trace, of_samples=of_samples)


def _device_of(inputs: Tree) -> torch.device:
    tensors = tensors_of(inputs)
    return tensors[0].device if tensors else torch.device("cpu")


def _called_parent(module: nn.Module, name: str) -> str:
    """Return the name of the innermost module around one that is called itself; "" for the root."""
    parent = name.rpartition(".")[0]
    while parent and isinstance(module.get_submodule(parent), (nn.ModuleList, nn.ModuleDict)):
        parent = parent.rpartition(".")[0]
    return parent
