"""Running some consecutive layers of a captured module, with the module's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.nested import replaced, tensors_in
from lightning_dlres.core.wire.tree import Tree, flatten, map_tensors, unflatten
from lightning_dlres.pipeline.capture.block_calls import (
    calls_replaced,
    checkpointed_call,
    original_call,
)
from lightning_dlres.pipeline.capture.crossing import (
    SAMPLES,
    Header,
    Returned,
    role_of,
    without_objects,
)
from lightning_dlres.pipeline.capture.glue_mode import GlueMode
from lightning_dlres.pipeline.capture.operations import (
    is_decision,
    is_metadata,
    operation_name,
    plain,
)
from lightning_dlres.pipeline.capture.paths import Decisions, Paths
from lightning_dlres.pipeline.capture.placeholders.shape_inference import UNKNOWN, ShapeInference
from lightning_dlres.pipeline.capture.placeholders.skeleton import (
    SampleDim,
    Skeleton,
    meta_of,
    placeholder,
)
from lightning_dlres.pipeline.capture.trace import BLOCK, GLUE, INPUT, Boundary, Event, Value
from lightning_dlres.pipeline.stage.microbatch import apart, samples_in


class _Stop(BaseException):
    """Signal that the last layer has run."""


class _OtherDecision(BaseException):
    """Signal that the module's code has made another decision than in the trace."""


class SegmentRun(GlueMode):
    """One run of consecutive layers.

    Args:
        module: The module.
        blocks: Blocks by layer.
        paths: Traces of the module's forward, for several samples and for one.
        copies: Modules that run in the place of blocks, by layer.
        layers: Layers that run; empty and beyond the last one for the glue after all blocks.
        device: Device of the layers.
        before_layer: Called with the index of a layer before it runs.
        shapes: Results of operations before the layers, computed from shapes.
        step: Opens the training step that runs in the place of the module's forward, as
            `captured.OpenStep`; None for the forward.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        paths: tuple[Paths, Paths],
        *,
        copies: Mapping[int, nn.Module],
        layers: range,
        device: torch.device,
        before_layer: Callable[[int], None],
        shapes: ShapeInference,
        step: Callable[[], AbstractContextManager[Callable[..., Any]]] | None = None,
    ) -> None:
        super().__init__()
        self._step = step
        self._module, self._blocks, self._all_paths = module, blocks, paths
        self._copies, self._layers, self._device = copies, layers, device
        self._before_layer, self._shapes = before_layer, shapes
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
        # Decisions of the layers before, by their number; None for those that are made here.
        self._given: list[Any] = []
        self._skeletons: list[Skeleton] = []

    def begin(self, inputs: Tree) -> Tree:
        """Run the code up to a layer.

        Args:
            inputs: Positional and keyword arguments of the module's call.

        Returns:
            The crossing to the next layer, or `Returned` of a step that calls none.
        """
        args, kwargs = inputs
        self._has_inputs = True
        self._choose_paths(is_single=samples_in(inputs) == 1)
        self._take_path(())
        self._note(INPUT, 0, inputs)
        return self._run(args, kwargs)

    def finish(self, inputs: Tree, arguments: Tree) -> Tree:
        """Run the code of a step after all layers.

        Args:
            inputs: What the last layer has returned.
            arguments: Positional and keyword arguments of the step.

        Returns:
            The step's result.
        """
        header, *tensors = inputs
        self._receive(msgspec.msgpack.decode(header, type=Header), tensors)
        args, kwargs = arguments
        return self._run(args, kwargs)

    def run(self, inputs: Tree) -> Tree:
        """Run the layers, or the module's code after all of them.

        Args:
            inputs: What the layers before have returned.

        Returns:
            The crossing to the next layer, or the module's output.
        """
        header, *tensors = inputs
        self._receive(msgspec.msgpack.decode(header, type=Header), tensors)
        while True:
            args, kwargs = self._rebuilt(self._skeletons[0], INPUT, 0)
            try:
                return self._run(args, kwargs)
            except _OtherDecision:
                self._take_path(tuple(self._decisions))

    def _receive(self, header: Header, tensors: Sequence[Tensor]) -> None:
        self._given = header.decisions
        at = header.sample_value
        samples = tensors[at].shape[0] if at >= 0 else header.samples
        # A step takes the path of its batch, also for micro-batches of one sample.
        self._choose_paths(is_single=header.is_single if self._step else samples == 1)
        self._arrived = header.values, tensors
        # After all blocks another path may hold for the whole batch. A step decides for it first.
        is_open = self._is_last and self._step is None
        self._take_path(() if is_open else tuple(header.decisions))
        self._skeletons = [one.with_samples(samples) for one in header.skeletons]

    def _choose_paths(self, is_single: bool) -> None:
        several, single = self._all_paths
        self._is_single, self._paths = is_single, single if is_single else several

    def _take_path(self, decisions: Decisions) -> None:
        self._trace = self._paths.trace(decisions)
        start, stop = self._layers.start, self._layers.stop
        self._begin = None if self._has_inputs else self._paths.boundary(self._trace, start)
        self._until = None if self._is_last else self._paths.boundary(self._trace, stop)
        # Another path may want other values, which are known too late.
        self._wants_all = self._until is not None and bool(self._trace.decisions)
        self._wanted = frozenset(self._until.values if self._until is not None else ())
        if self._begin is not None:
            self._received = self._values_of_path(self._begin)
            self._produced.update(self._received)

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
        if self._is_single:
            return list(tensors)
        known = self._trace.of_samples
        pairs = zip(values, tensors, strict=True)
        return [tensor if value in known else change(tensor, 0) for value, tensor in pairs]

    def _has_dimensions(self, value: Value, tensor: Tensor) -> bool:
        """Return True if a tensor has as many dimensions as a result of glue in the trace."""
        if value.source != GLUE:
            return True
        shape, _, _ = self._trace.glue[value.index].metas[value.position]
        return len(shape) == tensor.dim()

    def _run(self, args: Any, kwargs: Any) -> Tree:
        self._glue, self._num_calls, self._decisions = 0, 0, []
        # By id: tensors that a function of the user's takes for its result, and received ones.
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._is_live = self._has_inputs
        # The code of a step before the first layer runs again for its end.
        self._in_prefix = self._is_last and self._step is not None
        if self._has_inputs:
            self._before_layer(-1 if self._step else 0)
        is_stopped = False
        with self._step() if self._step else nullcontext(self._module.forward) as code:
            # Only now is this the innermost mode.
            self.set_active(True)
            try:
                with calls_replaced(dict(enumerate(self._blocks)), self._call):
                    output = code(*args, **kwargs)
            except _Stop:
                is_stopped = True
            finally:
                self.set_active(False)
        if is_stopped:
            return self._crossing()
        if self._is_other_path:
            raise self._other_path("other tensors from the last layer")
        if self._step and self._has_inputs:
            return Returned(output)
        if self._step:
            if not (self._is_last and self._is_live):
                raise self._other_path("a return before the last submodule")
            return output
        output = without_objects(output)
        return map_tensors(self._own_result, output) if self._own else output

    def _crossing(self) -> Tree:
        self._take_path(tuple(self._decisions))
        assert self._until is not None
        missing = [value for value in self._until.values if value not in self._produced]
        if missing:
            raise self._other_path(f"{len(missing)} tensors that did not arrive")
        values = self._until.values
        tensors = [self._produced[value] for value in values]
        if self._step and self._has_inputs:
            tensors = self._whole(values, tensors, Tensor.unsqueeze)
        inputs = self._sample_dims(0)
        samples = next(
            (
                shape[0]
                for i, (shape, _, _) in enumerate(self._skeletons[0].tensors)
                if (0, 1) in inputs.get(i, ())
            ),
            SAMPLES,
        )
        known = self._trace.of_samples
        at = next(
            (
                i
                for i, (value, tensor) in enumerate(zip(values, tensors, strict=True))
                if tensor.dim() and (value in known if known else tensor.shape[0] == samples)
            ),
            -1,
        )
        decisions = self._decisions
        is_end = self._layers.stop >= len(self._blocks)
        if is_end:
            decided = self._until.decided
            decisions = [d if number in decided else None for number, d in enumerate(decisions)]
        is_joined = is_end and self._trace.of_samples.issuperset(values)
        header = Header(
            SAMPLES if is_joined else samples,
            at,
            [
                one.without_samples(samples, self._sample_dims(number) if at >= 0 else {})
                for number, one in enumerate(self._skeletons)
            ],
            decisions,
            list(map(role_of, self._until.values)) if is_end else None,
            self._step is not None and self._is_single,
        )
        crossing = (msgspec.msgpack.encode(header), *tensors)
        if is_end and not is_joined:
            # Tensors of two micro-batches, such as the state of an LSTM, do not make one.
            return apart(crossing)
        return crossing

    def _sample_dims(self, number: int) -> Mapping[int, Sequence[SampleDim]]:
        """Return the dimensions of tensors that are a multiple of the samples, by their positions.

        Args:
            number: Number of a skeleton: 0 for the inputs, then the calls of blocks.
        """
        skeleton, trace = self._skeletons[number], self._trace
        if not trace.of_samples:
            # A dimension of the same size by chance makes outputs that are not joined.
            shapes = [shape for shape, _, _ in self._skeletons[0].tensors]
            samples = next((shape[0] for shape in shapes if shape), SAMPLES)
            return {position: [(0, 1)] for position in skeleton.positions(samples)}
        if number == 0:
            values = {i: Value(INPUT, 0, i) for i in range(len(skeleton.tensors))}
        else:
            block = trace.blocks[number - 1]
            values = {i: Value(BLOCK, block, i) for i in range(len(skeleton.tensors))}
            values |= dict(trace.calls[block].aliases)
        return {i: trace.sample_dims.get(value, ()) for i, value in values.items()}

    def _call(self, layer: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        if layer >= self._layers.stop and not self._is_last:
            raise _Stop
        # Nothing in here is glue.
        self.set_active(False)
        self._in_prefix = False
        if self._own:
            args, kwargs = replaced(self._own_result, (args, kwargs))
        is_final = layer == self._trace.blocks[-1]
        self._num_calls += 1
        if layer < self._layers.start:
            if is_final and not self._is_last:
                # None of the layers is called in this mode of the module.
                raise _Stop
            if self._num_calls >= len(self._skeletons):
                raise self._other_path(f"a call of layer {layer}")
            output = self._rebuilt(self._skeletons[self._num_calls], BLOCK, layer)
            self._is_live = is_final
            if is_final and self._step:
                self._before_layer(len(self._blocks))
            self.set_active(not is_final)
            return output
        self._is_live = True
        try:
            if layer > 0 or self._step:
                self._before_layer(layer)
            # A copy has no replaced call, but may be called like a block.
            target = self._copies.get(layer, block)
            is_checkpointed = self._trace.calls[layer].is_checkpointed
            run_block = checkpointed_call if is_checkpointed else original_call
            output = run_block(target, args, kwargs)
            self._note(BLOCK, layer, output)
            if is_final:
                raise _Stop
        finally:
            self.set_active(True)
        return output

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(function)
        if is_metadata(name, args, kwargs):
            # Placeholders have it, too.
            return function(*args, **kwargs)
        index, self._glue = self._glue, self._glue + 1
        if not (self._is_live or self._in_prefix):
            return self._before_layers(index, name, function, args, kwargs)
        if self._own:
            args, kwargs = replaced(self._own_result, (args, kwargs))
        result = function(*args, **kwargs)
        outputs = list(tensors_in(result))
        for position, tensor in enumerate(outputs):
            value = Value(GLUE, index, position)
            if self._wants_all or value in self._wanted:
                self._produced[value] = tensor
        if not outputs:
            arguments = list(tensors_in((args, kwargs)))
            if is_decision(function, name, arguments, outputs):
                number = len(self._decisions)
                if self._in_prefix and number < len(self._given):
                    # As the whole batch has decided.
                    given = self._given[number]
                    result = result if given is None else given
                self._decisions.append(plain(result))
        return result

    def _before_layers(self, index: int, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of glue before the layers: received, computed again, or fake."""
        events = self._trace.glue
        if index >= len(events) or events[index].name != name:
            planned = events[index].name if index < len(events) else "the end"
            raise self._other_path(f"{name} in the place of {planned}")
        assert self._begin is not None
        event = events[index]
        if event.reads_values:
            return self._decide(function, *replaced(self._own_result, (args, kwargs)))
        if self._own:
            args, kwargs = replaced(self._own_result, (args, kwargs))
        if index in self._begin.repeated:
            result = function(*args, **kwargs)
            for position, tensor in enumerate(tensors_in(result)):
                value = Value(GLUE, index, position)
                self._received[value] = self._produced[value] = tensor
            return result
        if event.returned is not None:
            return list(tensors_in((args, kwargs)))[event.returned]
        if index in self._begin.skipped:
            return None
        given = {v.position: self._received[v] for v in event.results if v in self._received}
        given |= {at: self._received[v] for at, v in event.aliases if v in self._received}
        if event.is_wrapped:
            given = {at: self._for_own_function(tensor) for at, tensor in given.items()}
        if len(given) == 1 and len(event.results) == 1 and event.results[0].position == 0:
            return given[0]
        result = self._without_data(event, function, args, kwargs)
        positions = count()

        def given_or_placeholder(tensor: Tensor) -> Tensor:
            known = given.get(next(positions))
            return placeholder(meta_of(tensor), self._device) if known is None else known

        return replaced(given_or_placeholder, result)

    def _for_own_function(self, received: Tensor) -> Tensor:
        """Return a tensor whose gradient the user's own function may set.

        Where it is used, `_own_result` puts the received tensor in its place.
        """
        result = received.detach()
        self._own[id(result)] = result, received
        return result

    def _own_result(self, tensor: Tensor) -> Tensor:
        return self._own.get(id(tensor), (tensor, tensor))[1]

    def _without_data(self, event: Event, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation, computed from shapes alone."""
        result = self._shapes.result(function, args, kwargs, self._device)
        if result is not UNKNOWN:
            return result
        # Nothing here needs the values.
        tensors = tuple(placeholder(meta, self._device) for meta in event.metas)
        return tensors[0] if len(tensors) == 1 else tensors

    def _decide(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation that reads values."""
        number = len(self._decisions)
        given = self._given[number] if number < len(self._given) else None
        result = function(*args, **kwargs) if given is None else given
        self._decisions.append(plain(result))
        if plain(result) != self._trace.decisions[number]:
            raise _OtherDecision
        return result

    def _note(self, source: str, index: int, tree: Tree) -> None:
        """Note the skeleton of a tree, and its tensors."""
        self._skeletons.append(Skeleton.of(tree))
        for position, tensor in enumerate(flatten(tree)[1]):
            value = Value(source, index, position)
            if self._wants_all or value in self._wanted:
                self._produced[value] = tensor

    def _rebuilt(self, skeleton: Skeleton, source: str, index: int) -> Tree:
        """Return a tree with received tensors, and placeholders for the others."""
        tensors = []
        aliases = dict(self._trace.calls[index].aliases) if source == BLOCK else {}
        for position, meta in enumerate(skeleton.tensors):
            value = aliases.get(position, Value(source, index, position))
            received = self._received.get(value)
            tensors.append(placeholder(meta, self._device) if received is None else received)
        return unflatten(skeleton.structure, tensors)

    def _other_path(self, where: str) -> UnsupportedStepError:
        name = type(self._module).__name__
        code = f"{name}.training_step" if self._step else f"The forward of {name}"
        return UnsupportedStepError(
            f"{code} must run the same operations for the "
            f"same decisions, got {where}. Move the code that differs into one of its submodules."
        )
