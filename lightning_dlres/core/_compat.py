"""Private names of torch that the lower rooms cannot do without, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def hooks_suspended(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep hooks on parameters from firing meanwhile.

    A hook expects the gradient of the whole batch, once. `torch.autograd.grad` would call it for
    the part of every micro-batch, and there is no public way to leave hooks out.
    """
    saved = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for hooks, _ in saved:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in saved:
            hooks.update(entries)


def copy_hooks(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give a parameter the gradient hooks of another; torch has no public way to list them."""
    # The very same tables, so that a handle from before can still remove its hook.
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks
