"""Trials of an optimizer: a few steps with its class and options, on small made-up parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
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
    make = partial(_Trial, optimizer_class, options, indices, gradient_factors)
    trial = make()
    try:
        trial.run(lambda optimizer, _: optimizer.step())
    except Exception as error:
        if isinstance(error, TypeError) and "closure" in str(error):
            raise NeedsClosure() from error
        # Some optimizers, such as SAM, call the closure that they get without asking for one.
        trial = make()
        try:
            trial.run(lambda optimizer, closure: optimizer.step(closure))
        except Exception:
            raise error from None
    return trial.parameters, trial.optimizer


class _Trial:
    """Small parameters and their optimizer; see `run_trial` for the arguments."""

    def __init__(
        self,
        optimizer_class: Any,
        options: dict[str, Any],
        indices: list[int],
        gradient_factors: tuple[float, float],
    ) -> None:
        values = torch.linspace(-1.0, 1.0, 12), torch.linspace(5.0, 9.0, 12)
        self._values = [values[index].view(3, 4) for index in indices]
        self._factors = [(1.0 + index) * gradient_factors[index] for index in indices]
        self._takes_sparse = issubclass(optimizer_class, SparseAdam)
        self.parameters = [nn.Parameter(value.clone()) for value in self._values]
        group = {"params": self.parameters, **copy.deepcopy(options)}
        self.optimizer: Optimizer = optimizer_class([group], lr=TRIAL_RATE)

    def run(self, step: Callable[[Any, Callable[[], Tensor]], object]) -> None:
        """Make the steps.

        Args:
            step: Makes a step, given the optimizer and a closure that sets the gradients.
        """
        with torch.enable_grad():
            for number in range(_STEPS):
                self._set_gradients(number)
                step(self.optimizer, partial(self._set_gradients, number))

    def _set_gradients(self, number: int) -> Tensor:
        """Set the gradients of a step, and return a loss, as a closure does."""
        for parameter, value, factor in zip(
            self.parameters, self._values, self._factors, strict=True
        ):
            # It depends on the parameter, so that a second evaluation elsewhere counts.
            moved = value + 0.1 * (parameter.detach() - value)
            gradient = moved * factor * (0.5 + number)
            parameter.grad = gradient.to_sparse(1) if self._takes_sparse else gradient
        return torch.zeros(())
