"""Strategy of a run that leaves the parameters in host memory, and moves all else to its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

_HOST = torch.device("cpu")


@contextmanager
def parameters_on_host(strategy: SingleDeviceStrategy) -> Iterator[None]:
    """Context manager in which a strategy keeps parameters and optimizer states in host memory.

    `configure_model` makes its tensors there. Buffers, metrics and batches go to the device, as
    always.
    """

    @contextmanager
    def tensor_init_context(empty_init: bool | None = None) -> Iterator[None]:
        with make_tensors(empty_init), _HOST:
            yield

    def model_to_device() -> None:
        assert strategy.model is not None
        move_all_but_parameters(strategy.model, strategy.root_device)

    def load_optimizer_state_dict(checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(
            strategy.optimizers, checkpoint["optimizer_states"], strict=True
        ):
            optimizer.load_state_dict(state)

    make_tensors = strategy.tensor_init_context
    replaced: dict[str, Callable[..., Any]] = {
        "tensor_init_context": tensor_init_context,
        "model_to_device": model_to_device,
        "load_optimizer_state_dict": load_optimizer_state_dict,
    }
    for name, function in replaced.items():
        setattr(strategy, name, function)
    try:
        yield
    finally:
        for name in replaced:
            delattr(strategy, name)


def move_all_but_parameters(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, and its parameters to the CPU.

    Its parameters have no elements while it moves: `Module.to` moves all tensors of a module.
    """
    # The mirror refuses all other parameters.
    kept = {
        parameter: (parameter.data.cpu(), parameter.grad)
        for parameter in module.parameters()
        if type(parameter) is nn.Parameter and not parameter.is_meta
    }
    for parameter in kept:
        parameter.grad = None
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    try:
        module.to(device)
    finally:
        for parameter, (data, gradient) in kept.items():
            parameter.data = data
            parameter.grad = None if gradient is None else gradient.cpu()
