"""Replacement of the forwards of modules, so that user code's calls of them get another result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree


@contextmanager
def forwards_replaced(
    path: str,
    modules: Sequence[nn.Module],
    attribute: str,
    forwards: Sequence[Callable[..., Tree]],
) -> Iterator[None]:
    """Context manager in which modules have other forwards. Uses may be nested.

    Args:
        path: Name of the pipelined module, for messages.
        modules: The modules.
        attribute: Name of the method that is replaced.
        forwards: A function for each module.
    """
    saved = [module.__dict__.get(attribute) for module in modules]
    for module, forward, current in zip(modules, forwards, saved, strict=True):
        module.__dict__[attribute] = _ForwardReplacement(path, forward, user_forward_in(current))
    try:
        yield
    finally:
        _set_forward(modules, attribute, saved)


class _ForwardReplacement:
    """Replacement for a module's forward, in the module's `__dict__`.

    A deep copy of the module does not get a copy of the replacement, which would run the original
    module. It gets a function that refuses the call.

    Attributes:
        user_forward: The function that user code had put in this place; None without one.
    """

    def __init__(self, path: str, forward: Callable[..., Tree], user_forward: Any) -> None:
        self._path, self._forward, self.user_forward = path, forward, user_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., Tree]:
        path = self._path

        def refuse(*args: Any, **kwargs: Any) -> Tree:
            raise UnsupportedStepError(
                f"A copy of {path!r}, the pipelined module, must be made before the run, got a "
                "call of a copy that was made during the run: it has the weights of one stage "
                "only. Make copies in the LightningModule's constructor."
            )

        return refuse


def user_forward_in(value: Any) -> Any:
    """Return the user's own function in a module's `__dict__`, below any replacement."""
    return value.user_forward if isinstance(value, _ForwardReplacement) else value


@contextmanager
def original_forward(modules: Sequence[nn.Module], attribute: str) -> Iterator[None]:
    """Context manager in which modules have their original forward, so that their layers can
    run."""
    current = [module.__dict__.get(attribute) for module in modules]
    _set_forward(modules, attribute, list(map(user_forward_in, current)))
    try:
        yield
    finally:
        _set_forward(modules, attribute, current)


def _set_forward(modules: Sequence[nn.Module], attribute: str, values: Sequence[Any]) -> None:
    """Set an attribute in the `__dict__` of each module; None removes it."""
    for module, value in zip(modules, values, strict=True):
        module.__dict__.pop(attribute, None)
        if value is not None:
            module.__dict__[attribute] = value
