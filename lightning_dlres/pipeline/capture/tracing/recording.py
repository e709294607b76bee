"""Recording of a module's forward as a trace of blocks and glue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from lightning_dlres.core._compat import storage_key
from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.core.wire.nested import tensors_in
from lightning_dlres.core.wire.tree import tensors_of
from lightning_dlres.pipeline.capture.block_calls import (
    call_collectors,
    calls_replaced,
    checkpoint_around,
    original_call,
    with_values,
    without_graphs,
)
from lightning_dlres.pipeline.capture.glue_mode import GlueMode
from lightning_dlres.pipeline.capture.operations import (
    TENSOR_HOOKS,
    is_decision,
    is_metadata,
    operation_name,
    plain,
)
from lightning_dlres.pipeline.capture.placeholders.block_output import BlockOutput
from lightning_dlres.pipeline.capture.placeholders.skeleton import meta_of
from lightning_dlres.pipeline.capture.trace import BLOCK, GLUE, INPUT, Event, Trace, Value
from lightning_dlres.pipeline.capture.tracing.inside_of_blocks import InsideOfBlocks
from lightning_dlres.pipeline.capture.tracing.not_a_layer import NotALayer
from lightning_dlres.pipeline.capture.tracing.tensor_states import (
    random_states,
    tensors_in_output,
    version,
    written_storages,
)

# Attributes of every module; those of PyTorch's own.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class Recorder(GlueMode):
    """Recorder of one forward of a module.

    Args:
        module: The module.
        blocks: The blocks, by name; their order gives their indices.
        before_block: Called with the index of a layer before it runs; with 0 at the start.
        outputs: Description of the output of each block, by index. Blocks then do not run, and
            return zeros. None lets them run.
        decisions: Results of the first operations that read values of tensors.
        allows_repeats: True if a block may be called several times.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        before_block: Callable[[int], None],
        outputs: Mapping[int, BlockOutput] | None = None,
        decisions: Sequence[Any] = (),
        *,
        allows_repeats: bool = False,
    ) -> None:
        super().__init__()
        self._allows_repeats = allows_repeats
        # For steps: the number of the call after which the code may do anything.
        self._last: int | None = None
        self._is_over = False
        self._outputs, self._given_decisions, self._num_decisions = outputs, decisions, 0
        self._module, self._names = module, list(blocks)
        self._blocks, self._before_block = dict(enumerate(blocks.values())), before_block
        self._events: list[Event] = []
        self._storages: dict[Value, int] = {}
        # Shapes of values when they are made.
        self.shapes: dict[Value, tuple[int, ...]] = {}
        # By id: the value and the tensor, which is kept so that its id stays its own.
        self._values: dict[int, tuple[Value, Tensor]] = {}
        # By id: the blocks that have a tensor.
        self._owners: dict[int, list[str]] = {}
        for name, block in blocks.items():
            for tensor in (*block.parameters(), *block.buffers()):
                self._owners.setdefault(id(tensor), []).append(name)
        self._trainable = {id(p) for p in module.parameters() if p.requires_grad}
        self._buffers = {
            storage_key(b): n for n, b in module.named_buffers() if id(b) not in self._owners
        }
        self._inner = InsideOfBlocks(self._note_use)
        # Results of the user's own functions; see `_note_own_functions`.
        self._own: set[Value] = set()
        # Functions of users' that made a value inside of a block or before the forward.
        self._own_functions: dict[Value | None, BackwardCFunction] = {}
        self._glue = 0
        # Trainable parameters that glue and other blocks than theirs use, by the event's index.
        self.used: dict[int, list[Tensor]] = {}
        # Order in which blocks were first called, by their index in `blocks`.
        self.order: list[int] = []
        # By the number of a call: output of the block.
        self.outputs: dict[int, BlockOutput] = {}

    def run(self, args: Any, kwargs: Any) -> Trace:
        """Run the module's forward; return the trace.

        Raises:
            NotALayer: If a block cannot be a layer.
            UnsupportedStepError: If glue uses a tensor of a block that the block did not return.
        """
        try:
            return self._run(args, kwargs)
        finally:
            # This object may live on. It must keep no graph, and no weak reference to a parameter:
            # parameters are moved.
            self._values.clear()
            self._own_functions.clear()
            self._inner.references.clear()

    def _run(self, args: Any, kwargs: Any) -> Trace:
        for position, tensor in enumerate(tensors_of((args, kwargs))):
            self._define(Value(INPUT, 0, position), tensor)
        self._before_block(self._first_seed)
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}
        self._arguments = args, kwargs, given
        with self._opened() as code:
            # Only now is this the innermost mode.
            self.set_active(True)
            try:
                with calls_replaced(self._blocks, self._call):
                    output = code(*args, **kwargs)
            finally:
                self.set_active(False)
        tensors = list(tensors_in_output(output))
        if not self._is_over:
            self._note_own_functions(tensors, "return")
        outputs = tuple(self._value(tensor) for tensor in tensors if self._is_known(tensor))
        events = (
            replace(event, is_wrapped=True, is_local=True)
            if self._own.intersection(event.results)
            else event
            for event in self._events
        )
        return self._checked(Trace(tuple(events), dict(self._storages), outputs))

    # Number of the seed at the start.
    _first_seed = 0

    def _opened(self) -> AbstractContextManager[Callable[..., Any]]:
        """Return the context in which the recorded code runs."""
        return nullcontext(self._module.forward)

    @property
    def _place(self) -> str:
        """Name of the recorded code, for messages."""
        return f"The forward of {type(self._module).__name__}"

    def _checked(self, trace: Trace) -> Trace:
        """Return a trace after the last checks."""
        self._refuse_kept(trace)
        return trace

    def _refuse_kept(self, trace: Trace) -> None:
        """Check that no tensor of a layer is kept where the trace does not show its use."""
        for name, tensor in self._kept_elsewhere(*self._arguments):
            if self._is_known(tensor) and storage_key(tensor) in trace.made_by_layers:
                raise UnsupportedStepError(
                    f"{self._place} must pass tensors on by its "
                    f"result only, got {name}, which keeps one. Return it, or keep a number."
                )

    def _kept_elsewhere(
        self, args: Any, kwargs: Any, given: Collection[int]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in attributes of modules outside of blocks, and new ones in the
        arguments, with their places."""
        inside = {id(m) for block in self._blocks.values() for m in block.modules()}
        for path, module in self._module.named_modules():
            if id(module) in inside:
                continue
            buffers = dict(module.named_buffers(recurse=False))
            for name, value in {**vars(module), **buffers}.items():
                if name.startswith("_") and name in _MODULE_ATTRIBUTES:
                    continue
                for tensor in tensors_in(value):
                    yield f"the attribute {f'{path}.{name}'.lstrip('.')!r}", tensor
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) not in given:
                yield "an argument", tensor

    def _call(self, index: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        name = self._names[index]
        number = index
        if index not in self.order:
            self.order.append(index)
        elif not self._allows_repeats:
            raise NotALayer(name, "is called twice", is_repeated=True)
        while number in self.outputs:
            number += len(self._names)
        self.set_active(False)
        try:
            arguments = list(tensors_in_output((args, kwargs)))
            self._note_own_functions(arguments, name)
            inputs = tuple(self._value(t) for t in arguments if self._is_known(t))
            versions = [version(t) for t in arguments]
            if number > 0:
                self._before_block(number)
            around = checkpoint_around(_TOP)
            if around == "reentrant":
                raise UnsupportedStepError(
                    f"{self._place} must use checkpoints that are "
                    f"not reentrant, got a reentrant one around {name!r}. Set use_reentrant=False."
                )
            if self._outputs is not None:
                output = self._outputs[number].made_with(args, kwargs)
                call_collectors(block, args, output)
            else:
                target = with_values(block, arguments)
                with self._inner.of(name):
                    output = original_call(target, args, kwargs)
                if target is not block:
                    output = without_graphs(output, args, kwargs)
            written = written_storages(arguments, versions)
            try:
                self.outputs[number] = BlockOutput.of(output, args, kwargs)
            except ConfigError as error:
                raise NotALayer(name, f"returns an object that cannot be sent: {error}") from error
            results, aliases = self._results(BLOCK, number, tensors_of(output))
            if not self.outputs[number].arguments.keys() >= {position for position, _ in aliases}:
                raise NotALayer(name, "returns one tensor twice, or one that is no argument of it")
            self._events.append(
                Event(
                    name,
                    index,
                    inputs,
                    number,
                    results,
                    aliases,
                    written,
                    is_checkpointed=bool(around),
                )
            )
            self._is_over = number == self._last
            return output
        finally:
            self.set_active(True)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation_name(function)
        if is_metadata(name, args, kwargs):
            return function(*args, **kwargs)
        if self._is_over:
            return self._after_blocks(name, function, args, kwargs)
        if name in TENSOR_HOOKS:
            raise UnsupportedStepError(
                f"{self._place} must not register hooks of tensors "
                f"between its submodules, got {name}: two stages may have the tensor. Register it "
                "in a submodule."
            )
        arguments = list(tensors_in((args, kwargs)))
        versions = [version(tensor) for tensor in arguments]
        state = random_states(arguments)
        result = function(*args, **kwargs)
        is_local = False
        for tensor in arguments:
            is_local |= self._note_use(tensor, "", name)
            if not self._is_known(tensor) and self._inner.has(tensor):
                raise UnsupportedStepError(
                    f"{self._place} must use only what its "
                    f"submodules return, got {name} of a tensor that a submodule keeps elsewhere. "
                    "Return it from the submodule."
                )
        written = written_storages(arguments, versions)
        for storage in written & self._buffers.keys():
            raise UnsupportedStepError(
                f"{self._place} must change buffers in submodules "
                f"only, got a change of {self._buffers[storage]!r} between their calls. Move it "
                "into the forward of a submodule that has parameters."
            )
        self._note_own_functions(arguments, name)
        inputs = tuple(self._value(t) for t in arguments if self._is_known(t))
        if any(t.requires_grad for t in arguments):
            self._refuse_checkpoint(name)
        is_effect = self._note_outside(name, arguments, written, result)
        index, given = self._glue, {id(t) for t in arguments}
        self._glue += 1
        outputs = list(tensors_in(result))
        results, aliases = self._results(GLUE, index, outputs, given)
        reads_values = is_decision(function, name, arguments, outputs)
        if reads_values:
            result = self._decided(result)
        is_random = not all(map(torch.equal, state, random_states(arguments)))
        self._events.append(
            Event(
                name,
                None,
                inputs,
                results=results,
                aliases=aliases,
                written=written,
                metas=tuple(meta_of(tensor) for tensor in outputs),
                returned=next((i for i, t in enumerate(arguments) if t is result), None),
                is_local=is_local or is_random,
                is_random=is_random,
                is_effect=is_effect,
                reads_values=reads_values,
                decision=plain(result) if reads_values else None,
            )
        )
        return result

    def _note_outside(
        self, name: str, arguments: Sequence[Tensor], written: Collection[int], result: Any
    ) -> bool:
        """Return True if an operation changes a tensor that was there before; for steps only."""
        return False

    def _after_blocks(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation after the last block; for steps only."""
        raise NotImplementedError

    def _note_use(self, tensor: Tensor, block: str, operation: str) -> bool:
        """Note that an operation uses a tensor; return True for a trainable parameter.

        Args:
            tensor: Any tensor.
            block: Block that runs the operation; "" for glue.
            operation: Name of the operation.
        """
        owners = self._owners.get(id(tensor), ())
        if block and block in owners:
            return False
        if owners:
            reason = f"has a tensor that {operation} uses outside of it"
            raise NotALayer(owners[0], reason, is_glue=True)
        if id(tensor) not in self._trainable:
            return False
        self.used.setdefault(len(self._events), []).append(tensor)
        return True

    def _note_own_functions(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Note the results of a `torch.autograd.Function`, which gets no call of the mode itself.

        The operations inside of it do, without recording of gradients. The tensor of the last one
        is also the function's result, and then has the function's gradient.

        Args:
            tensors: Tensors that an operation takes.
            operation: Name of the operation.
        """
        for tensor in tensors:
            made_by, value = tensor.grad_fn, self._values.get(id(tensor), (None, None))[0]
            is_changed = isinstance(made_by, BackwardCFunction) and (
                made_by is not self._own_functions.get(value)
            )
            if is_changed and value is not None and value.source == GLUE:
                self._own.add(value)
            elif is_changed or (made_by is not None and value is None):
                raise UnsupportedStepError(
                    f"{self._place} must use tensors that it, its "
                    f"submodules or operations of torch have made, got {operation} of one with "
                    f"{type(made_by).__name__}. Move the code that makes it into a submodule with "
                    "parameters."
                )

    def _refuse_checkpoint(self, operation: str) -> None:
        """Refuse an activation checkpoint of glue: it would run blocks in it again, too."""
        if checkpoint_around(_TOP):
            raise UnsupportedStepError(
                f"{self._place} must call torch.utils.checkpoint "
                f"for its submodules only, got one around {operation}. Move the function that it "
                "runs into a submodule."
            )

    def _results(
        self, source: str, index: int, tensors: Sequence[Tensor], arguments: Collection[int] = ()
    ) -> tuple[tuple[Value, ...], tuple[tuple[int, Value], ...]]:
        """Define the tensors of a result that are new; return these values, and the others with
        their positions.

        Args:
            source: Source of the values.
            index: Index of the block or of the operation.
            tensors: Tensors of the result.
            arguments: Ids of the arguments. One that is no value is a constant, and stays one.
        """
        results, aliases = [], []
        for position, tensor in enumerate(tensors):
            if self._is_known(tensor):
                aliases.append((position, self._value(tensor)))
            elif id(tensor) not in arguments:
                value = Value(source, index, position)
                self._define(value, tensor)
                results.append(value)
        return tuple(results), tuple(aliases)

    def _decided(self, result: Any) -> Any:
        """Return the given decision in the place of a result, if there is one."""
        number, self._num_decisions = self._num_decisions, self._num_decisions + 1
        if number >= len(self._given_decisions) or self._given_decisions[number] is None:
            return result
        return self._given_decisions[number]

    def _define(self, value: Value, tensor: Tensor) -> None:
        self._values[id(tensor)] = value, tensor
        self.shapes[value] = tuple(tensor.shape)
        if isinstance(tensor.grad_fn, BackwardCFunction):
            self._own_functions[value] = tensor.grad_fn
        try:
            self._storages[value] = storage_key(tensor)
        except NotImplementedError as error:
            raise UnsupportedStepError(
                f"{self._place} must not use torch.func or "
                f"torch.vmap between its submodules, got {error}. Move the code into a submodule "
                "with parameters."
            ) from error

    def _value(self, tensor: Tensor) -> Value:
        return self._values[id(tensor)][0]

    def _is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._values


# A search for checkpoints around an operation ends here.
_TOP = Recorder.run.__code__
