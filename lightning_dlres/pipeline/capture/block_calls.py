"""Calls of blocks, which a run of a module's forward replaces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_dlres.core._compat import CALL


@contextmanager
def calls_replaced(
    blocks: Mapping[int, nn.Module], call: Callable[[int, nn.Module, Any, Any], Any]
) -> Iterator[None]:
    """Context manager in which calls of blocks become `call(index, block, args, kwargs)`.

    Args:
        blocks: Blocks by index.
        call: Function that may call `original_call` for the block's own call.
    """
    saved = {index: block.__dict__.get(CALL) for index, block in blocks.items()}

    def forward_of(index: int, block: nn.Module) -> Callable[..., Any]:
        return lambda *args, **kwargs: call(index, block, args, kwargs)

    for index, block in blocks.items():
        block.__dict__[CALL] = forward_of(index, block)
    try:
        yield
    finally:
        for index, block in blocks.items():
            block.__dict__.pop(CALL, None)
            if saved[index] is not None:
                block.__dict__[CALL] = saved[index]


def original_call(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a block itself, with its hooks, even inside of `calls_replaced`."""
    replacement = block.__dict__.pop(CALL, None)
    try:
        return block(*args, **kwargs)
    finally:
        if replacement is not None:
            block.__dict__[CALL] = replacement


def checkpointed_call(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a block as `original_call` does, inside of an activation checkpoint of `forward`.

    That one would run the block again with the random numbers that were there before the layer's
    seed. So the block gets a checkpoint of its own, inside of which the other one keeps nothing.
    """
    if type(block).__call__ is not nn.Module.__call__:
        # The block's class makes the checkpoint, and does so again in this call.
        return original_call(block, args, kwargs)
    return checkpoint(original_call, block, args, kwargs, use_reentrant=False)


def checkpoint_around(top: CodeType) -> str:
    """Return the kind of activation checkpoint around the caller's caller.

    Args:
        top: Code of the function in which the search ends.

    Returns:
        "reentrant", "non-reentrant", or "" for none.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not top:
        code, frame = frame.f_code, frame.f_back  # type: ignore[assignment]
        if code is CheckpointFunction.forward.__code__:
            return "reentrant"
        if code.co_filename == torch.utils.checkpoint.__file__ and code.co_name == "checkpoint":
            return "non-reentrant"
    return ""
