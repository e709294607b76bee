"""Parameters and buffers that another stage holds, and what user code may do with them here.

They have no storage (they are on the meta device). On the CPU torch does not refuse to mix them
with real tensors: a product or a sum with one is uninitialised memory. So they are of a class that
looks at every operation: whatever mixes the two is an error, in every hook, callback and thread.
What asks for shapes, and writing into such a tensor (its holder does the same), is fine. Tensors of
other classes cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lightning_dlres.core._compat import without_subclasses
from lightning_dlres.core.errors import UnsupportedStepError

# Of one tensor only; most frequent, since optimizers ask every parameter for its gradient.
_CANNOT_MIX = frozenset(("__get__", "size", "dim", "numel", "requires_grad_", "detach"))

_ASKED_FOR_VALUES = re.compile("meta (tensor|device)")


class ForeignTensor(Tensor):
    """A buffer of another stage, or what was made of a remote tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _checked(func, args, kwargs or {})


class ForeignParameter(nn.Parameter):
    """A parameter of another stage. It has no gradient, which optimizers ask for several times in
    every step: constants are ten times as fast as torch's own attributes would be here."""

    grad: Any = None
    is_meta = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _checked(func, args, kwargs or {})


class _NoticedGradient:
    """Takes the place of the constant that is a remote parameter's gradient, and tells that it is
    read."""

    def __init__(self, notice: Callable[[], None]) -> None:
        self._notice = notice

    def __get__(self, instance: object, owner: type) -> None:
        self._notice()


def notice_gradient_reads(notice: Callable[[], None] | None) -> None:
    """Have a function called when a remote parameter's gradient is read; None: have none."""
    ForeignParameter.grad = None if notice is None else _NoticedGradient(notice)


def mark_remote(parameter: nn.Parameter) -> None:
    """Make a parameter without storage a remote one; a class of the user's own stays."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ForeignParameter


def class_of_own(parameter: nn.Parameter) -> type:
    """Return the class that the parameter has where it is held."""
    return nn.Parameter if isinstance(parameter, ForeignParameter) else type(parameter)


def remote_buffer(buffer: Tensor) -> Tensor:
    """Return a buffer without storage that is watched."""
    meta = buffer.detach().to("meta")
    return meta.as_subclass(ForeignTensor) if type(meta) is Tensor else meta


def _checked(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with without_subclasses():
        name = getattr(function, "__name__", "?")
        if name in _CANNOT_MIX:
            return _watched(function(*args, **kwargs))
        if not _only_writes(name, args) and _mixes((*args, *kwargs.values())):
            raise _refusal(name)
        try:
            result = function(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            # Torch itself refuses what asks for values, with errors of several classes.
            if isinstance(error, NotImplementedError) or _ASKED_FOR_VALUES.search(str(error)):
                raise _refusal(name) from error
            raise
        return _watched(result)


def _only_writes(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the operation changes nothing but a remote tensor."""
    in_place = name == "__set__" or (name.endswith("_") and not name.endswith("__"))
    return in_place and bool(args) and isinstance(args[0], Tensor) and args[0].is_meta


def _mixes(values: Iterable[Any]) -> bool:
    places = {tensor.is_meta for tensor in _tensors_in(values)}
    return len(places) == 2


def _tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _watched(result: Any) -> Any:
    if type(result) is Tensor:
        return result.as_subclass(ForeignTensor) if result.is_meta else result
    if type(result) in (list, tuple):
        return type(result)(_watched(item) for item in result)
    return result


def _refusal(name: str) -> UnsupportedStepError:
    return UnsupportedStepError(
        f"{name}: computes with a weight or buffer that another stage holds; it has no values "
        "here. Each rank holds its own stage's layers: leave out tensors with `.is_meta`, or give "
        "a layer a second name in the LightningModule, so that all stages hold it. Averages of "
        "the weights can be made of checkpoints after training."
    )
