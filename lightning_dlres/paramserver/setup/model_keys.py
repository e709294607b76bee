"""Keys of a model: parts of its parameters, in the order of their definition."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn
from torch.optim import Optimizer

from lightning_dlres.core._compat import StorageReference, storage_reference
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.mirror.profile.history import is_per_parameter
from lightning_dlres.paramserver.execute.server.optimizers import (
    check_optimizer,
    group_options,
    optimizer_name,
)
from lightning_dlres.paramserver.plan.keys import Key, ParameterInfo, make_keys
from lightning_dlres.paramserver.protocol import OptimizerSetup


@dataclass(frozen=True)
class ModelKeys:
    """Keys of a model.

    Attributes:
        keys: All keys.
        parameters: Parameters that have keys, by name.
        by_parameter: Keys of each parameter.
        groups: Optimizer and group of each parameter at the start, as indices.
        setups: Optimizers, as servers make them.
    """

    keys: tuple[Key, ...]
    parameters: Mapping[str, nn.Parameter]
    by_parameter: Mapping[nn.Parameter, tuple[Key, ...]]
    groups: Mapping[nn.Parameter, tuple[int, int]]
    setups: tuple[OptimizerSetup, ...]

    def places(self, optimizers: Sequence[Optimizer]) -> dict[nn.Parameter, tuple[int, int]]:
        """Return the present optimizer and group of each parameter, as indices.

        Raises:
            ConfigError: If an optimizer has gained parameters since the keys were made, where the
                message says how many, or has one in two groups.
        """
        listed = [
            (parameter, (index, number))
            for index, optimizer in enumerate(optimizers)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        ]
        places = dict(listed)
        if len(places) < len(listed):
            raise ConfigError(
                "each parameter must be in one group of one optimizer for a parameter server, got "
                f"{len(listed) - len(places)} in two. Remove it from the other group."
            )
        new = sum(
            p not in self.groups or self.groups[p][0] != index for p, (index, _) in places.items()
        )
        if new:
            raise ConfigError(
                f"the optimizer must keep its parameters with a parameter server, got {new} "
                "new ones. Give it all parameters in configure_optimizers, and freeze those of "
                "later epochs with requires_grad=False."
            )
        return places


def keys_of(
    model: nn.Module, optimizers: Sequence[Optimizer], servers: int, key_bytes: int
) -> ModelKeys:
    """Return the keys of a model's optimized parameters.

    Args:
        model: The model.
        optimizers: Its optimizers, without Lightning's wrappers.
        servers: Number of servers.
        key_bytes: Largest number of bytes of a key, where its parameter is divisible.

    Raises:
        ConfigError: If servers cannot make an optimizer, or cannot update a parameter.
    """
    groups: dict[nn.Parameter, tuple[int, int]] = {}
    for index, optimizer in enumerate(optimizers):
        check_optimizer(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter in groups:
                    raise ConfigError(
                        "each parameter must be in one optimizer for a parameter server, got one "
                        f"of {tuple(parameter.shape)} in two. Use one optimizer."
                    )
                groups[parameter] = (index, number)
    parameters = {name: p for name, p in model.named_parameters() if p in groups}
    _check_parameters(parameters, groups)
    infos = [
        ParameterInfo(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            itemsize=parameter.element_size(),
            optimizer=groups[parameter][0],
            group=groups[parameter][1],
            is_divisible=is_per_parameter(optimizers[groups[parameter][0]]),
        )
        for name, parameter in parameters.items()
    ]
    keys = make_keys(infos, servers, key_bytes)
    by_name: dict[str, list[Key]] = {}
    for key in keys:
        by_name.setdefault(key.name, []).append(key)
    return ModelKeys(
        keys=keys,
        parameters=parameters,
        by_parameter={p: tuple(by_name[name]) for name, p in parameters.items()},
        groups=groups,
        setups=tuple(map(_setup, optimizers)),
    )


def _setup(optimizer: Optimizer) -> OptimizerSetup:
    options = [group_options(optimizer, index) for index in range(len(optimizer.param_groups))]
    return OptimizerSetup(name=optimizer_name(type(optimizer)), groups=options)


def _check_parameters(
    parameters: Mapping[str, nn.Parameter], groups: Mapping[nn.Parameter, tuple[int, int]]
) -> None:
    if len(parameters) < len(groups):
        raise ConfigError(
            "with a parameter server, all parameters of the optimizers must be in the "
            f"LightningModule, got {len(groups) - len(parameters)} others. Register them in it."
        )
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            fix = (
                "Use a real parameter with a last dimension of 2, and torch.view_as_complex of it."
                if parameter.is_complex()
                else "Register it as a buffer."
            )
            raise ConfigError(
                f"parameters must have a floating-point dtype for a parameter server, got {name} "
                f"of {parameter.dtype}. {fix}"
            )
    require_separate(parameters)


def require_separate(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise if two parameters that are trained have elements in the same memory.

    Servers would hold two values of such an element.

    Raises:
        ConfigError: If they have.
    """
    by_storage: dict[StorageReference, list[str]] = {}
    for name, parameter in parameters.items():
        if parameter.numel() and parameter.requires_grad:
            by_storage.setdefault(storage_reference(parameter), []).append(name)
    for names in by_storage.values():
        # In most models no parameter begins before the one before it has ended.
        names.sort(key=lambda name: _extent(parameters[name]))
        for first, second in itertools.pairwise(names):
            if _extent(parameters[second])[0] < _extent(parameters[first])[1]:
                _require_no_overlap({name: parameters[name] for name in names})
                break


def _extent(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the first byte of a parameter in its storage, and the one after its last."""
    first, size = int(parameter.storage_offset()), parameter.element_size()
    last = sum(int(s) * (n - 1) for s, n in zip(parameter.stride(), parameter.shape, strict=True))
    return first * size, (first + last + 1) * size


def _require_no_overlap(parameters: Mapping[str, nn.Parameter]) -> None:
    names, owners = list(parameters), np.zeros(_end(parameters), np.uint32)
    for number, parameter in enumerate(parameters.values(), 1):
        size = parameter.element_size()
        # By byte of the storage: number of the parameter there, from 1 on.
        own = np.lib.stride_tricks.as_strided(
            owners[parameter.storage_offset() * size :],
            (*parameter.shape, size),
            (*(4 * size * stride for stride in parameter.stride()), 4),
        )
        if own.any():
            raise ConfigError(
                "parameters must have memory of their own for a parameter server, got "
                f"{names[int(own.max()) - 1]} and {names[number - 1]} in the same memory. Register "
                "one Parameter in both places to tie them."
            )
        own[...] = number


def _end(parameters: Mapping[str, nn.Parameter]) -> int:
    return max(_extent(parameter)[1] for parameter in parameters.values())
