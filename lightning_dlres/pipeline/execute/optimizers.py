"""Is every parameter's update its own affair? Only then can each stage step its own parameters.

An optimizer that computes one number over all parameters (LBFGS, D-Adaptation, Prodigy) would
compute another one on every stage. A small trial tells, for optimizers of any origin: two
parameters stepped together must move as each does alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.rng import forked
from lightning_dlres.pipeline.profile.optimizer_trials import NeedsClosure, stepped, trial_options


def require_separable(optimizer: Optimizer) -> None:
    """Raise unless the optimizer treats parameters one by one.

    Raises:
        ConfigError: it does not.
    """
    kind: Any = type(optimizer)
    try:
        with forked(torch.device("cpu")):
            separable = all(_is_separable(kind, options) for options in trial_options(optimizer))
    except NeedsClosure:
        raise ConfigError(
            f"{kind.__name__} needs a closure in every step, because it evaluates the loss over "
            "all parameters at once; a stage has only its own. Use an optimizer that treats "
            "parameters one by one, such as AdamW or SGD."
        ) from None
    except Exception as error:
        warnings.warn(
            f"Could not find out whether {kind.__name__} treats parameters one by one "
            f"({type(error).__name__}: {error}). If it computes anything over all parameters, "
            "stages will disagree.",
            stacklevel=2,
        )
        return
    if not separable:
        raise ConfigError(
            f"{kind.__name__} computes something over all parameters at once; a stage has only "
            "its own, so every stage would take another step. Use an optimizer that treats "
            "parameters one by one, such as AdamW or SGD."
        )


def require_owned(optimizer: Optimizer, known: Container[nn.Parameter], model: str) -> None:
    """Raise unless all of the optimizer's parameters are among the known ones of the model.

    Raises:
        ConfigError: some are not; they would get no gradient.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [tuple(p.shape) for p in parameters if p not in known]
    if strangers:
        raise ConfigError(
            f"The optimizer has {len(strangers)} parameters that are not parameters of {model} "
            f"(the first of shape {strangers[0]}): they would get no gradient. Make them "
            "attributes of the module, or put them into an nn.ParameterList, before the run begins."
        )


def require_dense(optimizer: Optimizer, summed: Container[nn.Parameter]) -> None:
    """Raise if the optimizer takes sparse gradients only, and has parameters whose gradients are
    summed over ranks, which makes them dense.

    Raises:
        ConfigError: it does.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, SparseAdam) and any(p in summed for p in parameters):
        raise ConfigError(
            f"{type(optimizer).__name__} takes sparse gradients only, and gradients that are "
            "summed over several ranks are dense: those of several replicas, and of "
            "parameters outside of the layers. Use one replica with the embedding among "
            "the layers, or Adam."
        )


def _is_separable(kind: Any, options: dict[str, Any]) -> bool:
    together = _trial(kind, options, [0, 1])
    alone = [_trial(kind, options, [0])[0], _trial(kind, options, [1])[0]]
    return all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def _trial(kind: Any, options: dict[str, Any], which: list[int]) -> list[Tensor]:
    """Return two small parameters, or one of them, after a few steps with these options."""
    parameters, _ = stepped(kind, options, which)
    return [parameter.detach() for parameter in parameters]


def set_state_device(optimizer: Optimizer, device: torch.device) -> None:
    """Move an optimizer's state to a device; scalar step counts stay where the optimizer keeps
    them."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.device != device
            ):
                state[key] = value.to(device)
