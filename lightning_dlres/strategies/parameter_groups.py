"""Order of the parameters in the groups of optimizers, alike on all ranks.

Optimizer states of ranks, and those in checkpoints, are joined by position. User code that makes a
group from a set has another order in each process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.strategies.connection import Connection


def order_groups_alike(
    optimizers: Sequence[Optimizer],
    module: nn.Module,
    connection: Connection,
    *,
    may_differ: bool = False,
) -> None:
    """Order the parameters in all groups as rank 0 has them; called by all ranks.

    Args:
        optimizers: Optimizers of this rank.
        module: The model.
        connection: Connection to the other ranks.
        may_differ: True leaves groups that hold other parameters than on rank 0 as they are: each
            rank may update a part of the parameters.

    Raises:
        ConfigError: If groups hold other parameters than on rank 0, and may not.
    """
    names = dict(module.named_parameters())
    for optimizer in optimizers:
        groups = connection.broadcast(names_in_groups(optimizer, names), 0)
        order_as(optimizer, names, groups, may_differ=may_differ)


def order_as(
    optimizer: Optimizer,
    names: Mapping[str, nn.Parameter],
    groups: Sequence[Sequence[str]],
    *,
    may_differ: bool = False,
) -> None:
    """Order the parameters in the optimizer's groups as another rank has them.

    Args:
        optimizer: Optimizer of this rank.
        names: The model's parameters by name.
        groups: Result of `names_in_groups` on the other rank.
        may_differ: See `order_groups_alike`.

    Raises:
        ConfigError: If the groups do not hold the same parameters.
    """
    own = names_in_groups(optimizer, names)
    if [sorted(group) for group in own] != [sorted(group) for group in groups]:
        if may_differ:
            return
        raise ConfigError(
            f"The parameter groups of {type(optimizer).__name__} must be the same on all ranks, "
            "got others than on rank 0. Make them without a condition on the rank, and without "
            "random numbers."
        )
    for group, before, order in zip(optimizer.param_groups, own, groups, strict=True):
        places = [before.index(name) for name in order]
        # Optimizers that got `named_parameters` keep the names beside the parameters.
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [group[key][place] for place in places]


def names_in_groups(optimizer: Optimizer, names: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the names of the parameters in each of an optimizer's groups.

    Those that are not the model's are numbered.
    """
    name_of = {parameter: name for name, parameter in names.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name_of.setdefault(parameter, f"unnamed parameter {len(name_of)}")
    return [[name_of[p] for p in group["params"]] for group in optimizer.param_groups]
