"""Hooks on the calls of modules that own parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

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

    # Functions, and not methods: a copy of a model would copy the object of a method, too.
    def enter(module: nn.Module, args: Any) -> None:
        # A copy of the model has these hooks, but its modules own other parameters.
        for unit in needed.get(module, ()):
            streaming.enter(unit)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        for unit in reversed(needed.get(module, ())):
            streaming.leave(unit)

    handles = []
    for module in needed:
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    return handles
