"""Hooks on the calls of modules that own parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_dlres.core.untraced import untraced
from lightning_dlres.mirror.execute.streaming import ParameterStreaming


def hook_modules(
    needed: Mapping[nn.Module, tuple[int, ...]], streaming: ParameterStreaming
) -> list[RemovableHandle]:
    """Bring the units that a module needs to the device around each of its calls.

    Args:
        needed: Units by module.
        streaming: Streaming of the parameters.

    Returns:
        Handles that remove the hooks.
    """

    def enter(module: nn.Module, args: Any) -> None:
        # A shallow copy of a module has these hooks, too, but the call is not one of the model's.
        if module in needed:
            streaming.open_call()
            for unit in needed[module]:
                streaming.enter(unit)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module in needed:
            streaming.close_call()
            for unit in reversed(needed[module]):
                streaming.leave(unit)

    before, after = _Hook(enter), _Hook(leave)
    handles = []
    for module in needed:
        handles.append(module.register_forward_pre_hook(before, prepend=True))
        handles.append(module.register_forward_hook(after, always_call=True))
    return handles


class _Hook:
    """Hook that copies of a model and pickled models leave behind.

    Their modules own other parameters. The function would keep the model and its mirror alive.

    Args:
        function: Function to call.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    @untraced
    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    pass
