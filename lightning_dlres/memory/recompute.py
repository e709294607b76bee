"""Modules that run again in backward, in the place of what they would save.

torch's checkpoint does it; here it is put around a module's forward and taken off again, so that
its class, its state dict's keys and its hooks stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Again:
    """The forward of a module that may run again. A copy of the module, or an unpickled one, has
    one of its own.

    Args:
        module: whose forward it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # A forward that somebody else has put there before.
        self.before = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.before or partial(type(self.module).forward, self.module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)


@contextmanager
def running_again(root: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Inside of it, the named modules below a root run again in backward."""
    modules = [root.get_submodule(name) for name in names]
    installed = []
    for module in modules:
        again = Again(module)
        module.forward = again
        installed.append((module, again))
    try:
        yield
    finally:
        for module, again in reversed(installed):
            if module.__dict__.get("forward") is again:
                if again.before is None:
                    del module.forward
                else:
                    module.forward = again.before
