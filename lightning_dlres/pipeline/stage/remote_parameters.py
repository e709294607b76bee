"""Remote parameters and buffers: those that another stage holds.

They are on the meta device and have no storage. On the CPU, torch lets an operation mix meta and
real tensors, and returns uninitialised memory. So remote tensors have a class of their own, which
checks every operation on them. An operation that mixes remote and real tensors raises an error, in
every hook, callback and thread. Operations on shapes are allowed. Writing to a remote tensor is
allowed too, because the rank that holds it does the same write. The checks do not slow down
operations on other tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_dlres.core._compat import torch_function_disabled
from lightning_dlres.core.errors import UnsupportedStepError

# Operations that need no check, because they take one tensor and read no values. They are the most
# frequent ones, since optimizers read the gradient of every parameter.
_UNCHECKED = frozenset(("__get__", "size", "dim", "numel", "requires_grad_", "detach"))

# Matches torch's errors about operations that need the values of a meta tensor.
_VALUES_NEEDED = re.compile("meta (tensor|device)")


class RemoteTensor(Tensor):
    """A buffer of another stage, or the result of an operation on a remote tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _checked(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.detach()
        copied: Tensor = memo[id(self)]
        return copied

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _not_saved(self)


class RemoteParameter(nn.Parameter):
    """A parameter of another stage. It has no gradient.

    `grad` and `is_meta` are class constants for speed: optimizers read them several times in every
    step, and torch's own attributes of a subclass are ten times as slow.
    """

    grad: Any = None
    is_meta = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _checked(func, args, kwargs or {})

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _not_saved(self)


class _HookedGradient:
    """A descriptor that replaces the constant `RemoteParameter.grad` and calls a hook when the
    gradient is read."""

    def __init__(self, hook: Callable[[], None]) -> None:
        self._hook = hook

    def __get__(self, instance: object, owner: type) -> None:
        self._hook()


def set_gradient_read_hook(hook: Callable[[], None] | None) -> None:
    """Call a function whenever the gradient of a remote parameter is read; None removes it."""
    RemoteParameter.grad = None if hook is None else _HookedGradient(hook)


def mark_remote(parameter: nn.Parameter) -> None:
    """Turn a parameter without storage into a `RemoteParameter`, unless its class is
    user-defined."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = RemoteParameter


def class_on_holder(parameter: nn.Parameter) -> type:
    """Return the class of the parameter on the rank that holds it."""
    return nn.Parameter if isinstance(parameter, RemoteParameter) else type(parameter)


def remote_buffer(buffer: Tensor) -> Tensor:
    """Return the buffer without storage, as a `RemoteTensor` unless its class is user-defined."""
    meta = buffer.detach().to("meta")
    return meta.as_subclass(RemoteTensor) if type(meta) is Tensor else meta


def _checked(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation that has a remote tensor among its arguments.

    Raises:
        UnsupportedStepError: If the operation needs the values of a remote tensor.
    """
    # Otherwise the calls below would enter `__torch_function__` again, in an endless recursion.
    with torch_function_disabled():
        name = getattr(function, "__name__", "?")
        if name in _UNCHECKED:
            return _as_remote(function(*args, **kwargs))
        if _mixes_meta_and_real((*args, *kwargs.values())):
            if not _only_writes(name, args):
                raise _no_values(name)
            # Torch refuses some writes of real values, such as `lerp_` and `data`.
            args = tuple(map(_without_values, args))
            kwargs = {key: _without_values(value) for key, value in kwargs.items()}
        try:
            result = function(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            # Torch refuses an operation that needs the values, with errors of several classes.
            if isinstance(error, NotImplementedError) or _VALUES_NEEDED.search(str(error)):
                raise _no_values(name) from error
            raise
        return _as_remote(result)


def _only_writes(name: str, args: tuple[Any, ...]) -> bool:
    """Return True if the operation only changes a remote tensor in place."""
    in_place = name == "__set__" or (name.endswith("_") and not name.endswith("__"))
    return in_place and bool(args) and isinstance(args[0], Tensor) and args[0].is_meta


def _mixes_meta_and_real(values: Iterable[Any]) -> bool:
    """Return True if there are both remote and real tensors among the values."""
    kinds = {tensor.is_meta for tensor in _tensors_in(values)}
    return len(kinds) == 2


def _tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _without_values(value: Any) -> Any:
    """Return an argument with its tensors on the meta device."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if type(value) in (list, tuple):
        return type(value)(map(_without_values, value))
    return value


def _as_remote(result: Any) -> Any:
    """Return the result with its meta tensors as `RemoteTensor`, so that they are checked too."""
    if type(result) is Tensor:
        return result.as_subclass(RemoteTensor) if result.is_meta else result
    if type(result) in (list, tuple):
        return type(result)(_as_remote(item) for item in result)
    return result


def _not_saved(tensor: Tensor) -> UnsupportedStepError:
    return UnsupportedStepError(
        f"A tensor of shape {tuple(tensor.shape)} must not be pickled or saved on this rank, since "
        "another stage holds its values. Call trainer.save_checkpoint on all ranks, or save the "
        "model after the run."
    )


def _no_values(operation: str) -> UnsupportedStepError:
    return UnsupportedStepError(
        f"{operation}: the operation needs the values of a weight or buffer that another stage "
        "holds. Each rank has the values of its own stage's layers only. Where a teacher averages "
        "a student, let all stages hold the student: self.shared = "
        "nn.ModuleList(self.student.children()). Code that only shows values may skip tensors with "
        "`.is_meta`. To average weights, use checkpoints after training."
    )
