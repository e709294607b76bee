"""Recording of a module's forward as a trace of blocks and glue."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_dlres.core._compat import CALL, storage_key
from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, tensors_of, unflatten
from lightning_dlres.pipeline.capture.glue_mode import GlueMode
from lightning_dlres.pipeline.capture.skeleton import Skeleton, meta_of
from lightning_dlres.pipeline.capture.tensors import tensors_in
from lightning_dlres.pipeline.capture.trace import BLOCK, GLUE, INPUT, Event, Trace, Value

# Operations whose result is no tensor and depends on the metadata of tensors only.
METADATA = frozenset(
    {
        *("shape", "size", "dim", "ndim", "ndimension", "dtype", "device", "layout", "is_cuda"),
        *("numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size"),
        *("itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn", "is_floating_point"),
        *("is_complex", "is_sparse", "is_quantized", "is_meta", "is_mps", "is_xpu", "is_cpu"),
        *("__len__", "names", "get_device", "type", "is_nested", "is_inference", "is_mkldnn"),
        *("finfo", "iinfo", "result_type", "can_cast", "is_tensor", "is_conj", "is_neg"),
        *("broadcast_shapes", "__hash__", "__dir__", "is_signed", "_version", "retains_grad"),
    }
)


def operation_name(function: Any) -> str:
    """Return the name of a function of torch; that of the property for a getter."""
    name = getattr(function, "__name__", "?")
    if name in ("__get__", "__set__"):
        return getattr(getattr(function, "__self__", None), "__name__", name)
    return name


class NotALayer(Exception):
    """A block cannot be a layer.

    Attributes:
        name: Name of the block.
        reason: Why, as the rest of a sentence that begins with the name.
        is_glue: True if it can only be glue; False if a module around it may be a layer.
    """

    def __init__(self, name: str, reason: str, *, is_glue: bool = False) -> None:
        super().__init__(f"{name} {reason}")
        self.name, self.reason, self.is_glue = name, reason, is_glue


@contextmanager
def calls_replaced(
    blocks: Mapping[int, nn.Module], call: Callable[[int, nn.Module, Any, Any], Any]
) -> Iterator[None]:
    """Context manager in which calls of blocks become `call(index, block, args, kwargs)`.

    Args:
        blocks: Blocks by index.
        call: Function that may call `original_call` for the block's own call.
    """
    saved = {index: block.__dict__.get(CALL) for index, block in blocks.items()}

    def forward_of(index: int, block: nn.Module) -> Callable[..., Any]:
        return lambda *args, **kwargs: call(index, block, args, kwargs)

    for index, block in blocks.items():
        block.__dict__[CALL] = forward_of(index, block)
    try:
        yield
    finally:
        for index, block in blocks.items():
            block.__dict__.pop(CALL, None)
            if saved[index] is not None:
                block.__dict__[CALL] = saved[index]


def original_call(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a block itself, with its hooks, inside of `calls_replaced`."""
    replacement = block.__dict__.pop(CALL)
    try:
        return block(*args, **kwargs)
    finally:
        block.__dict__[CALL] = replacement


@dataclass(frozen=True)
class BlockOutput:
    """Output of a block, without data.

    Attributes:
        skeleton: Skeleton of the output.
        arguments: Tensors that are arguments of the block: their positions in the output and among
            the arguments.
    """

    skeleton: Skeleton
    arguments: dict[int, int]

    @classmethod
    def of(cls, output: Tree, arguments: Sequence[Tensor]) -> BlockOutput:
        """Return the description of an output.

        Raises:
            ConfigError: If the output has an object that cannot be sent.
        """
        positions = {id(tensor): position for position, tensor in enumerate(arguments)}
        tensors = enumerate(tensors_of(output))
        same = {at: positions[id(tensor)] for at, tensor in tensors if id(tensor) in positions}
        return cls(Skeleton.of(output), same)

    def made_with(self, arguments: Sequence[Tensor]) -> Tree:
        """Return an output of zeros, and of these arguments."""
        tensors = [
            torch.zeros(shape, dtype=getattr(torch, dtype))
            for shape, dtype, _ in self.skeleton.tensors
        ]
        for at, argument in self.arguments.items():
            tensors[at] = arguments[argument]
        return unflatten(self.skeleton.structure, tensors)


class Recorder(GlueMode):
    """Recorder of one forward of a module.

    Args:
        module: The module.
        blocks: The blocks, by name; their order gives their indices.
        before_block: Called with the index of a layer before it runs; with 0 at the start.
        outputs: Description of the output of each block, by index. Blocks then do not run, and
            return zeros. None lets them run.
        decisions: Results of the first operations that read values of tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        before_block: Callable[[int], None],
        outputs: Mapping[int, BlockOutput] | None = None,
        decisions: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self._outputs, self._given_decisions, self._num_decisions = outputs, decisions, 0
        self._module, self._names = module, list(blocks)
        self._blocks, self._before_block = dict(enumerate(blocks.values())), before_block
        self._events: list[Event] = []
        self._storages: dict[Value, int] = {}
        # By id: the value and the tensor, which is kept so that its id stays its own.
        self._values: dict[int, tuple[Value, Tensor]] = {}
        self._local = {id(t): t for b in blocks.values() for t in (*b.parameters(), *b.buffers())}
        self._local |= {id(p): p for p in module.parameters() if p.requires_grad}
        self._owners = {
            id(t): n for n, b in blocks.items() for t in (*b.parameters(), *b.buffers())
        }
        self._buffers = {
            storage_key(b): n for n, b in module.named_buffers() if id(b) not in self._owners
        }
        self._inner = _InnerTensors()
        self._glue = 0
        # Parameters and buffers that glue uses, by the index of the event.
        self.used: dict[int, list[Tensor]] = {}
        # Order in which blocks were called, by their index in `blocks`, and their outputs.
        self.order: list[int] = []
        self.outputs: dict[int, BlockOutput] = {}

    def run(self, args: Any, kwargs: Any) -> Trace:
        """Run the module's forward; return the trace.

        Raises:
            NotALayer: If a block cannot be a layer.
            UnsupportedStepError: If glue uses a tensor of a block that the block did not return.
        """
        for position, tensor in enumerate(tensors_of((args, kwargs))):
            self._define(Value(INPUT, 0, position), tensor)
        self._before_block(0)
        self.set_active(True)
        try:
            with calls_replaced(self._blocks, self._call):
                output = self._module.forward(*args, **kwargs)
        finally:
            self.set_active(False)
        outputs = tuple(self._value(t) for t in tensors_in_output(output) if self._is_known(t))
        return Trace(tuple(self._events), dict(self._storages), outputs)

    def _call(self, index: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        name = self._names[index]
        if index in self.order:
            raise NotALayer(name, "is called twice")
        self.order.append(index)
        self.set_active(False)
        try:
            arguments = list(tensors_in_output((args, kwargs)))
            inputs = tuple(self._value(t) for t in arguments if self._is_known(t))
            versions = [_version(t) for t in arguments]
            if index > 0:
                self._before_block(index)
            if self._outputs is not None:
                output = self._outputs[index].made_with(arguments)
            else:
                with self._inner:
                    output = original_call(block, args, kwargs)
            written = _written(arguments, versions)
            try:
                self.outputs[index] = BlockOutput.of(output, arguments)
            except ConfigError as error:
                raise NotALayer(name, f"returns an object that cannot be sent: {error}") from error
            results, aliases = self._results(BLOCK, index, tensors_of(output))
            if not self.outputs[index].arguments.keys() >= {position for position, _ in aliases}:
                raise NotALayer(name, "returns one tensor twice, or one that is no argument of it")
            self._events.append(Event(name, index, inputs, results, aliases, written))
            return output
        finally:
            self.set_active(True)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation_name(function)
        arguments = list(tensors_in((args, kwargs)))
        versions = [_version(tensor) for tensor in arguments]
        state = torch.get_rng_state()
        result = function(*args, **kwargs)
        local = [t for t in arguments if id(t) in self._local and name not in METADATA]
        for tensor in local:
            if id(tensor) in self._owners:
                reason = f"has a tensor that {name} uses outside of it"
                raise NotALayer(self._owners[id(tensor)], reason, is_glue=True)
        for tensor in arguments:
            is_known = id(tensor) in self._values or id(tensor) in self._local
            if not is_known and self._inner.has(tensor):
                raise UnsupportedStepError(
                    f"The forward of {type(self._module).__name__} must use only what its "
                    f"submodules return, got {name} of a tensor that a submodule keeps elsewhere. "
                    "Return it from the submodule."
                )
        written = _written(arguments, versions)
        for storage in written & self._buffers.keys():
            raise UnsupportedStepError(
                f"The forward of {type(self._module).__name__} must change buffers in submodules "
                f"only, got a change of {self._buffers[storage]!r} between their calls. Move it "
                "into a submodule."
            )
        if local:
            self.used[len(self._events)] = local
        inputs = tuple(self._value(t) for t in arguments if self._is_known(t))
        index, given = self._glue, {id(t) for t in arguments}
        self._glue += 1
        outputs = list(tensors_in(result))
        results, aliases = self._results(GLUE, index, outputs, given)
        reads_values = is_decision(function, name, arguments, outputs)
        if reads_values:
            result = self._decided(result)
        is_random = not torch.equal(state, torch.get_rng_state())
        self._events.append(
            Event(
                name,
                None,
                inputs,
                results,
                aliases,
                written,
                metas=tuple(meta_of(tensor) for tensor in outputs),
                returned=next((i for i, t in enumerate(arguments) if t is result), None),
                is_local=bool(local) or is_random,
                reads_values=reads_values,
                decision=plain(result) if reads_values else None,
            )
        )
        return result

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
        self._storages[value] = storage_key(tensor)

    def _value(self, tensor: Tensor) -> Value:
        return self._values[id(tensor)][0]

    def _is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._values


def is_decision(function: Any, name: str, arguments: Any, outputs: Any) -> bool:
    """Return True if an operation returns no tensor, but reads values of tensors."""
    is_write = function is Tensor.__setitem__ or name == "_assert"
    return bool(arguments) and not outputs and name not in METADATA and not is_write


def plain(result: Any) -> Any:
    """Return a result if it is plain data that can be compared and sent, else None."""
    return result if isinstance(result, (bool, int, float, str)) else None


class _InnerTensors(TorchFunctionMode):
    """Tensors that operations inside of blocks make, in which the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self._references: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._references[id(tensor)] = weakref.ref(tensor)
        return result

    def has(self, tensor: Tensor) -> bool:
        """Return True if an operation inside of a block has made a tensor."""
        reference = self._references.get(id(tensor))
        return reference is not None and reference() is tensor


def tensors_in_output(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in data; objects of other classes are left out."""
    try:
        yield from tensors_of(value)
    except ConfigError:
        yield from tensors_in(value)


def _version(tensor: Tensor) -> int:
    with suppress(RuntimeError):
        return tensor._version
    return 0


def _written(tensors: list[Tensor], versions: list[int]) -> frozenset[int]:
    """Return the storages of the tensors whose version has changed."""
    return frozenset(
        storage_key(tensor)
        for tensor, version in zip(tensors, versions, strict=True)
        if _version(tensor) != version
    )
