"""Running some consecutive layers of a captured module, with the module's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import storage_key
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.nested import replaced, tensors_in
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.pipeline.capture.block_calls import (
    call_collectors,
    calls_replaced,
    checkpointed_call,
    original_call,
)
from lightning_dlres.pipeline.capture.crossing import (
    Header,
    Returned,
    without_objects,
)
from lightning_dlres.pipeline.capture.glue_mode import GlueMode
from lightning_dlres.pipeline.capture.operations import (
    is_decision,
    is_metadata,
    operation_name,
    plain,
)
from lightning_dlres.pipeline.capture.paths import Paths
from lightning_dlres.pipeline.capture.placeholders.shape_inference import UNKNOWN, ShapeInference
from lightning_dlres.pipeline.capture.placeholders.skeleton import (
    Skeleton,
    meta_of,
)
from lightning_dlres.pipeline.capture.segment_state import (
    CUT_THE_STEP,
    INPUTS,
    OpenStep,
    SegmentState,
)
from lightning_dlres.pipeline.capture.trace import (
    BLOCK,
    GLUE,
    INPUT,
    Boundary,
    Event,
    Value,
    seed_number,
)
from lightning_dlres.pipeline.stage.microbatch import samples_in

# Boundary of a run that begins with the inputs.
_NO_BOUNDARY = Boundary((), frozenset(), frozenset())


class _Stop(BaseException):
    """Signal that the last layer has run."""


class _OtherDecision(BaseException):
    """Signal that the module's code has made another decision than in the trace."""


class SegmentRun(SegmentState, GlueMode):
    """One run of consecutive layers.

    Args:
        module: The module.
        blocks: Blocks by layer.
        paths: Traces of the module's forward, for several samples and for one.
        copies: Modules that run in the place of blocks, by layer.
        layers: Layers that run; empty and beyond the last one for the glue after all blocks.
        device: Device of the layers.
        before_layer: Called with the number of a call before it runs: that of its layer, if the
            block is called once. If one is called several times, called with `seed_number` of
            random operations, too.
        shapes: Results of operations before the layers, computed from shapes.
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
        copies: Mapping[int, nn.Module],
        layers: range,
        device: torch.device,
        before_layer: Callable[[int], None],
        shapes: ShapeInference,
        step: OpenStep | None = None,
        block_parameters: frozenset[int] = frozenset(),
    ) -> None:
        SegmentState.__init__(
            self,
            module,
            blocks,
            paths,
            layers=layers,
            device=device,
            step=step,
            block_parameters=block_parameters,
        )
        GlueMode.__init__(self)
        self._copies, self._before_layer, self._shapes = copies, before_layer, shapes

    def begin(self, inputs: Tree) -> Tree:
        """Run the code up to a layer.

        Args:
            inputs: Positional and keyword arguments of the module's call.

        Returns:
            The crossing to the next layer, or `Returned` of a step that calls none.
        """
        args, kwargs = inputs
        self._has_inputs, self._samples = True, samples_in(inputs)
        self._skeletons[INPUTS] = Skeleton.of(inputs)
        self._choose_paths(is_single=self._samples == 1)
        self._take_path(())
        while True:
            self._note(INPUT, 0, inputs)
            try:
                return self._run(args, kwargs)
            except _OtherDecision:
                self._take_path(tuple(self._decisions))

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
            args, kwargs = self._rebuilt(self._skeletons[INPUTS], INPUT, 0)
            try:
                return self._run(args, kwargs)
            except _OtherDecision:
                self._take_path(tuple(self._decisions))

    def _run(self, args: Any, kwargs: Any) -> Tree:
        self._glue, self._decisions, self._opening_names = 0, list[Any](), list[str]()
        # Class of the signal that has ended the user's code. The signal itself would keep all
        # frames that it has passed, with their tensors.
        self._signal: type[BaseException] | None = None
        self._num_calls = [0] * len(self._blocks)
        # By id: tensors that a function of the user's takes for its result, and received ones.
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._is_live = self._has_inputs
        # The code of a step before the first layer runs again for its end.
        self._in_prefix = self._is_last and self._step is not None
        if self._has_inputs:
            self._before_layer(-1 if self._step else 0)
        if self._is_repeating and self._stop_at is None:
            # None of the layers is called in this mode of the module.
            self._decisions = list(self._given)
            return self._crossing()
        with self._step() if self._step else nullcontext(self._module.forward) as code:
            # Only now is this the innermost mode.
            self.set_active(True)
            try:
                with suppress(_Stop), calls_replaced(dict(enumerate(self._blocks)), self._call):
                    output = code(*args, **kwargs)
            finally:
                self.set_active(False)
        if self._signal is _Stop:
            return self._crossing()
        if self._signal is not None:
            # The user's code has caught it.
            raise self._signal()
        if self._is_other_path:
            raise self._other_path("other tensors from the last layer")
        if self._is_prefix:
            return Returned(output)
        if self._step and not (self._is_last and self._is_live):
            raise self._other_path("a return before the last submodule")
        self._refuse_placeholders("the return", output)
        if self._step:
            return output
        output = without_objects(output)
        return map_tensors(self._own_result, output) if self._own else output

    def _call(self, layer: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        is_beyond = layer >= self._layers.stop and not (self._is_last or self._is_repeating)
        if is_beyond or self._signal is not None:
            raise self._left_by(self._signal or _Stop)
        # Nothing in here is glue.
        self.set_active(False)
        self._in_prefix = False
        if self._own:
            args, kwargs = replaced(self._own_result, (args, kwargs))
        call = layer + self._num_calls[layer] * len(self._blocks)
        self._num_calls[layer] += 1
        if call not in self._trace.calls:
            raise self._other_path(f"another call of layer {layer}")
        is_final = call == self._trace.order[-1]
        if layer not in self._layers:
            if is_final and not (self._is_last or self._is_repeating):
                # None of the layers is called in this mode of the module.
                raise self._left_by(_Stop)
            output = self._rebuilt(self._skeleton_of(layer, call), BLOCK, call)
            call_collectors(block, args, output)
            self._is_live = is_final
            if is_final and self._step:
                self._before_layer(len(self._blocks))
            self.set_active(True)
            return output
        self._is_live = True
        self._refuse_placeholders("the arguments", (args, kwargs))
        try:
            if call > 0 or self._step:
                self._before_layer(call)
            # A copy has no replaced call, but may be called like a block.
            target = self._copies.get(layer, block)
            is_checkpointed = self._trace.calls[call].is_checkpointed
            run_block = checkpointed_call if is_checkpointed else original_call
            output = run_block(target, args, kwargs)
            self._note(BLOCK, call, output)
            if self._is_repeating:
                self._check_sizes(call, output)
            if is_final or (BLOCK, call) == self._stop_at:
                raise self._left_by(_Stop)
        finally:
            self.set_active(True)
        return output

    def _skeleton_of(self, layer: int, call: int) -> Skeleton:
        """Return the skeleton of a call that does not run here."""
        if layer >= self._layers.stop and self._is_repeating:
            return self._trace.skeletons[call].with_samples(self._samples or 1)
        if call not in self._skeletons:
            raise self._other_path(f"a call of layer {layer}")
        return self._skeletons[call]

    def _check_sizes(self, call: int, output: Tree) -> None:
        """Check that the layers before could know the sizes of an output."""
        expected = self._trace.skeletons[call].with_samples(self._samples or 1)
        sizes, others = ([m[0] for m in one.tensors] for one in (expected, Skeleton.of(output)))
        if sizes != others:
            raise UnsupportedStepError(
                f"{type(self._module).__name__} calls {self._trace.calls[call].name!r} several "
                f"times, so that its outputs must have the same sizes in all batches, got {others} "
                f"and before {sizes}. Call it once, with all inputs in one batch."
            )

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(function)
        if is_metadata(name, args, kwargs):
            # Placeholders have it, too.
            return function(*args, **kwargs)
        if self._signal is not None:
            return self._run_unused(function, args, kwargs)
        if self._is_last and self._is_live:
            self._refuse_placeholders(name, (args, kwargs))
            return function(*args, **kwargs)
        index, self._glue = self._glue, self._glue + 1
        if self._is_prefix:
            self._opening_names.append(name)
        if not self._runs_here(index, name):
            return self._before_layers(index, name, function, args, kwargs)
        if self._own:
            args, kwargs = replaced(self._own_result, (args, kwargs))
        self._refuse_placeholders(name, (args, kwargs))
        self._refuse_block_parameters(name, (args, kwargs))
        if self._is_repeating and self._trace.is_seeded(index):
            self._before_layer(seed_number(index))
        result = function(*args, **kwargs)
        outputs = list(tensors_in(result))
        for position, tensor in enumerate(outputs):
            value = Value(GLUE, index, position)
            if self._wants_all or value in self._wanted:
                self._produced[value] = tensor
        if not outputs:
            arguments = list(tensors_in((args, kwargs)))
            if is_decision(function, name, arguments, outputs) and self._is_repeating:
                return self._noted_decision(result)
            if is_decision(function, name, arguments, outputs):
                number = len(self._decisions)
                if self._in_prefix and number < len(self._given):
                    # As the whole batch has decided.
                    given = self._given[number]
                    result = result if given is None else given
                self._decisions.append(plain(result))
        if (GLUE, index) == self._stop_at:
            raise self._left_by(_Stop)
        return result

    def _left_by(self, signal: type[BaseException]) -> BaseException:
        """Return a new signal, which ends the user's code from here on."""
        self._signal = signal
        return signal()

    def _run_unused(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of code that a signal leaves, such as a `finally` clause.

        It may restore a setting, as the end of `no_grad` does. Other results are not used. So it
        writes to copies, and its errors do not count.
        """
        args, kwargs = replaced(torch.clone, (args, kwargs))
        try:
            return function(*args, **kwargs)
        except Exception:
            assert self._signal is not None
            raise self._signal() from None

    def _refuse_placeholders(self, use: str, data: Any) -> None:
        """Refuse tensors without data where their values would count."""
        if not self._placeholders:
            return
        for tensor in tensors_in(data):
            if storage_key(tensor) in self._placeholders:
                fix = (
                    "Keep it in a variable of training_step, or use it there from the first step "
                    "on, such as multiplied by 0."
                    if self._step
                    else f"Use or return it in every call, or {CUT_THE_STEP}."
                )
                raise UnsupportedStepError(
                    f"{self._code} must use after a submodule only what it has used there for the "
                    f"first samples, got {use} of another result from before it. {fix}"
                )

    def _refuse_block_parameters(self, use: str, data: Any) -> None:
        """Refuse a block's parameter in glue: its gradient may belong to another run of layers."""
        if torch.is_grad_enabled() and not self._in_prefix:
            for tensor in tensors_in(data):
                if tensor.requires_grad and id(tensor) in self._block_parameters:
                    raise self._other_path(f"{use} of a parameter of a submodule")

    def _runs_here(self, index: int, name: str) -> bool:
        """Return True for an operation of glue that belongs to this run."""
        if not self._is_repeating:
            return self._is_live or self._in_prefix
        self._planned(index, name)
        return self._is_own(self._trace.glue_layers[index])

    def _planned(self, index: int, name: str) -> Event:
        """Return the event of an operation."""
        events = self._trace.glue
        if index >= len(events) or events[index].name != name:
            planned = events[index].name if index < len(events) else "the end"
            raise self._other_path(f"{name} in the place of {planned}")
        return events[index]

    def _before_layers(self, index: int, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of glue of other layers: received, computed again, or fake."""
        event, begin = self._planned(index, name), self._begin or _NO_BOUNDARY
        if event.reads_values:
            return self._decide(function, *replaced(self._own_result, (args, kwargs)))
        if self._own:
            args, kwargs = replaced(self._own_result, (args, kwargs))
        if index in begin.repeated:
            result = function(*args, **kwargs)
            for position, tensor in enumerate(tensors_in(result)):
                value = Value(GLUE, index, position)
                self._received[value] = self._produced[value] = tensor
            return result
        if event.returned is not None:
            return list(tensors_in((args, kwargs)))[event.returned]
        if index in begin.skipped or (self._is_repeating and event.written):
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
            return self._placeholder(meta_of(tensor)) if known is None else known

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
        tensors = tuple(map(self._placeholder, event.metas))
        return tensors[0] if len(tensors) == 1 else tensors

    def _decide(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation that reads values."""
        number = len(self._decisions)
        given = self._given[number] if number < len(self._given) else None
        return self._noted_decision(function(*args, **kwargs) if given is None else given)

    def _noted_decision(self, result: Any) -> Any:
        """Note a decision and return it, or take its path."""
        number = len(self._decisions)
        self._decisions.append(plain(result))
        if plain(result) != self._trace.decisions[number]:
            raise self._left_by(_OtherDecision)
        return result
