"""Construction of modules whose large tensors have no memory, with the operations on a tape."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from lightning_dlres.core._compat import (
    DispatchMode,
    dispatch_modes_disabled,
    has_device_argument,
    storage_key,
    written_arguments,
)
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.nested import replaced, tensors_in
from lightning_dlres.pipeline.deferred.tape import RandomState, StorageView, Tape
from lightning_dlres.pipeline.deferred.values import put_on_tape

# Smaller tensors, in bytes, are made at once: code may read them, such as the rates of dropout.
SMALLEST = 16 << 10
_META = torch.device("meta")
# By the function that reads an attribute of a tensor: its result, given the tensor's device.
_DEVICE_READS: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.get_device: lambda device: -1 if device.type == "cpu" else device.index,
}
# Functions that read all values, and are no operations.
_VALUE_READS = Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@contextmanager
def deferred_init(smallest: int = SMALLEST) -> Iterator[None]:
    """Context manager in which large tensors of new modules are made on the meta device.

    `values.deferred_values` gives them the values that they would have had. Random states are the
    same afterwards as without this context manager. An operation that reads a value, such as
    `Tensor.item`, computes it.

    Args:
        smallest: Smallest size of a tensor that is deferred, in bytes.
    """
    recorder = _Recorder(smallest)
    handles = [
        register_module_parameter_registration_hook(recorder.note),
        register_module_buffer_registration_hook(recorder.note),
        register_module_module_registration_hook(recorder.note),
    ]
    try:
        with recorder, _SeeminglyReal(recorder):
            yield
    finally:
        for handle in handles:
            handle.remove()
    recorder.finish()


class _SeeminglyReal(TorchFunctionMode):
    """Mode in which code finds tensors on a tape on the device where their data will be.

    Code asks for it: torch's own initialisation leaves tensors on the meta device as they are.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder, self._tape = recorder, recorder.tape

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        read = _DEVICE_READS.get(function) if len(args) == 1 and not kwargs else None
        if read is not None and args[0] in self._tape:
            return read(self._tape.device_of(args[0]))
        if function in _VALUE_READS and args[0] in self._tape:
            return self._values(function, args, kwargs)
        if function == _SET_DATA:
            return function(args[0], self._fitting(args[0], args[1]))
        out = kwargs.get("out")
        if isinstance(out, Tensor) and out in self._tape:
            # torch compares the devices before the operation is recorded.
            rest = {n: value for n, value in kwargs.items() if n not in ("out", "requires_grad")}
            with torch.no_grad():
                return out.copy_(function(*args, **rest))
        if str(kwargs.get("device")) == "meta":
            # Tensors for the meta device have no values, with or without this mode.
            with self._recorder.paused():
                return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            changes = getattr(function, "__name__", "_").endswith("_")
            if changes or "device" not in str(error):
                raise
            # Some functions compare the devices of a tensor and of one that they make.
            return function(*self._tape.real(args), **self._tape.real(kwargs))

    def _values(self, function: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return what a function that reads all values returns; arrays are read-only copies."""
        if function is Tensor.data_ptr:
            return storage_key(args[0]) + args[0].storage_offset() * args[0].element_size()
        result = function(self._tape.real(args[0]), *args[1:], **kwargs)
        if hasattr(result, "flags"):
            # A change of it would be lost without a word.
            result.flags.writeable = False
        return result

    def _fitting(self, tensor: Tensor, data: Tensor) -> Tensor:
        """Return data in the form in which a tensor's `data` may be set to it."""
        if tensor in self._tape and data not in self._tape and not data.is_meta:
            return self._recorder.adopted(data)
        if tensor not in self._tape and data in self._tape and not tensor.is_meta:
            data = self._tape.real(data)
        return data


class _Recorder(DispatchMode):
    """Mode that records operations on large tensors, and runs all others.

    Attributes:
        tape: The tape.
    """

    def __init__(self, smallest: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._smallest, self.tape = smallest, Tape()
        self._is_paused = False
        # By id: tensors on the tape that code may still hold.
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        # By id: modules with tensors or submodules.
        self._modules: dict[int, nn.Module] = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which new tensors are not deferred."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def adopted(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the tape with the values of one that has memory."""
        with dispatch_modes_disabled():
            result = StorageView.of(tensor).empty(_META)
        clone = torch.ops.aten.clone.default
        return self._recorded(clone, (tensor,), {}, result, [], tensor.device, None)  # type: ignore[no-any-return]

    def note(self, module: nn.Module, name: str, value: Any) -> None:
        """Note a module that has got a parameter, a buffer or a submodule."""
        self._modules[id(module)] = module
        if isinstance(value, nn.Module):
            self._modules[id(value)] = value

    def finish(self) -> None:
        """Put parameters and buffers on the tape, and give values to all other tensors."""
        # A deep copy of a module is not noted where it is made, but where it becomes a submodule.
        modules = {id(m): m for noted in self._modules.values() for m in noted.modules()}
        registered: set[int] = set()
        for module in modules.values():
            own = *module.parameters(recurse=False), *module.buffers(recurse=False)
            for tensor in own:
                if tensor in self.tape:
                    registered.add(storage_key(tensor))
                    put_on_tape(tensor, self.tape)
        held = [reference() for reference in self._alive.values()]
        # `torch.utils.swap_tensors` refuses tensors with weak references.
        self._alive.clear()
        held += [t for m in modules.values() for t in tensors_in(list(vars(m).values()))]
        loose = {
            id(tensor): tensor
            for tensor in held
            if tensor is not None and tensor in self.tape and storage_key(tensor) not in registered
        }
        self._modules.clear()
        del held
        # The module of a tensor with a graph, such as a normalised weight, computes it again.
        tensors = [tensor for tensor in loose.values() if tensor.grad_fn is None]
        del loose
        for position, value in enumerate(self.tape.values(list(map(StorageView.of, tensors)))):
            with suppress(RuntimeError):
                torch.utils.swap_tensors(tensors[position], _as_class_of(tensors[position], value))
            # Graphs hold intermediate results, which code cannot reach.
            referrers = gc.get_referrers(tensors[position]) if tensors[position].is_meta else []
            if any(referrer is not tensors for referrer in referrers):
                raise ConfigError(
                    "A tensor that configure_model makes must be a parameter or buffer of a "
                    f"module, got one of shape {tuple(value.shape)} that autograd uses. "
                    "Register it, or make it with torch.no_grad()."
                )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = list(tensors_in((args, kwargs)))
        if any(tensor in self.tape for tensor in tensors):
            return self._derived(func, args, kwargs)
        if tensors or self._is_paused or not has_device_argument(func):
            return func(*args, **kwargs)
        return self._new(func, args, kwargs)

    def _new(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation that makes a tensor of nothing."""
        device = torch.device(kwargs.get("device") or "cpu")
        # torch's own code asks for the device of a tensor of the tape.
        device = torch.device("cpu") if device == _META else device
        kwargs["device"] = device
        generator = kwargs.get("generator")
        try:
            result = func(*args, **{**kwargs, "device": _META, **_without(generator)})
        except NotImplementedError:
            # Some operations, such as those that read a file, cannot do without data.
            return func(*args, **kwargs)
        if not isinstance(result, Tensor) or result.nbytes < self._smallest:
            return func(*args, **kwargs)
        random = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            random = RandomState.now(device, generator)
            func(*args, **kwargs)
        return self._recorded(func, args, kwargs, result, [], device, random)

    def _derived(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on tensors of the tape."""
        tensors = list(tensors_in((args, kwargs)))
        written = list(tensors_in(written_arguments(func, args, kwargs)))
        home = self.tape.device_of(next(t for t in tensors if t in self.tape))
        target = kwargs.get("device")
        device = home if target is None or target == _META else torch.device(target)
        if "device" in kwargs and target is not None:
            kwargs["device"] = device
        if any(tensor not in self.tape for tensor in written):
            # A tensor with memory gets its value now.
            return func(*self.tape.real(args), **self.tape.real(kwargs))
        random = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            random = RandomState.now(device, kwargs.get("generator"))
            self._draw(func, args, kwargs, written)
        try:
            on_meta = replaced(lambda t: t if t.is_meta or not t.dim() else t.to(_META), kwargs)
            if kwargs.get("device") is not None:
                on_meta["device"] = _META
            on_meta.update(_without(kwargs.get("generator")))
            meta_args = replaced(lambda t: t if t.is_meta or not t.dim() else t.to(_META), args)
            result = func(*meta_args, **on_meta)
        except (NotImplementedError, RuntimeError):
            # It depends on values.
            result = func(*self.tape.real(args), **self.tape.real(kwargs))
            if written:
                result = written[0] if len(written) == 1 else tuple(written)
            elif all(tensor.layout is not torch.strided for tensor in tensors_in(result)):
                return result
            else:
                result = replaced(lambda t: StorageView.of(t).empty(_META), result)
        if any(tensor.layout is not torch.strided for tensor in tensors_in(result)):
            return func(*self.tape.real(args), **self.tape.real(kwargs))
        return self._recorded(func, args, kwargs, result, written, device, random)

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any], written: list[Tensor]) -> None:
        """Draw the random numbers of an operation, so that later ones get the same as always."""
        read = [t for t in tensors_in((args, kwargs)) if not any(t is w for w in written)]
        if read and not func._schema.name.endswith("_like"):
            func(*self.tape.real(args), **self.tape.real(kwargs))
            return

        def any_values(tensor: Tensor) -> Tensor:
            if tensor not in self.tape:
                return tensor.clone()
            return StorageView.of(tensor).empty(self.tape.device_of(tensor))

        func(*replaced(any_values, args), **replaced(any_values, kwargs))

    def _recorded(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        written: list[Tensor],
        device: torch.device,
        random: RandomState | None,
    ) -> Any:
        """Put an operation on the tape; return its result."""
        self.tape.add(
            func, args, kwargs, result=result, written=written, device=device, random=random
        )
        for tensor in tensors_in(result):
            self._alive[id(tensor)] = weakref.ref(tensor, partial(self._drop, id(tensor)))
        return result

    def _drop(self, key: int, _: Any) -> None:
        self._alive.pop(key, None)


def _as_class_of(tensor: Tensor, value: Tensor) -> Tensor:
    """Return a value as a parameter if the tensor is one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value


def _without(generator: torch.Generator | None) -> dict[str, Any]:
    """Return keyword arguments without a generator, which does not fit the meta device."""
    return {} if generator is None else {"generator": None}
