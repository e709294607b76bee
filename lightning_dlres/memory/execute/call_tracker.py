"""Tracker of the modules that each thread is calling.

`copy.copy` of a patched module shares the patched forward, which holds the original module. The
tracker lets the forward find the copy, so that the copy computes with its own weights: when a
forward begins, the innermost call is its own. A direct call of `forward` is not tracked, and
computes with the weights of the original. So each forward takes the call that it belongs to:
otherwise a direct call inside of it would find the same call. Nor are calls tracked in code that
torch.compile traces: it cannot trace the record of calls that are under way outside of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


@dataclass(eq=False)
class _Call:
    """Call of a module that has not returned.

    Attributes:
        module: The module.
        is_taken: Whether its patched forward has begun.
    """

    module: nn.Module
    is_taken: bool = False


class CallTracker:
    """Tracker of the modules that each thread is calling."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Context manager that tracks module calls."""
        # A forward pre-hook of a module may call other modules before the module's forward begins,
        # so calls must be removed when they end, also by an exception.
        handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _calls(self) -> list[_Call]:
        """Return the calls of this thread, the innermost last."""
        calls: list[_Call] = vars(self._local).setdefault("calls", [])
        return calls

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._calls().append(_Call(module))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._calls()
        # The call of this module began before the tracking did if it is not among them.
        if any(call.module is module for call in calls):
            # Calls above it ended without their hook, by an exception that is no `Exception`.
            while calls.pop().module is not module:
                pass

    def copy_of(self, module: nn.Module, forward: Any) -> nn.Module | None:
        """Return the innermost module that this thread is calling, if it is a copy of `module`;
        else None.

        Called once when a forward begins. For the same call, it then returns None.

        Args:
            module: Original module.
            forward: Patched forward of the original, which its copies share.
        """
        if torch.compiler.is_compiling():
            return None
        calls = self._calls()
        if not calls or calls[-1].is_taken or vars(calls[-1].module).get("forward") is not forward:
            return None
        calls[-1].is_taken = True
        called = calls[-1].module
        return None if called is module else called

    def __reduce__(self) -> tuple[type[CallTracker], tuple[()]]:
        # Thread-local state cannot be pickled; an unpickled module starts with a new tracker.
        return CallTracker, ()
