"""Calls of blocks, which a run of a module's forward replaces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_dlres.core._compat import CALL, forward_hooks, storage_key
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.nested import tensors_in
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.pipeline.deferred.values import has_deferred
from lightning_dlres.pipeline.stage.initialise import initialised_copy

# Modules whose forward hooks only keep arguments and outputs, for the code that calls the blocks.
# transformers has such hooks for `output_hidden_states`. Hooks of users may do anything, so they
# run with a block's own call only.
_COLLECTORS = ("transformers.utils.output_capturing",)


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


def call_collectors(block: nn.Module, args: Any, output: Any) -> None:
    """Call a block's hooks that hand its tensors to the code around it, as the block's call does.

    Call this where the block does not run, with placeholders: that code runs there, too.
    """
    for hook in _collectors(block):
        hook(block, args, output)


def has_collectors(block: nn.Module) -> bool:
    """Return whether a block has hooks that `call_collectors` calls."""
    return bool(_collectors(block))


def _collectors(block: nn.Module) -> list[Callable[..., Any]]:
    hooks = forward_hooks(block)
    return [hook for hook in hooks if getattr(hook, "__module__", "") in _COLLECTORS]


def with_values(block: nn.Module, arguments: Any) -> nn.Module:
    """Return a block, or a copy of it with values if it is deferred.

    Args:
        block: The block; its call may be replaced.
        arguments: Its arguments, whose device is that of the values.
    """
    if not has_deferred(block):
        return block
    device = next((t.device for t in tensors_in(arguments)), torch.device("cpu"))
    replacement = block.__dict__.pop(CALL, None)
    try:
        return initialised_copy(block, device)
    finally:
        if replacement is not None:
            block.__dict__[CALL] = replacement


def without_graphs(output: Tree, args: Any, kwargs: Any) -> Tree:
    """Return the output of a copy without its graphs, which would keep the copy's values.

    A tensor that shares memory with an argument stays as it is.
    """
    storages = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}

    def alone(tensor: Tensor) -> Tensor:
        return tensor if storage_key(tensor) in storages else without_graph(tensor)

    try:
        return map_tensors(alone, output)
    except ConfigError:
        # The block cannot be a layer, as its caller finds out.
        return output


def without_graph(tensor: Tensor) -> Tensor:
    """Return a copy that has no graph before it, and may be changed in place."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


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
