"""Tracker of the module that each thread called last.

`copy.copy` of a patched module shares the patched forward, which holds the original module. The
tracker lets the forward find the copy, so that the copy computes with its own weights: when a
forward begins, the module called last is its own. A direct call of `forward` is not tracked, and
computes with the weights of the original. So each forward removes the call that it belongs to:
otherwise a later direct call would find it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class CallTracker:
    """Tracker of the module that each thread called last."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Context manager that tracks module calls."""
        handle = register_module_forward_pre_hook(self._record)
        try:
            yield
        finally:
            handle.remove()

    def _record(self, module: nn.Module, args: Any) -> None:
        self._local.last_module = module

    def copy_of(self, module: nn.Module, forward: Any) -> nn.Module | None:
        """Return the module that this thread called last, if it is a copy of `module`; else None.

        Called once when a forward begins. Until the next call of a module, it then returns None.

        Args:
            module: Original module.
            forward: Patched forward of the original, which its copies share.
        """
        called: nn.Module | None = vars(self._local).pop("last_module", None)
        if called is None or called is module or vars(called).get("forward") is not forward:
            return None
        return called

    def __reduce__(self) -> tuple[type[CallTracker], tuple[()]]:
        # Thread-local state cannot be pickled; an unpickled module starts with a new tracker.
        return CallTracker, ()
