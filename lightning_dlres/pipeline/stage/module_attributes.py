"""Attributes of modules: those that torch manages, comparison by identity, and copies."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from lightning_dlres.core.wire.nested import tensors_in

# Attributes that torch manages in every module. One of them is `training`: steps may change it.
TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


def are_identical(a: Collection[Any], b: Collection[Any]) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


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
