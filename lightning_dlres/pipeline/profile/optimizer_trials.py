"""Small trials of an optimizer: a few steps of its class and options, on made-up parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

# Learning rate of trials: large enough to change parameters visibly.
TRIAL_RATE = 0.1
_STEPS = 3
# Entries of a parameter group that are no arguments of the optimizer.
_NOT_OPTIONS = ("params", "initial_lr", "param_names")


class NeedsClosure(Exception):
    """Error of an optimizer that calls a closure in every step."""


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


def stepped(
    kind: Any, options: dict[str, Any], which: list[int]
) -> tuple[list[nn.Parameter], Optimizer]:
    """Return trial parameters after a few steps, and the optimizer that stepped them.

    Args:
        kind: Class of the optimizer.
        options: Options of its parameter group.
        which: Numbers of the two trial parameters to train, 0, 1 or both.

    Raises:
        NeedsClosure: If the optimizer calls a closure in every step.
    """
    values = [
        torch.linspace(-1.0, 1.0, 12).view(3, 4),
        torch.linspace(5.0, 9.0, 12).view(3, 4),
    ]
    parameters = [nn.Parameter(values[i].clone()) for i in which]
    trial: Optimizer = kind([{"params": parameters, **copy.deepcopy(options)}], lr=TRIAL_RATE)
    with torch.enable_grad():
        for step in range(_STEPS):
            for i, parameter in zip(which, parameters, strict=True):
                gradient = values[i] * (1.0 + i) * (0.5 + step)
                takes_sparse = issubclass(kind, SparseAdam)
                parameter.grad = gradient.to_sparse(1) if takes_sparse else gradient
            try:
                trial.step()
            except TypeError as error:
                raise (NeedsClosure() if "closure" in str(error) else error) from error
    return parameters, trial
