"""Checks that an optimizer can run on stages, and the device of its state.

Each stage steps its own parameters. This is right only if the optimizer updates each parameter
independently. One that computes a number over all parameters (LBFGS, D-Adaptation, Prodigy) would
compute a different one on every stage. A small trial decides, for optimizers of any origin: two
parameters stepped together must move as each of them does alone. If the optimizer draws random
numbers, each must move in the same way whatever gradients the other has.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.rng import rewinder
from lightning_dlres.pipeline.profile.optimizer_trials import (
    NeedsClosure,
    pairs_of_parameters,
    run_copied_trial,
    run_trial,
    trial_options,
)


def require_separable(optimizer: Optimizer, num_stages: int) -> None:
    """Check that the optimizer updates each parameter independently.

    With one stage each rank has all parameters, so an update may depend on several of them. A trial
    may also fail for a reason of its own. The optimizer is then accepted with a warning.

    Args:
        optimizer: Optimizer to check.
        num_stages: Number of stages of the plan.

    Raises:
        ConfigError: If an update of one parameter depends on another, if the optimizer needs a
            closure in every step, or if it is not made as one of torch.
    """
    optimizer_class: Any = type(optimizer)
    name, rewind = optimizer_class.__name__, rewinder()
    try:
        optimizer.register_step_post_hook(lambda *_: None).remove()
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"{name} must be an optimizer whose constructor calls that of torch.optim.Optimizer, "
            f"got one that takes no hooks ({type(error).__name__}: {error}), such as a wrapper of "
            "another optimizer. Use one that updates each parameter by itself, such as AdamW."
        ) from error
    try:
        separable = _are_separable(optimizer, rewind)
    except NeedsClosure:
        raise ConfigError(
            f"{name} needs a closure in every step, because it evaluates the loss several times. "
            "A step of the pipeline evaluates it once. Use an optimizer that needs no closure, "
            "such as AdamW or SGD."
        ) from None
    except Exception as error:
        if num_stages == 1:
            return
        warnings.warn(
            f"A trial of {name} failed ({type(error).__name__}: {error}), so it is not "
            "known if it updates each parameter independently. If it computes anything over all "
            "parameters, stages will disagree.",
            stacklevel=2,
        )
        return
    finally:
        rewind()
    if not separable and num_stages > 1:
        raise ConfigError(
            f"{name} computes something over all parameters at once. A stage has only its "
            "own parameters, so the stages would disagree. Use an optimizer that updates each "
            "parameter independently, such as AdamW or SGD."
        )


def require_owned(optimizer: Optimizer, known: Container[nn.Parameter], model: str) -> None:
    """Check that all parameters of the optimizer are parameters of the model.

    Args:
        optimizer: Optimizer to check.
        known: Parameters of the model.
        model: Name of the model, for the error.

    Raises:
        ConfigError: If some are not. The pipeline would compute no gradient for them.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    unknown_shapes = [tuple(p.shape) for p in parameters if p not in known]
    if unknown_shapes:
        raise ConfigError(
            f"The optimizer has {len(unknown_shapes)} parameters that are not parameters of "
            f"{model} (the first of shape {unknown_shapes[0]}), so they would get no gradient. "
            "Make them attributes of the module, or put them into an nn.ParameterList, before the "
            "run begins."
        )


def require_dense(optimizer: Optimizer, summed: Container[nn.Parameter]) -> None:
    """Check that an optimizer takes dense gradients if ranks sum gradients of its parameters.

    Sums over ranks are dense, and SparseAdam takes sparse gradients only.

    Args:
        optimizer: Optimizer to check.
        summed: Parameters whose gradients are summed over ranks.

    Raises:
        ConfigError: If it takes sparse gradients only, and has a parameter in `summed`.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, SparseAdam) and any(p in summed for p in parameters):
        raise ConfigError(
            f"{type(optimizer).__name__} takes sparse gradients only, and gradients become dense "
            "when they are summed over ranks. This applies to parameters of several replicas, and "
            "to parameters outside of the layers. Use one replica with the embedding among the "
            "layers, or Adam."
        )


def _are_separable(optimizer: Optimizer, rewind: Callable[[], None]) -> bool:
    """Return whether an optimizer updates each parameter independently; it may raise anything."""
    try:
        trials = [
            partial(_updated, partial(_run_new, type(optimizer), options))
            for options in trial_options(optimizer)
        ]
        return all(_is_separable(trial, rewind) for trial in trials)
    except NeedsClosure:
        raise
    except Exception as error:
        # Its constructor may need more than parameters and options.
        trials = [
            partial(_updated, partial(run_copied_trial, optimizer, pair))
            for pair in pairs_of_parameters(optimizer)
        ]
        try:
            return all(_is_separable(trial, rewind) for trial in trials)
        except NeedsClosure:
            raise
        except Exception:
            raise error from None


def _is_separable(updated: Callable[..., list[bytes]], rewind: Callable[[], None]) -> bool:
    """Return whether a trial updates each parameter independently.

    Args:
        updated: Function that runs a trial; see `_updated`.
        rewind: Function that restores the random state before the trials.
    """

    def rewound(*args: Any) -> list[bytes]:
        rewind()
        return updated(*args)

    together, first, second = rewound([0, 1]), rewound([0]), rewound([1])
    if together == first + second:
        return True
    rewind()
    _advance_generators()
    is_random = updated([0]) != first
    # The random numbers of a parameter depend on the number of parameters before it. So keep the
    # number, and change the gradients of the other parameter.
    return (
        is_random
        and rewound([0, 1], (1.0, -3.0))[0] == together[0]
        and rewound([0, 1], (-3.0, 1.0))[1] == together[1]
    )


def _run_new(*args: Any) -> list[nn.Parameter]:
    parameters, _ = run_trial(*args)
    return parameters


def _updated(run: Callable[..., list[nn.Parameter]], *args: Any) -> list[bytes]:
    """Return the bytes of the trial parameters after a few steps; see `run_trial`.

    Bytes compare as equal also if they are those of NaN.
    """
    return [parameter.detach().numpy().tobytes() for parameter in run(*args)]


def _advance_generators() -> None:
    """Change the state of the global Python, NumPy (legacy) and torch generators."""
    random.random()
    np.random.random()
    torch.rand(1)


def set_state_device(optimizer: Optimizer, device: torch.device) -> None:
    """Move the state of all parameters to a device.

    As in `Optimizer.load_state_dict`, the entry "step" stays where it is, unless the options
    `fused` or `capturable` need it on the parameter's device.
    """
    for group in optimizer.param_groups:
        moves_step = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if key != "step" or moves_step:
                    state[key] = _on_device(value, device)


def _on_device(value: Any, device: torch.device) -> Any:
    """Return an entry of an optimizer's state with its tensors on a device."""
    if isinstance(value, Tensor):
        # An optimizer may keep values for all weights, also for those of other stages.
        return value if value.is_meta else value.to(device)
    if type(value) is dict:
        return {key: _on_device(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_device(item, device) for item in value)
    return value
