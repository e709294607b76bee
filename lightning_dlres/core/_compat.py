"""What is private to torch or NumPy and cannot be done without here, each with its reason."""

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
from torch.utils import _python_dispatch


@contextmanager
def hooks_suspended(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep hooks on parameters from firing meanwhile.

    A hook expects the gradient of the whole batch, once. Backward would call it for the part of
    every micro-batch, and there is no public way to leave hooks out.
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
    """Return a function that says whether NumPy's global generator may be in another state than
    `state`, what `np.random.get_state()` returned.

    Asking for the state again or setting it takes 0.1 ms, since every word becomes an object. The
    address of the generator's memory is public, what lies there is not, so that is compared with
    the state first. Where it is unlike, or a draw may leave it as it was (the second of two normal
    numbers), the function always says yes.
    """
    # NumPy's own type hints lack it.
    current = cast(Any, np.random).get_bit_generator
    generator = current()
    if type(generator) is not np.random.MT19937:
        return lambda: True
    _, keys, position, has_gauss, _ = state
    expected = keys.astype(np.uint32).tobytes() + np.int32(position).tobytes()
    address = generator.ctypes.state_address
    if has_gauss or ctypes.string_at(address, len(expected)) != expected:
        return lambda: True

    def noticed() -> bool:
        return current() is not generator or ctypes.string_at(address, len(expected)) != expected

    return noticed


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
            # A reference to another tensor makes the next forward compute the weight again, as a
            # parametrization needs it.
            other = nn.Parameter(torch.empty(0))
            module._flat_weight_refs = [weakref.ref(other if w is None else w) for w in weights]
            module.flatten_parameters()


def copy_hooks(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give a parameter the gradient hooks of another; torch has no public way to list them."""
    # The very same tables, so that a handle from before can still remove its hook.
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


class LiveBytes(_python_dispatch.TorchDispatchMode):
    """Inside of it, `now` and `peak` are the bytes of the tensors that were made since and still
    live.

    torch counts the memory of accelerators, and not that of the CPU. The dispatch mode sees every
    operation, also those of backward, and has no public name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # What goes in was there before; a result may be a view of it.
        for storage in _storages(args):
            self._count(storage, 0)
        result = func(*args, **(kwargs or {}))
        for storage in _storages((result,)):
            self._count(storage, storage.nbytes())
        return result

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _storages(value)
        elif isinstance(value, Tensor) and value.layout is torch.strided:
            yield value.untyped_storage()


def without_storage() -> AbstractContextManager[Any]:
    """Inside of it, operations yield tensors that have all but storage and values; torch documents
    FakeTensor, and has no public name for the mode."""
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors share which lie in the same memory, also without storage, where
    all addresses are alike."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def without_subclasses() -> AbstractContextManager[Any]:
    """Inside of it, tensors of all classes are taken for plain ones; torch's own subclasses use
    this, and it has no public name."""
    return torch._C.DisableTorchFunctionSubclass()


class Version:
    """Sees whether a tensor is changed in place from now on, through any of its views, and holds
    none of its memory unless it is sparse.

    Autograd checks that itself, but not where hooks take what it saves. Its counter has no public
    name, and a tensor whose data was replaced still shares it."""

    def __init__(self, tensor: Tensor) -> None:
        self._witness = tensor.detach()
        if tensor.layout is torch.strided and not tensor.is_nested:
            self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.saved = self._witness._version

    @property
    def now(self) -> int:
        """Return how often the tensor was changed; `saved` is what it was at the start."""
        return self._witness._version


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, through any of its views; the counter has no
    public name."""
    return tensor._version


def without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that has a tensor's version counter and none of its memory. A tensor whose
    data was replaced keeps its counter; there is no public way to hold that alone."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def with_counter_of(witness: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor over another one's memory, with the witness's version counter; see
    `without_memory`."""
    found = witness.detach()
    found.data = tensor
    return found


def shares_counter(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have one version counter: then no change in place of either is
    unseen by the other. Nothing names a counter, so that it is counted up and put back."""
    before = one._version
    if before != other._version:
        return False
    with _unsafe_preserve_version_counter(one):
        increment_version(one)
        return bool(other._version != before)


# Belongs to a tensor's memory, and does not keep it alive.
MemoryReference = StorageWeakRef


def storage_reference(tensor: Tensor) -> StorageWeakRef:
    """Return what compares equal for tensors that share their memory, does not keep it alive, and
    belongs to no later memory at the same address while it is held. torch has this for handing
    tensors to other processes only."""
    return StorageWeakRef(tensor.untyped_storage())


def _own_references() -> int:
    """Return what Python counts for the storage of a tensor that only one variable holds."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_OWN_REFERENCES = _own_references()


def is_zeros_without_memory(tensor: Tensor) -> bool:
    """Return whether there is no memory behind a tensor: the zeros that torch makes for forward
    derivatives. Reading them ends the process, and there is no public way to tell them."""
    return tensor._is_zerotensor()


def owners_of_memory(tensor: Tensor) -> int:
    """Return how many tensors share a tensor's memory, with itself; torch counts them without a
    public name."""
    storage = tensor.untyped_storage()
    # The Python object counts, too. Who else holds that cannot be told from the count.
    others = sys.getrefcount(storage) > _OWN_REFERENCES
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 + others


def is_only_in_python(tensor: Tensor) -> bool:
    """Return whether autograd does not hold a tensor: only then nobody but Python code can use it.
    torch counts who does, without a public name."""
    count = getattr(tensor, "_use_count", None)
    return count is not None and int(count()) == 1


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor stands for others in a transform of torch.func (`vmap`, `jvp`): it
    has no memory of its own. There is no public name to ask."""
    functorch = getattr(torch._C, "_functorch", None)
    if functorch is None:
        return False
    return bool(
        functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    )


def is_transforming() -> bool:
    """Return whether a transform of torch.func (vmap, grad) or a level of forward derivatives is
    open. No public name tells."""
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return True
    functorch = getattr(torch._C, "_functorch", None)
    return functorch is not None and functorch.peek_interpreter_stack() is not None


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd knows a tensor as a view of another; no public name tells."""
    return bool(tensor._is_view())


def is_in_backward() -> bool:
    """Return whether autograd's backward is under way in this thread; no public name tells."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and int(task()) != -1


def graph_is_kept() -> bool:
    """Return whether backward, from inside of which this is called, keeps its graph; no public
    name tells. What it cannot tell counts as kept."""
    is_kept = getattr(cast(Any, torch._C)._autograd, "_get_current_graph_task_keep_graph", None)
    return True if is_kept is None else bool(is_kept())


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks around its forward; torch has no public way to list
    them."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def profiler_is_on() -> bool:
    """Return whether a profiler of torch runs, in whatever thread; a second one would end it, and
    the program with it."""
    here = cast(Any, torch.autograd)._profiler_enabled()
    return bool(here or getattr(torch.autograd.profiler, "_is_profiler_enabled", False))
