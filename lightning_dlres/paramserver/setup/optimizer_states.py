"""Optimizer state of a checkpoint: torch's own form, cut into the keys of servers and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dlres.mirror.execute.region import new_tensor
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
    keys: ModelKeys,
    optimizer: Optimizer,
    fetch: Callable[[Iterable[int]], Iterator[Mapping[str, Any]]],
    directory: Path | None = None,
) -> None:
    """Put the states of keys into an optimizer.

    Args:
        keys: Keys of the model.
        optimizer: The optimizer, whose state is replaced.
        fetch: Yields the states of keys, whose indices it gets, one after the other.
        directory: Directory of files for states with one value per element of a parameter; None
            for memory.
    """
    # Its class may refuse `clear`, which is for other code.
    dict.clear(optimizer.state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = fetch(key.index for p in parameters for key in keys.by_parameter[p])
    for parameter in parameters:
        state: dict[str, Any] = {}
        for key in keys.by_parameter[parameter]:
            for name, part in next(states).items():
                if not isinstance(part, Tensor) or tuple(part.shape) != key.shape:
                    # Without one value per element, such as the number of steps, a state is equal
                    # in all keys.
                    state.setdefault(name, part)
                    continue
                if name not in state:
                    like = torch.empty(parameter.shape, dtype=part.dtype, device="meta")
                    state[name] = new_tensor(like, directory)
                state[name].view(-1)[key.start : key.start + key.count] = part.view(-1)
        if state:
            optimizer.state[parameter] = state
