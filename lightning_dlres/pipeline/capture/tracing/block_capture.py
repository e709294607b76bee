"""Capture of a module, or of a training step, with given blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.pipeline.capture.block_calls import (
    calls_replaced,
    original_call,
    with_values,
)
from lightning_dlres.pipeline.capture.captured import CapturedModule, PathsBySize
from lightning_dlres.pipeline.capture.forms import form_of, inputs_like
from lightning_dlres.pipeline.capture.modes import (
    EVALUATION,
    MODES,
    TRAINING,
    Mode,
    device_of,
    seed_layer,
    trial,
)
from lightning_dlres.pipeline.capture.paths import Decisions, Paths
from lightning_dlres.pipeline.capture.placeholders.block_output import BlockOutput
from lightning_dlres.pipeline.capture.placeholders.skeleton import SampleDim, Skeleton
from lightning_dlres.pipeline.capture.segment_state import CUT_THE_STEP, OpenStep
from lightning_dlres.pipeline.capture.trace import BLOCK, GLUE, Boundary, Trace, Value
from lightning_dlres.pipeline.capture.tracing.agreement import check_agreement
from lightning_dlres.pipeline.capture.tracing.not_a_layer import NotALayer
from lightning_dlres.pipeline.capture.tracing.recording import Recorder
from lightning_dlres.pipeline.capture.tracing.step_recording import StepTraceRecorder
from lightning_dlres.pipeline.stage.initialise import fill_deferred
from lightning_dlres.pipeline.stage.microbatch import cut, cut_batch, doubled, samples_in

# A run that has been recorded.
Run = tuple[Recorder, Trace]


@dataclass(frozen=True)
class BlockCapture:
    """Capture with given blocks.

    Attributes:
        module: The module.
        blocks: Blocks by name, in any order.
        inputs: (args, kwargs) of a call of the module or the step.
        step: The training step; None for the module's forward.
        last: Number of the last call of a step; None if it is not known.
        repeats: True if blocks may be called several times.
        rows: Rows of a step's tensors for each sample of its batch, such as 2 for two views.
        is_whole: True if a batch is its only micro-batch, so that nothing has to be joined.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    inputs: Tree
    step: OpenStep | None = None
    last: int | None = None
    repeats: bool = False
    rows: int = 1
    is_whole: bool = False

    def run(self) -> CapturedModule:
        """Return the captured module.

        Raises:
            NotALayer: If a block cannot be a layer.
        """
        _fill_glue(self.module, self.blocks, self.device)
        ordered = self._ordered()
        paths: dict[Mode, PathsBySize] = {}
        shared = [list[nn.Parameter]() for _ in ordered.blocks]
        for mode in (TRAINING,) if self.step else MODES:
            own, recorder = ordered._paths(mode)
            paths[mode] = own, own
            if ordered.samples is not None:
                other = ordered._other_samples()._other_paths(mode, own)
                paths[mode] = (other, own) if ordered.samples == 1 else (own, other)
            ordered._note_shared(recorder, own.trace(()), shared)
        captured = CapturedModule(self.module, ordered.blocks, paths, shared, self.step)
        for mode in (TRAINING,) if self.step else (TRAINING, EVALUATION):
            check_agreement(captured, self.inputs, mode, self.device)
        return captured

    @property
    def device(self) -> torch.device:
        return device_of(self.inputs)

    @property
    def samples(self) -> int | None:
        return samples_in(self.inputs)

    def _with_samples(self, trace: Trace, recorder: Recorder, larger: Sequence[Run]) -> Trace:
        samples = None if self.samples is None else self.samples * self.rows
        return replace(_with_samples(trace, recorder, larger, samples), is_whole=self.is_whole)

    def _ordered(self) -> BlockCapture:
        """Return this capture with the blocks that are called, in the order of calls."""
        with trial(self.module, TRAINING, self.device):
            calls = self._calls() if self.step else self._recorded()[0].order
        order = list(dict.fromkeys(calls))
        names = [list(self.blocks)[index] for index in order]
        if not names:
            raise NotALayer(next(iter(self.blocks)), "is not called", is_glue=True)
        blocks = {name: self.blocks[name] for name in names}
        repeats = calls.count(calls[-1]) - 1
        last = order.index(calls[-1]) + repeats * len(names)
        return replace(self, blocks=blocks, last=last if self.step else None)

    def _calls(self) -> list[int]:
        """Return the indices of the blocks that the step calls, in order."""
        order: list[int] = []
        names = list(self.blocks)

        def call(index: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
            if index in order and not self.repeats:
                raise NotALayer(names[index], "is called twice", is_repeated=True)
            order.append(index)
            return original_call(with_values(block, (args, kwargs)), args, kwargs)

        args, kwargs = map_tensors(Tensor.clone, self.inputs)
        assert self.step is not None
        with self.step() as code, calls_replaced(dict(enumerate(self.blocks.values())), call):
            code(*args, **kwargs)
        return order

    def _note_shared(
        self, recorder: Recorder, trace: Trace, shared: Sequence[list[nn.Parameter]]
    ) -> None:
        """Note the trainable parameters that glue uses, for the layer before it."""
        count = len(self.blocks)
        for index, tensors in recorder.used.items():
            layer = trace.layers[index] if index < len(trace.layers) else count
            if self.step and not 0 <= layer < count:
                # The user's step runs there, on the whole batch, as before and after a module.
                continue
            layer = min(max(layer, 0), count - 1)
            shared[layer] += [t for t in tensors if isinstance(t, nn.Parameter)]

    def _other_samples(self) -> BlockCapture:
        """Return this capture for a single sample, or for two if it has one."""
        if self.samples == 1:
            return self._doubled()
        sizes = [1, (self.samples or 0) - 1]
        inputs = cut_batch(self.inputs, sizes) if self.step else cut(self.inputs, sizes)
        return replace(self, inputs=inputs[0])

    def _doubled(self) -> BlockCapture:
        """Return this capture for twice as many samples."""
        return replace(self, inputs=doubled(self.inputs, is_batch=self.step is not None))

    def _other_paths(self, mode: Mode, own: Paths) -> Paths:
        """Return the paths for these inputs, or `own` if the code runs the same operations."""
        # Code may fail for a single sample, as BatchNorm does.
        with suppress(Exception):
            with trial(self.module, mode, self.device):
                _, trace = self._recorded()
            if _operations(trace) != _operations(own.trace(())):
                return self._paths(mode)[0]
        return own

    def _paths(self, mode: Mode) -> tuple[Paths, Recorder]:
        """Return the traces of the code in one mode, and the recorder of the first one.

        Raises:
            NotALayer: If a block cannot be a layer.
        """
        names = list(self.blocks)
        with trial(self.module, mode, self.device):
            recorder, trace = self._recorded()
        larger = self._larger_runs(mode, trace)
        trace = self._with_samples(trace, recorder, larger)
        if recorder.order != sorted(recorder.order):
            raise NotALayer(names[recorder.order[0]], "is called in another order in evaluation")
        if trace.has_repeats:
            self._check_repeats(trace)
        # The end comes first: it may show that a block is none.
        for layer in range(len(names), -1 if self.step else 0, -1):
            boundary = trace.boundary(layer)
            if isinstance(boundary, str):
                if layer == 0:
                    raise UnsupportedStepError(
                        f"{type(self.module).__name__}.training_step must prepare a batch that can "
                        f"be cut into micro-batches, got one that cannot: {boundary}. Prepare it "
                        "in on_after_batch_transfer."
                    )
                raise NotALayer(names[layer - 1], f"cannot end a stage: {boundary}")
            if self.step:
                self._check_boundary(trace, layer, boundary)
        outputs = [recorder.outputs, *(run.outputs for run, _ in larger)]
        return self._with_other_paths(mode, trace, outputs), recorder

    def _with_other_paths(
        self, mode: Mode, trace: Trace, outputs: Sequence[Mapping[int, BlockOutput]]
    ) -> Paths:
        """Return the paths of a trace, whose others are recorded without data when they are taken.

        Args:
            mode: Mode in which the module runs.
            trace: The trace.
            outputs: Outputs of blocks in its run, and in those of `_larger_runs`.
        """
        name = type(self.module).__name__
        writes = any(event.written for event in trace.calls.values())

        def run_again(capture: BlockCapture, decisions: Decisions) -> Trace:
            if writes:
                raise UnsupportedStepError(
                    f"The forward of {name} must not decide by the values of tensors, or by its "
                    "arguments, if a submodule changes its inputs in place. Set inplace=False."
                )
            with trial(self.module, mode, self.device):
                first, trace = capture._recorded(outputs[0], decisions)
            again = capture._larger_runs(mode, trace, outputs[1:], decisions)
            return capture._with_samples(trace, first, again)

        def record(decisions: Decisions) -> Trace:
            try:
                return run_again(self, decisions)
            except Exception as error:
                # The samples may not fit the decisions.
                raise UnsupportedStepError(
                    f"The forward of {name} must run on the first samples for any of its decisions "
                    f"by values, got {type(error).__name__}: {error}. Move the code that decides "
                    "into a submodule."
                ) from error

        def other_form(inputs: Skeleton, samples: int | None) -> Paths:
            other = replace(self, inputs=inputs_like(self.inputs, inputs, samples))
            try:
                return other._with_other_paths(mode, run_again(other, ()), outputs)
            except Exception as error:
                # The submodules' first outputs may not fit the arguments.
                raise UnsupportedStepError(
                    f"The forward of {name} must run on the first samples for other arguments, "
                    "such as None in the place of a tensor or another flag, got "
                    f"{type(error).__name__}: {error}. Give it the same arguments in each call, or "
                    f"{CUT_THE_STEP}."
                ) from error

        return Paths(trace, record, form_of(Skeleton.of(self.inputs)), other_form)

    def _check_repeats(self, trace: Trace) -> None:
        """Check a trace in which blocks are called several times.

        Raises:
            NotALayer: If a block takes what a later layer returns.
            UnsupportedStepError: If the code decides by values between the layers, or the number of
                samples does not show.
        """
        name = trace.early_call
        if name:
            raise NotALayer(name, "is called again with what a later submodule has returned")
        if not trace.skeletons:
            raise UnsupportedStepError(
                f"{type(self.module).__name__} calls a submodule several times, and must run on "
                "twice as many samples to be cut, got an error there."
            )
        for event, layer in zip(trace.events, trace.layers, strict=True):
            if event.reads_values and event.inputs and 0 <= layer < len(self.blocks):
                raise UnsupportedStepError(
                    f"{type(self.module).__name__} calls a submodule several times, and must not "
                    f"decide by the values of tensors between its submodules, got {event.name}. "
                    "Move the code that decides into a submodule."
                )

    def _check_boundary(self, trace: Trace, layer: int, boundary: Boundary) -> None:
        """Check what crosses to a layer of a step.

        Raises:
            NotALayer: If a block returns a tensor without samples, such as a loss, that the rest of
                the step needs. The step then calls it on the whole batch.
            UnsupportedStepError: If the batch cannot be cut, or if the step decides by values of
                tensors between its layers.
        """
        if layer == len(self.blocks) and not self.is_whole:
            for value in (v for v in boundary.values if trace.sample_dim(v) is None):
                if value.source == BLOCK:
                    name = list(self.blocks)[value.index % len(self.blocks)]
                    reason = "returns a tensor without a dimension for the samples"
                    rows = max([1, *(factor for _, factor in trace.sample_dims.get(value, ()))])
                    raise NotALayer(name, reason, is_glue=True, rows=rows)
                raise UnsupportedStepError(
                    f"{type(self.module).__name__}.training_step must use tensors with a dimension "
                    "for the samples after its last submodule, got the result of "
                    f"{trace.glue[value.index].name}. Compute it after the last submodule."
                )
        has_samples = any(trace.sample_dim(value) is not None for value in boundary.values)
        if layer == 0 and not has_samples and not self.is_whole:
            raise UnsupportedStepError(
                f"{type(self.module).__name__}.training_step must call submodules with tensors "
                "that have a dimension for the samples, got none. Prepare the batch in "
                "on_after_batch_transfer."
            )
        prefix = trace.prefix or 0
        between = trace.events[prefix : trace.events.index(trace.calls[trace.order[-1]])]
        for event in between:
            if event.reads_values and event.inputs:
                raise UnsupportedStepError(
                    f"{type(self.module).__name__}.training_step must not read the values of "
                    f"tensors between its submodules, as decisions, prints and metrics do, got "
                    f"{event.name}. Do it after the last submodule, or inside of one."
                )

    def _recorded(
        self,
        outputs: Mapping[int, BlockOutput] | None = None,
        decisions: Decisions = (),
    ) -> Run:
        make: Callable[..., Recorder] = Recorder
        if self.step is not None:
            make = partial(StepTraceRecorder, step=self.step, last=self.last)
        recorder = make(
            self.module,
            self.blocks,
            seed_layer,
            outputs,
            decisions,
            allows_repeats=self.repeats,
        )
        args, kwargs = map_tensors(Tensor.clone, self.inputs)
        return recorder, recorder.run(args, kwargs)

    def _larger_runs(
        self,
        mode: Mode,
        trace: Trace,
        outputs: Sequence[Mapping[int, BlockOutput]] | None = None,
        decisions: Decisions = (),
    ) -> list[Run]:
        """Return a run on twice as many samples, and one on four times as many if that one differs.

        Code may work for few samples only. Its outputs are then not joined.

        Args:
            mode: Mode in which the module runs.
            trace: Trace for the inputs.
            outputs: For each run, the outputs of blocks, which then do not run; None lets them run.
            decisions: Results of the first operations that read values of tensors.
        """
        runs: list[Run] = []
        larger = self
        for number in range(2 if outputs is None else len(outputs)):
            larger = larger._doubled()
            with suppress(Exception), trial(self.module, mode, self.device):
                given = None if outputs is None else outputs[number]
                runs.append(larger._recorded(given, decisions))
            if len(runs) <= number or _operations(runs[-1][1]) == _operations(trace):
                break
            trace = runs[-1][1]
        return runs


def _fill_glue(module: nn.Module, blocks: Mapping[str, nn.Module], device: torch.device) -> None:
    """Give values to deferred tensors outside of the blocks, which every stage holds anyway."""
    inside = {id(m) for block in blocks.values() for m in block.modules()}
    for outer in module.modules():
        if id(outer) not in inside:
            fill_deferred(outer, device)


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
        dims = {
            value: _sample_dims(shape, many.shapes.get(value, ()), count)
            for value, shape in few.shapes.items()
            if many.shapes.get(value) != shape
        }
        # Pairs of samples belong to no sample, though their first dimension is the samples, too.
        scaled = {value for value, found in dims.items() if found != ((0, 1),)}
        if number:
            # Operations have other numbers in another run.
            shapes = recorder.shapes
            dims = {v: found for v, found in dims.items() if v.source != GLUE and v in shapes}
            scaled = {v for v in shapes if v.source == GLUE}
        return replace(
            trace,
            of_samples=frozenset(dims.keys() - scaled),
            scaled=frozenset(scaled),
            sample_dims=dims,
            skeletons={
                call: output.skeleton.without_samples(samples, _dims_of(trace, call, output, dims))
                for call, output in recorder.outputs.items()
            },
        )
    return trace


def _dims_of(
    trace: Trace,
    call: int,
    output: BlockOutput,
    dims: Mapping[Value, tuple[SampleDim, ...]],
) -> dict[int, tuple[SampleDim, ...]]:
    """Return the dimensions of a call's output that are a multiple of the samples."""
    values = {at: Value(BLOCK, call, at) for at in range(len(output.skeleton.tensors))}
    values |= dict(trace.calls[call].aliases)
    return {at: dims.get(value, ()) for at, value in values.items()}


def _sample_dims(
    few: tuple[int, ...], many: tuple[int, ...], samples: int
) -> tuple[SampleDim, ...]:
    """Return the dimensions that are a multiple of the samples, and their factors.

    Args:
        few: Shape for a number of samples.
        many: Shape for twice as many.
        samples: The number.
    """
    if len(few) != len(many):
        return ()
    return tuple(
        (dim, size // samples)
        for dim, (size, other) in enumerate(zip(few, many, strict=True))
        if size and other == 2 * size and size % samples == 0
    )


def _operations(trace: Trace) -> list[str]:
    return [event.name for event in trace.events]
