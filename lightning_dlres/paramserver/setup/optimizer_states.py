"""Optimizer state of a checkpoint: torch's own form, cut into the keys of servers and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dlres.paramserver.setup.model_keys import ModelKeys


def states_by_key(keys: ModelKeys, optimizers: list[Optimizer]) -> dict[int, dict[str, Any]]:
    """Return the state of each key, from optimizers that have loaded a checkpoint."""
    states: dict[int, dict[str, Any]] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            assert isinstance(parameter, nn.Parameter)
            for key in keys.by_parameter.get(parameter, ()):
                states[key.index] = {
                    name: _part(value, parameter.shape, key.start, key.count, key.shape)
                    for name, value in state.items()
                }
    return states


def _part(
    value: Any, parameter_shape: torch.Size, start: int, count: int, shape: tuple[int, ...]
) -> Any:
    """Return a key's part of a state with one value per element; return any other state whole."""
    if not isinstance(value, Tensor) or value.shape != parameter_shape or not parameter_shape:
        return value
    return value.reshape(-1)[start : start + count].view(shape)


def fill_state(
    keys: ModelKeys, optimizer: Optimizer, by_key: Mapping[int, Mapping[str, Any]]
) -> None:
    """Put the states of keys into an optimizer."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parts = [by_key[key.index] for key in keys.by_parameter[parameter]]
            if not parts[0]:
                continue
            shapes = [key.shape for key in keys.by_parameter[parameter]]
            optimizer.state[parameter] = {
                name: _joined([part[name] for part in parts], shapes, parameter)
                for name in parts[0]
            }


def _joined(values: list[Any], shapes: list[tuple[int, ...]], parameter: Tensor) -> Any:
    """Return a parameter's state, joined from the states of its keys.

    A state without one value per element, such as the number of steps, is equal in all keys.
    """
    first = values[0]
    if not isinstance(first, Tensor) or len(values) == 1:
        return first
    if any(tuple(v.shape) != shape for v, shape in zip(values, shapes, strict=True)):
        return first
    return torch.cat(values).view(parameter.shape)
