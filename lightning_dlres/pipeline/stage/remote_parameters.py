"""Remote parameters and buffers: those that another stage holds.

They have no storage: they are on the meta device. On the CPU torch does not refuse to mix meta
tensors with real ones: a product or a sum of the two is uninitialised memory. So remote tensors are
of a class that checks every operation on them. An operation that mixes the two is an error, in
every hook, callback and thread. Operations on shapes are allowed, and so is writing to a remote
tensor, as the rank that holds it does the same. Tensors of other classes cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lightning_dlres.core._compat import without_subclasses
from lightning_dlres.core.errors import UnsupportedStepError

# Operations on one tensor. They are the most frequent ones, since optimizers read the gradient of
# every parameter; skipping the check for them saves time.
_UNARY = frozenset(("__get__", "size", "dim", "numel", "requires_grad_", "detach"))

# Matches torch's errors about operations that need the values of a meta tensor.
_VALUES_NEEDED = re.compile("meta (tensor|device)")


class RemoteTensor(Tensor):
    """A buffer of another stage, or the result of an operation on a remote tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _checked(func, args, kwargs or {})


class RemoteParameter(nn.Parameter):
    """A parameter of another stage. It has no gradient.

    Optimizers read `grad` and `is_meta` several times in every step. Constants in the class are ten
    times as fast as torch's own attributes are in a subclass.
    """

    grad: Any = None
    is_meta = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _checked(func, args, kwargs or {})


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
    """Turn a parameter without storage into a `RemoteParameter`; user-defined classes stay."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = RemoteParameter


def local_class(parameter: nn.Parameter) -> type:
    """Return the class of the parameter on the rank that holds it."""
    return nn.Parameter if isinstance(parameter, RemoteParameter) else type(parameter)


def remote_buffer(buffer: Tensor) -> Tensor:
    """Return the buffer without storage, as a `RemoteTensor`; user-defined classes stay."""
    meta = buffer.detach().to("meta")
    return meta.as_subclass(RemoteTensor) if type(meta) is Tensor else meta


def _checked(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation.

    Raises:
        UnsupportedStepError: If the operation needs the values of a remote tensor.
    """
    # Without this the calls below would come back to __torch_function__.
    with without_subclasses():
        name = getattr(function, "__name__", "?")
        if name in _UNARY:
            return _as_remote(function(*args, **kwargs))
        if not _only_writes(name, args) and _mixes((*args, *kwargs.values())):
            raise _no_values(name)
        try:
            result = function(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            # Torch refuses an operation that needs the values, with errors of several classes.
            if isinstance(error, NotImplementedError) or _VALUES_NEEDED.search(str(error)):
                raise _no_values(name) from error
            raise
        return _as_remote(result)


def _only_writes(name: str, args: tuple[Any, ...]) -> bool:
    """Return True if the operation does nothing but change a remote tensor in place."""
    in_place = name == "__set__" or (name.endswith("_") and not name.endswith("__"))
    return in_place and bool(args) and isinstance(args[0], Tensor) and args[0].is_meta


def _mixes(values: Iterable[Any]) -> bool:
    """Return True if there are both remote and real tensors among the values."""
    kinds = {tensor.is_meta for tensor in _tensors_in(values)}
    return len(kinds) == 2


def _tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _as_remote(result: Any) -> Any:
    """Return the result with its meta tensors as `RemoteTensor`, so that they are checked too."""
    if type(result) is Tensor:
        return result.as_subclass(RemoteTensor) if result.is_meta else result
    if type(result) in (list, tuple):
        return type(result)(_as_remote(item) for item in result)
    return result


def _no_values(operation: str) -> UnsupportedStepError:
    return UnsupportedStepError(
        f"{operation}: the operation needs the values of a weight or buffer that another stage "
        "holds. Each rank has the values of its own stage's layers only. Leave out tensors with "
        "`.is_meta`, or give a layer a second name in the LightningModule, so that all stages "
        "hold it. Averages of the weights can be made from checkpoints after training."
    )
