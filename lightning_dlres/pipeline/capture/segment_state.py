"""State of a run of some layers: its path, the values that arrive, and those that are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import storage_key
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, flatten, unflatten
from lightning_dlres.pipeline.capture.crossing import SAMPLES, Header, role_of
from lightning_dlres.pipeline.capture.operations import fingerprint_of
from lightning_dlres.pipeline.capture.paths import Decisions, Paths
from lightning_dlres.pipeline.capture.placeholders.skeleton import (
    Meta,
    SampleDim,
    Skeleton,
    placeholder,
)
from lightning_dlres.pipeline.capture.trace import BLOCK, GLUE, INPUT, Boundary, Value
from lightning_dlres.pipeline.stage.microbatch import apart

# Opens a training step: in the context its code may be called, with the step's arguments.
OpenStep = Callable[[], AbstractContextManager[Callable[..., Any]]]
# Key of the skeleton of the inputs, beside those of calls.
INPUTS = -1
# Way out for a forward that takes other paths in other calls.
CUT_THE_STEP = "cut the step with HeteroPipeStrategy(module='training_step')"


class SegmentState:
    """State of one run of consecutive layers.

    Args:
        module: The module.
        blocks: Blocks by layer.
        paths: Traces of the module's forward, for several samples and for one.
        layers: Layers that run; empty and beyond the last one for the glue after all blocks.
        device: Device of the layers.
        step: Opens the training step that runs in the place of the module's forward; None for the
            forward.
        block_parameters: Ids of the parameters of blocks.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        paths: tuple[Paths, Paths],
        *,
        layers: range,
        device: torch.device,
        step: OpenStep | None,
        block_parameters: frozenset[int],
    ) -> None:
        self._module, self._blocks, self._all_paths = module, blocks, paths
        self._layers, self._device, self._step = layers, device, step
        self._block_parameters = block_parameters
        # True for the glue after all blocks, which ends with the module's output.
        self._is_last = layers.start >= len(blocks)
        # True for a run that begins with the inputs of the module's call.
        self._has_inputs = False
        # Values that have arrived, and those that may be sent.
        self._received: dict[Value, Tensor] = {}
        self._arrived: tuple[list[tuple[str, int, int]] | None, Sequence[Tensor]] = None, ()
        # True if the values that have arrived are not those that the path needs.
        self._is_other_path = False
        self._produced: dict[Value, Tensor] = {}
        self._decisions: list[Any] = []
        # Names of the operations of a step before its first layer, and their fingerprint.
        self._opening_names: list[str] = []
        self._opening = ""
        # Decisions of the layers before, by their number; None for those that are made here.
        self._given: list[Any] = []
        # Skeletons of the outputs of calls, by the number of the call, and of `INPUTS`.
        self._skeletons: dict[int, Skeleton] = {}
        self._samples: int | None = None
        # Tensors without data that the code after all layers may see, by storage.
        self._placeholders: dict[int, Tensor] = {}

    def _receive(self, header: Header, tensors: Sequence[Tensor]) -> None:
        self._given, self._opening = header.decisions, header.opening
        at = header.sample_value
        self._samples = samples = tensors[at].shape[0] if at >= 0 else header.samples
        self._skeletons = {call: one.with_samples(samples) for call, one in header.skeletons}
        # A step takes the path of its batch, also for micro-batches of one sample.
        self._choose_paths(is_single=header.is_single if self._step else samples == 1)
        if header.moved:
            pairs = zip(tensors, header.moved, strict=True)
            tensors = [t.movedim(0, dim) if dim else t for t, dim in pairs]
        self._arrived = header.values, tensors
        # After all blocks another path may hold for the whole batch. A step decides for it first.
        is_open = self._is_last and self._step is None
        self._take_path(() if is_open else tuple(header.decisions))

    def _choose_paths(self, is_single: bool) -> None:
        several, single = self._all_paths
        self._is_single, self._paths = is_single, single if is_single else several
        if self._step is None:
            self._paths = self._paths.for_inputs(self._skeletons[INPUTS], self._samples)

    def _take_path(self, decisions: Decisions) -> None:
        self._trace = self._paths.trace(decisions, self._opening)
        start, stop = self._layers.start, self._layers.stop
        self._begin = None if self._has_inputs else self._paths.boundary(self._trace, start)
        self._until = None if self._is_last else self._paths.boundary(self._trace, stop)
        # Another path may want other values, which are known too late.
        self._wants_all = self._until is not None and (
            self._is_prefix or bool(self._trace.decisions)
        )
        self._wanted = frozenset(self._until.values if self._until is not None else ())
        if self._begin is not None:
            self._received = self._values_of_path(self._begin)
            self._produced.update(self._received)
        # End of the run if blocks are called several times. Else it is the next layer's block.
        self._stop_at = self._last_place() if self._is_repeating else None

    @property
    def _is_prefix(self) -> bool:
        """True for a step's code before its first layer, on the whole batch."""
        return self._step is not None and self._has_inputs

    @property
    def _is_repeating(self) -> bool:
        """True if calls of later layers come before the last one of these."""
        return self._trace.has_repeats and not self._is_last and not self._is_prefix

    def _last_place(self) -> tuple[str, int] | None:
        """Return the last call or operation of these layers that counts; None if there is none."""
        assert self._until is not None
        trace, wanted = self._trace, set(self._until.values)
        found, glue = None, 0
        for event, layer in zip(trace.events, trace.layers, strict=True):
            if event.call is not None:
                place, counts = (BLOCK, event.call), True
            else:
                place, counts = (GLUE, glue), bool(event.written or wanted & set(event.results))
                glue += 1
            if counts and self._is_own(layer):
                found = place
        return found

    def _is_own(self, layer: int) -> bool:
        """Return True for a layer of this run, and for what a module does before its first one."""
        return layer in self._layers or (layer < 0 and self._has_inputs)

    def _values_of_path(self, begin: Boundary) -> dict[Value, Tensor]:
        """Return the tensors that have arrived, as values of the path.

        After the last layer, the path may be another one than that of the micro-batches. Its
        operations then have other numbers, but results that are needed come in the same order.
        """
        roles, tensors = self._arrived
        self._is_other_path = roles is not None and (
            list(map(role_of, begin.values)) != roles
            or not all(map(self._has_dimensions, begin.values, tensors))
        )
        if not self._is_other_path:
            if self._step and self._layers.start == 0:
                tensors = self._whole(begin.values, tensors, Tensor.squeeze)
            return dict(zip(begin.values, tensors, strict=True))
        # A decision that comes may lead to the path of these tensors.
        arrived = zip((Value(*role) for role in roles or ()), tensors, strict=True)
        return {value: tensor for value, tensor in arrived if value.source != GLUE}

    def _whole(
        self,
        values: Sequence[Value],
        tensors: Sequence[Tensor],
        change: Callable[[Tensor, int], Tensor],
    ) -> list[Tensor]:
        """Return the tensors of a prefix, with a change of those that must not be cut.

        They get a first dimension of 1, which is not the number of samples.
        """
        dims = map(self._trace.sample_dim, values)
        pairs = zip(dims, tensors, strict=True)
        return [change(tensor, 0) if dim is None else tensor for dim, tensor in pairs]

    def _has_dimensions(self, value: Value, tensor: Tensor) -> bool:
        """Return True if a tensor has as many dimensions as a result of glue in the trace."""
        if value.source != GLUE:
            return True
        shape, _, _ = self._trace.glue[value.index].metas[value.position]
        return len(shape) == tensor.dim()

    def _crossing(self) -> Tree:
        if self._is_prefix:
            self._opening = fingerprint_of(self._opening_names)
        self._take_path(tuple(self._decisions))
        assert self._until is not None
        missing = [value for value in self._until.values if value not in self._produced]
        if missing:
            raise self._other_path(f"{len(missing)} tensors that did not arrive")
        values = self._until.values
        tensors = [self._produced[value] for value in values]
        is_end = self._layers.stop >= len(self._blocks)
        dims = [self._trace.sample_dim(value) for value in values]
        is_joined = is_end and None not in dims
        moved = [dim or 0 for dim in dims] if self._is_prefix or is_joined else []
        if moved:
            pairs = zip(tensors, moved, strict=True)
            tensors = [t.movedim(dim, 0) if dim else t for t, dim in pairs]
        if self._is_prefix:
            tensors = self._whole(values, tensors, Tensor.unsqueeze)
        inputs = self._sample_dims(INPUTS)
        samples = next(
            (
                shape[0]
                for i, (shape, _, _) in enumerate(self._skeletons[INPUTS].tensors)
                if (0, 1) in inputs.get(i, ())
            ),
            SAMPLES,
        )
        known = bool(self._trace.of_samples)
        at = next(
            (
                i
                for i, (dim, tensor) in enumerate(zip(dims, tensors, strict=True))
                if tensor.dim()
                and (
                    dim is not None and (not dim or bool(moved))
                    if known
                    else tensor.shape[0] == samples
                )
            ),
            -1,
        )
        if samples == SAMPLES and at >= 0:
            # The rows of a step may be others than the samples of its batch.
            samples = tensors[at].shape[0]
        decisions = self._decisions
        if is_end:
            decided = self._until.decided
            decisions = [d if number in decided else None for number, d in enumerate(decisions)]
        header = Header(
            SAMPLES if is_joined else samples,
            at,
            [
                (call, one.without_samples(samples, self._sample_dims(call) if at >= 0 else {}))
                for call, one in self._skeletons.items()
            ],
            decisions,
            list(map(role_of, self._until.values)) if is_end else None,
            self._step is not None and self._is_single,
            moved,
            self._opening,
        )
        crossing = (msgspec.msgpack.encode(header), *tensors)
        if is_end and not is_joined:
            # Tensors of two micro-batches, such as the state of an LSTM, do not make one.
            return apart(crossing)
        return crossing

    def _sample_dims(self, call: int) -> Mapping[int, Sequence[SampleDim]]:
        """Return the dimensions of tensors that are a multiple of the samples, by their positions.

        Args:
            call: Number of a call, or `INPUTS`.
        """
        skeleton, trace = self._skeletons[call], self._trace
        if not trace.of_samples:
            # A dimension of the same size by chance makes outputs that are not joined.
            shapes = [shape for shape, _, _ in self._skeletons[INPUTS].tensors]
            samples = next((shape[0] for shape in shapes if shape), SAMPLES)
            return {position: [(0, 1)] for position in skeleton.positions(samples)}
        source, index = (INPUT, 0) if call == INPUTS else (BLOCK, call)
        values = {i: Value(source, index, i) for i in range(len(skeleton.tensors))}
        if call != INPUTS:
            values |= dict(trace.calls[call].aliases)
        return {i: trace.sample_dims.get(value, ()) for i, value in values.items()}

    def _note(self, source: str, index: int, tree: Tree) -> None:
        """Note the skeleton of a tree, and its tensors."""
        self._skeletons[INPUTS if source == INPUT else index] = Skeleton.of(tree)
        for position, tensor in enumerate(flatten(tree)[1]):
            value = Value(source, index, position)
            if self._wants_all or value in self._wanted:
                self._produced[value] = tensor

    def _placeholder(self, meta: Meta) -> Tensor:
        """Return a tensor without data, which no operation of this run may use."""
        tensor = placeholder(meta, self._device, is_marked=self._is_last)
        self._placeholders[storage_key(tensor)] = tensor
        return tensor

    def _rebuilt(self, skeleton: Skeleton, source: str, index: int) -> Tree:
        """Return a tree with received tensors, and placeholders for the others."""
        tensors = []
        aliases = dict(self._trace.calls[index].aliases) if source == BLOCK else {}
        for position, meta in enumerate(skeleton.tensors):
            value = aliases.get(position, Value(source, index, position))
            received = self._received.get(value)
            tensors.append(self._placeholder(meta) if received is None else received)
        return unflatten(skeleton.structure, tensors)

    @property
    def _code(self) -> str:
        """Name of the code that runs, for messages."""
        name = type(self._module).__name__
        return f"{name}.training_step" if self._step else f"The forward of {name}"

    def _other_path(self, where: str) -> UnsupportedStepError:
        other_way = f", or {CUT_THE_STEP}"
        return UnsupportedStepError(
            f"{self._code} must run the same operations for the same decisions, got {where}. Move "
            f"the code that differs into one of its submodules{'' if self._step else other_way}."
        )
