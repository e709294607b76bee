"""A captured module: its layers, and the run of some of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

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
from lightning_dlres.pipeline.capture.trace import GLUE, Trace
from lightning_dlres.pipeline.stage.initialise import fill_deferred
from lightning_dlres.pipeline.stage.microbatch import parted, samples_in

# Called with the index of a layer before it runs, such as to seed its random numbers.
BeforeLayer = Callable[[int], None]
# A run that has been recorded.
Run = tuple[Recorder, Trace]
# Traces for several samples, and those for one: code may treat a single sample in another way.
PathsBySize = tuple[Paths, Paths]


def _nothing(layer: int) -> None:
    pass


class CapturedModule:
    """A module as a chain of layers, which run with the module's own code.

    Args:
        module: The module.
        blocks: Block of each layer, by name.
        paths: Traces of the forward, by the mode of the module.
        shared_parameters: For each layer, trainable parameters that its glue uses.

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
        paths: Mapping[Mode, PathsBySize],
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
        trace = self._paths[mode_of(self.module)][0].trace(())
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
    paths: dict[Mode, PathsBySize] = {}
    shared = [list[nn.Parameter]() for _ in names]
    for mode in MODES:
        own, recorder = _paths(module, ordered, inputs, mode, device)
        paths[mode] = own, own
        if samples is not None:
            other_inputs = _doubled(inputs) if samples == 1 else _first_sample(inputs)
            other = _other_paths(module, ordered, other_inputs, mode, device, own)
            paths[mode] = (other, own) if samples == 1 else (own, other)
        for index, tensors in recorder.used.items():
            events = own.trace(()).events
            layer = max(sum(e.block is not None for e in events[: index + 1]) - 1, 0)
            shared[layer] += [t for t in tensors if isinstance(t, nn.Parameter)]
    captured = CapturedModule(module, ordered, paths, shared)
    for mode in (TRAINING, EVALUATION):
        check_agreement(captured, inputs, mode, device)
    return captured


def _other_paths(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    inputs: Tree,
    mode: Mode,
    device: torch.device,
    own: Paths,
) -> Paths:
    """Return the paths for other inputs, or the same ones if code runs the same operations."""
    # Code may fail for a single sample, as BatchNorm does.
    with suppress(Exception):
        with trial(module, mode, device):
            _, trace = _recorded(module, blocks, inputs)
        if _operations(trace) != _operations(own.trace(())):
            return _paths(module, blocks, inputs, mode, device)[0]
    return own


def _paths(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    inputs: Tree,
    mode: Mode,
    device: torch.device,
) -> tuple[Paths, Recorder]:
    """Return the traces of a module's forward in one mode, and the recorder of the first one.

    Raises:
        NotALayer: If a block cannot be a layer.
    """
    names, samples = list(blocks), samples_in(inputs)
    with trial(module, mode, device):
        recorder, trace = _recorded(module, blocks, inputs)
    larger = _larger_runs(module, blocks, inputs, mode, device, trace)
    trace = _with_samples(trace, recorder, larger, samples)
    if recorder.order != sorted(recorder.order):
        raise NotALayer(names[recorder.order[0]], "is called in another order in evaluation")
    for layer in range(1, len(names) + 1):
        boundary = trace.boundary(layer)
        if isinstance(boundary, str):
            raise NotALayer(names[layer - 1], f"cannot end a stage: {boundary}")
    writes = any(event.written for event in trace.calls.values())

    def record(decisions: Decisions) -> Trace:
        if writes:
            raise UnsupportedStepError(
                f"The forward of {type(module).__name__} must not decide by the values of "
                "tensors if a submodule changes its inputs in place. Set inplace=False."
            )
        try:
            with trial(module, mode, device):
                first, trace = _recorded(module, blocks, inputs, recorder.outputs, decisions)
            outputs = [run.outputs for run, _ in larger]
            again = _larger_runs(module, blocks, inputs, mode, device, trace, outputs, decisions)
            return _with_samples(trace, first, again, samples)
        except Exception as error:
            # The samples may not fit the decisions.
            raise UnsupportedStepError(
                f"The forward of {type(module).__name__} must run on the first samples for any "
                f"of its decisions by values, got {type(error).__name__}: {error}. Move the "
                "code that decides into a submodule."
            ) from error

    return Paths(trace, record), recorder


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
) -> Run:
    recorder = Recorder(module, blocks, seed_layer, outputs, decisions)
    args, kwargs = map_tensors(Tensor.clone, inputs)
    return recorder, recorder.run(args, kwargs)


def _doubled(inputs: Tree) -> Tree:
    """Return inputs with all samples twice."""
    samples = samples_in(inputs)
    return map_tensors(
        lambda t: torch.cat([t, t]) if t.dim() and t.shape[0] == samples else t, inputs
    )


def _first_sample(inputs: Tree) -> Tree:
    """Return inputs with the first sample only."""
    samples = samples_in(inputs)
    return map_tensors(lambda t: t[:1] if t.dim() and t.shape[0] == samples else t, inputs)


def _larger_runs(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    inputs: Tree,
    mode: Mode,
    device: torch.device,
    trace: Trace,
    outputs: Sequence[Mapping[int, BlockOutput]] | None = None,
    decisions: Decisions = (),
) -> list[Run]:
    """Return a run on twice as many samples, and one on four times as many if that one differs.

    Code may work for few samples only. Its outputs are then not joined.

    Args:
        module: The module.
        blocks: Its blocks.
        inputs: (args, kwargs) of a call of it.
        mode: Mode in which it runs.
        device: Device on which it runs.
        trace: Trace for the inputs.
        outputs: For each run, the outputs of blocks, which then do not run; None lets them run.
        decisions: Results of the first operations that read values of tensors.
    """
    runs: list[Run] = []
    for number in range(2 if outputs is None else len(outputs)):
        inputs = _doubled(inputs)
        with suppress(Exception), trial(module, mode, device):
            given = None if outputs is None else outputs[number]
            runs.append(_recorded(module, blocks, inputs, given, decisions))
        if len(runs) <= number or _operations(runs[-1][1]) == _operations(trace):
            break
        trace = runs[-1][1]
    return runs


def _with_samples(
    trace: Trace, recorder: Recorder, larger: Sequence[Run], samples: int | None
) -> Trace:
    """Return a trace that knows which values have the samples in their first dimension.

    Args:
        trace: The trace.
        recorder: Its recorder.
        larger: Runs on twice and four times as many samples, if they were possible.
        samples: Samples of the first run.
    """
    if samples is None:
        return trace
    runs = [(recorder, trace), *larger]
    for number, ((few, few_trace), (many, many_trace)) in enumerate(pairwise(runs)):
        count = samples << number
        if _operations(few_trace) != _operations(many_trace):
            # Code may treat a single sample in another way.
            continue
        of_samples = {
            value
            for value, shape in few.shapes.items()
            if shape[:1] == (count,) and many.shapes.get(value, ())[:1] == (2 * count,)
        }
        if number:
            # Operations have other numbers in another run.
            shapes = recorder.shapes
            of_samples = {v for v in of_samples if v.source != GLUE and v in shapes}
        return replace(trace, of_samples=frozenset(of_samples))
    return trace


def _operations(trace: Trace) -> list[str]:
    return [event.name for event in trace.events]


def _device_of(inputs: Tree) -> torch.device:
    tensors = tensors_of(inputs)
    return tensors[0].device if tensors else torch.device("cpu")


def _called_parent(module: nn.Module, name: str) -> str:
    """Return the name of the innermost module around one that is called itself; "" for the root."""
    parent = name.rpartition(".")[0]
    while parent and isinstance(module.get_submodule(parent), (nn.ModuleList, nn.ModuleDict)):
        parent = parent.rpartition(".")[0]
    return parent
