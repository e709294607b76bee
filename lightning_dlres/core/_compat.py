"""Private names of torch and NumPy that this package needs, each with its reason."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils import _python_dispatch
from torch.utils.hooks import RemovableHandle

from lightning_dlres.core.errors import UnsupportedStepError


@contextmanager
def hooks_suspended(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context manager in which hooks on parameters do not run.

    A hook expects the gradient of the whole batch, once. Backward would call it with the gradient
    of each micro-batch. There is no public way to disable hooks.
    """
    parameters = list(parameters)
    tables = [p._backward_hooks for p in parameters]
    tables += [p._post_accumulate_grad_hooks for p in parameters]
    saved = [(table, dict(table)) for table in tables if table]
    for hooks, _ in saved:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in saved:
            hooks.update(entries)


def numpy_change_detector(state: Any) -> Callable[[], bool]:
    """Return a function that returns True if NumPy's global generator may have left `state`.

    `state` is a result of `np.random.get_state()`. Getting or setting the state takes 0.1 ms: NumPy
    converts each word to a Python object. The function therefore compares the generator's memory.
    Its address is public, but its layout is not, so the layout is checked against `state` first.

    The function always returns True in three cases: if the generator is not a Mersenne Twister, if
    its layout differs, and if it has cached the second of two normal numbers. Drawing a cached
    number does not change the compared memory.
    """
    # NumPy's type hints lack `get_bit_generator`.
    current = cast(Any, np.random).get_bit_generator
    generator = current()
    if type(generator) is not np.random.MT19937:
        return lambda: True
    _, keys, position, has_gauss, _ = state
    expected = keys.astype(np.uint32).tobytes() + np.int32(position).tobytes()
    address = generator.ctypes.state_address
    if has_gauss or ctypes.string_at(address, len(expected)) != expected:
        return lambda: True

    def may_have_changed() -> bool:
        return current() is not generator or ctypes.string_at(address, len(expected)) != expected

    return may_have_changed


@contextmanager
def recurrent_weights_released(root: nn.Module) -> Iterator[None]:
    """Context manager in which recurrent modules hold no weak references to their weights.

    `nn.RNNBase` keeps two private lists beside its parameters: the tensors for the next forward,
    and weak references to them. `torch.utils.swap_tensors` refuses a tensor with a weak reference.
    """
    modules = [module for module in root.modules() if isinstance(module, nn.RNNBase)]
    for module in modules:
        names = module._flat_weights_names
        module._flat_weights, module._flat_weight_refs = [None] * len(names), [None] * len(names)
    try:
        yield
    finally:
        for module in modules:
            own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            weights = [own.get(name) for name in module._flat_weights_names]
            module._flat_weights = weights
            # None stands for a weight that a parametrization computes. A reference to an
            # unrelated tensor makes the next forward compute it again.
            other = nn.Parameter(torch.empty(0))
            module._flat_weight_refs = [weakref.ref(other if w is None else w) for w in weights]
            module.flatten_parameters()


def share_gradient_hooks(source: nn.Parameter, target: nn.Parameter) -> None:
    """Let `target` share the gradient hooks of `source`; torch has no public way to list hooks."""
    # Not copies of the tables: existing handles must still be able to remove their hooks.
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


# Base class of modes that see every operation below autograd; it has no public name.
DispatchMode = _python_dispatch.TorchDispatchMode


# The method of nn.Module that runs the hooks and `forward`. Replacing only `forward` of a module
# would let hooks see placeholders for tensors. `__call__` cannot be replaced on an instance.
CALL = "_call_impl"


def forward_hooks(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """Return the hooks after a module's forward; torch has no public way to list hooks."""
    return tuple(module._forward_hooks.values())


def has_user_hooks(module: nn.Module) -> bool:
    """Return whether user code has registered forward hooks on a module, not counting those inside
    of it.

    Hooks of torch itself, such as those of its weight norm, do not count.
    """
    hooks = [*forward_hooks(module), *module._forward_pre_hooks.values()]
    return any(not getattr(hook, "__module__", "").startswith("torch.") for hook in hooks)


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """Context manager in which operations return FakeTensors, which have no memory and no values.

    torch documents FakeTensor, but has no public name for its mode.
    """
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors of the same storage.

    It also works for fake tensors, whose addresses are all equal.
    """
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def torch_function_disabled() -> AbstractContextManager[Any]:
    """Context manager without `__torch_function__` of tensor subclasses; it has no public name."""
    return torch._C.DisableTorchFunctionSubclass()


class ChangeDetector:
    """Detector of in-place changes of a tensor, through any of its views.

    Autograd detects such changes itself, but not if hooks replace its saved tensors. torch has no
    public name for a tensor's version counter. The detector holds a witness, an alias that shares
    the counter. The witness holds no memory, unless the tensor is sparse or nested.

    Attributes:
        saved: Number of changes when this object was created.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._witness = tensor.detach()
        if tensor.layout is torch.strided and not tensor.is_nested:
            self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.saved = self._witness._version

    @property
    def now(self) -> int:
        """Number of changes so far; equal to `saved` if there was none since then."""
        return self._witness._version


def dispatch_modes_disabled() -> AbstractContextManager[Any]:
    """Context manager in which no dispatch mode sees operations; it has no public name."""
    return _python_dispatch._disable_current_modes()


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor, through any of its views.

    The counter has no public name.
    """
    return tensor._version


def version_witness(tensor: Tensor) -> Tensor:
    """Return a witness of a tensor: an empty tensor that shares its version counter.

    The tensor's memory can be freed while the witness is held. There is no public way to hold a
    counter alone. Replacing the data of a detached alias keeps the counter.
    """
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def with_counter_of(witness: Tensor, tensor: Tensor) -> Tensor:
    """Return a view of `tensor` with the version counter of `witness`; see `version_witness`."""
    result = witness.detach()
    result.data = tensor
    return result


def shares_counter(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors share a version counter, and so see each other's changes.

    A counter has no identity that can be compared. It is therefore incremented and restored.
    """
    before = one._version
    if before != other._version:
        return False
    with _unsafe_preserve_version_counter(one):
        increment_version(one)
        return bool(other._version != before)


# Weak reference to a tensor's storage. torch has this class only for sending tensors to other
# processes.
StorageReference = StorageWeakRef


def storage_reference(tensor: Tensor) -> StorageReference:
    """Return a weak reference that compares equal for tensors that share their storage.

    While it is held, no later storage at the same address compares equal.
    """
    return StorageWeakRef(tensor.untyped_storage())


def _own_references() -> int:
    """Return Python's reference count of a storage object that only one variable holds."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_OWN_REFERENCES = _own_references()


def is_zeros_without_memory(tensor: Tensor) -> bool:
    """Return True if a tensor has no memory: torch's zeros for forward derivatives.

    Reading their memory crashes the process. There is no public way to detect them.
    """
    return tensor._is_zerotensor()


def storage_owner_count(tensor: Tensor) -> int:
    """Return the number of owners of a tensor's storage.

    Owners are all tensors that share the storage, including `tensor`. If other Python code holds
    the storage object itself, that counts as one more. torch's count has no public name.
    """
    storage = tensor.untyped_storage()
    # torch counts Python's storage object once, however many variables hold it. Subtract it if only
    # the variable `storage` holds it.
    has_other_holders = sys.getrefcount(storage) > _OWN_REFERENCES
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 + has_other_holders


def is_only_in_python(tensor: Tensor) -> bool:
    """Return True if only Python code holds a tensor, and autograd does not.

    torch's count has no public name. Return False if this torch version has none.
    """
    count = getattr(tensor, "_use_count", None)
    return count is not None and int(count()) == 1


def is_wrapped(tensor: Tensor) -> bool:
    """Return True if a tensor is a wrapper of torch.func (`vmap`, `jvp`), without own memory.

    torch has no public function for this.
    """
    functorch = getattr(torch._C, "_functorch", None)
    return functorch is not None and bool(
        functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    )


def is_transforming() -> bool:
    """Return True inside a transform of torch.func (vmap, grad) or of forward derivatives.

    torch has no public function for this.
    """
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return True
    functorch = getattr(torch._C, "_functorch", None)
    return functorch is not None and functorch.peek_interpreter_stack() is not None


def is_view(tensor: Tensor) -> bool:
    """Return True if autograd treats a tensor as a view; torch has no public test."""
    return bool(tensor._is_view())


def is_in_backward() -> bool:
    """Return True if this thread runs autograd's backward; torch has no public test."""
    return backward_number() != -1


def backward_number() -> int:
    """Return the number of this thread's backward, -1 without one; it has no public name."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if task is None else int(task())


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward has computed all gradients.

    The call must come from inside of backward. There is no public way to be told of its end.
    """
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(function)


def has_other_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return True if a parameter has more than one hook that gets its accumulated gradient.

    torch has no public way to list them.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return hooks is not None and len(hooks) > 1


def accumulated_parameter(value: object) -> nn.Parameter:
    """Return the argument of a hook on a parameter whose gradient was accumulated.

    Torch hands each hook what the one before has returned, and complains only after the last one.

    Raises:
        UnsupportedStepError: If it is no parameter.
    """
    if not isinstance(value, nn.Parameter):
        raise UnsupportedStepError(
            "hooks of register_post_accumulate_grad_hook must return None, got "
            f"{type(value).__name__}. Change parameter.grad in place, and return nothing."
        )
    return value


def register_first_post_hook(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Register a hook that runs after an optimizer's steps, before all others.

    Torch has no public way to put a hook before others.
    """
    handle = optimizer.register_step_post_hook(hook)
    cast(Any, optimizer)._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    return handle


def graph_is_kept() -> bool:
    """Return True if the running backward keeps its graph, or if this torch version cannot tell.

    torch has no public function for this. The call must come from inside of backward.
    """
    is_kept = getattr(cast(Any, torch._C)._autograd, "_get_current_graph_task_keep_graph", None)
    return True if is_kept is None else bool(is_kept())


def registered_buffers(module: nn.Module) -> tuple[dict[str, Tensor | None], set[str]]:
    """Return the buffers of a module by name, and the names of those that no state dict has.

    `named_buffers` leaves out buffers that are None, tells nothing about the state dict, and takes
    much longer. Both containers are the module's own: they can be written to.
    """
    return module._buffers, module._non_persistent_buffers_set


def registered_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module by name; `named_parameters` takes much longer."""
    return module._parameters


def has_forward_hooks(module: nn.Module) -> bool:
    """Return True if a module has forward hooks; torch has no public way to list them."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def profiler_is_on() -> bool:
    """Return True if a profiler of torch runs in any thread.

    A second profiler would stop it and crash the program.
    """
    is_on_in_thread = cast(Any, torch.autograd)._profiler_enabled()
    return bool(is_on_in_thread or getattr(torch.autograd.profiler, "_is_profiler_enabled", False))


def has_device_argument(function: Any) -> bool:
    """Return True if an operation takes a device; its schema has no public name."""
    return any(argument.name == "device" for argument in function._schema.arguments)


def written_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation changes in place; its schema has no public name."""
    written = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            is_positional = position < len(args)
            written.append(args[position] if is_positional else kwargs.get(argument.name))
    return written
