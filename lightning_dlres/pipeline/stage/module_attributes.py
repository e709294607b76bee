"""Attributes of modules: those that libraries manage, comparison by identity, and copies."""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_dlres.core.wire.nested import tensors_in

# Attribute with which transformers notes that the hooks for `output_hidden_states` are on a model's
# modules. The first call that needs them adds them for good, also a call that is undone.
HAS_COLLECTORS = "_output_capturing_hooks_installed"
# Attributes that torch manages in every module, and that one. Another one of them is `training`:
# steps may change it.
MANAGED_ATTRIBUTES = frozenset(vars(nn.Module())) | {HAS_COLLECTORS}


def are_identical(a: Collection[Any], b: Collection[Any]) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def copy_of_module(module: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
    """Return a deep copy of a module, with its hooks.

    A hook may refer to objects that refuse to be copied, such as the records of torch's profiler.
    The copy then has the hook itself.

    Args:
        module: The module.
        memo: What stands in place of copies, by the id of the original.
    """
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:
        dicts = chain.from_iterable(map(hook_dicts, module.modules()))
        hooks = [hook for hooks in dicts for hook in hooks.values()]
        # A hook that is a method of the module would copy the other hooks, too.
        known = {**memo, **{id(inner): inner for inner in module.modules()}}
        refusing = {id(hook): hook for hook in hooks if not _can_be_copied(hook, known)}
        if not refusing:
            raise
    return copy.deepcopy(module, {**memo, **refusing})


def hook_dicts(module: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts in which a module keeps its hooks of each kind."""
    return [
        hooks
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and isinstance(hooks, dict)
    ]


def _can_be_copied(value: Any, memo: Mapping[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def copies_of_results(module: nn.Module) -> dict[int, Tensor]:
    """Return copies of the tensors in a module's attributes that autograd has computed.

    `copy.deepcopy` refuses such tensors, but takes the result as its memo. An example is the weight
    of `torch.nn.utils.weight_norm`, computed anew in every forward.

    Args:
        module: The module; its submodules count, too.

    Returns:
        A detached copy of each tensor, by the tensor's id.
    """
    return {
        id(tensor): tensor.detach().clone()
        for inner in module.modules()
        for tensor in tensors_in(vars(inner))
        if not tensor.is_leaf
    }
