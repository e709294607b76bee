"""Trials of an optimizer: a few steps with its class and options, on small made-up parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

# Learning rate of trials: large enough to change parameters visibly.
TRIAL_RATE = 0.1
_STEPS = 3
# Entries of a parameter group that the constructor of an optimizer does not accept as options.
_NOT_OPTIONS = ("params", "initial_lr", "param_names")


class NeedsClosure(Exception):
    """Error of an optimizer that needs a closure in every step, such as LBFGS."""


def trial_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of every parameter group, with the learning rate of trials."""
    groups = []
    for group in optimizer.param_groups:
        options = {
            k: v.detach().cpu() if isinstance(v, Tensor) else v
            for k, v in group.items()
            if k not in _NOT_OPTIONS
        }
        groups.append({**copy.deepcopy(options), "lr": TRIAL_RATE})
    return groups


def run_trial(
    optimizer_class: Any,
    options: dict[str, Any],
    indices: list[int],
    gradient_factors: tuple[float, float] = (1.0, 1.0),
) -> tuple[list[nn.Parameter], Optimizer]:
    """Run a few steps on small parameters; return the updated parameters and the optimizer.

    Args:
        optimizer_class: Class of the optimizer.
        options: Options of its parameter group.
        indices: Trial parameters to train, out of two: [0], [1] or [0, 1].
        gradient_factors: Factors of the gradients of the two trial parameters.

    Raises:
        NeedsClosure: If the optimizer needs a closure in every step.
        Exception: Any other error of the optimizer's constructor or step.
    """
    values = [
        torch.linspace(-1.0, 1.0, 12).view(3, 4),
        torch.linspace(5.0, 9.0, 12).view(3, 4),
    ]
    parameters = [nn.Parameter(values[i].clone()) for i in indices]
    group = {"params": parameters, **copy.deepcopy(options)}
    trial: Optimizer = optimizer_class([group], lr=TRIAL_RATE)
    with torch.enable_grad():
        for step in range(_STEPS):
            for i, parameter in zip(indices, parameters, strict=True):
                gradient = values[i] * (1.0 + i) * (0.5 + step) * gradient_factors[i]
                takes_sparse = issubclass(optimizer_class, SparseAdam)
                parameter.grad = gradient.to_sparse(1) if takes_sparse else gradient
            try:
                trial.step()
            except TypeError as error:
                raise (NeedsClosure() if "closure" in str(error) else error) from error
    return parameters, trial
