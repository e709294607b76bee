"""Trials of an optimizer: a few steps with its class and options, on small made-up parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    takes_sparse = issubclass(optimizer_class, SparseAdam)

    def make() -> _Trial:
        parameters = [_small_parameter(index) for index in indices]
        group = {"params": parameters, **copy.deepcopy(options)}
        optimizer = optimizer_class([group], lr=TRIAL_RATE)
        return _Trial(optimizer, parameters, indices, gradient_factors, takes_sparse)

    trial = _run(make)
    return trial.parameters, trial.optimizer


def pairs_of_parameters(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    """Return two parameters for each group, one of its own; none if there is only one in all."""
    groups = [group["params"] for group in optimizer.param_groups]
    everything = [parameter for group in groups for parameter in group]
    pairs = []
    for first in (group[0] for group in groups if group):
        place = next(i for i, parameter in enumerate(everything) if parameter is first)
        others = everything[place + 1 :] + everything[:place]
        pairs += [[first, other] for other in others[:1]]
    return pairs


def run_copied_trial(
    optimizer: Optimizer,
    pair: Sequence[nn.Parameter],
    indices: list[int],
    gradient_factors: tuple[float, float] = (1.0, 1.0),
) -> list[nn.Parameter]:
    """Run a trial as `run_trial` does, for an optimizer that its class and options do not make.

    A copy makes the steps, with small parameters in the place of its own. All but those of the
    trial have no gradient.

    Args:
        optimizer: The optimizer.
        pair: Two of its parameters.
        indices: Those to train: [0], [1] or [0, 1].
        gradient_factors: Factors of their gradients.

    Raises:
        NeedsClosure: If the optimizer needs a closure in every step.
        Exception: Any other error of the copy or its step.
    """

    def make() -> _Trial:
        small = {p: _small_parameter(0) for g in optimizer.param_groups for p in g["params"]}
        small.update({parameter: _small_parameter(i) for i, parameter in enumerate(pair)})
        made = _copied(optimizer, small)
        chosen = [small[pair[index]] for index in indices]
        return _Trial(made, chosen, indices, gradient_factors, takes_sparse=False)

    return _run(make).parameters


def _small_parameter(index: int) -> nn.Parameter:
    return nn.Parameter(_values(index))


def _values(index: int) -> Tensor:
    bounds = (-1.0, 1.0) if index == 0 else (5.0, 9.0)
    return torch.linspace(*bounds, 12).view(3, 4)


def _copied(optimizer: Optimizer, small: Mapping[nn.Parameter, nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer, without state and hooks, that has other parameters."""
    made = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(parameter): other for parameter, other in small.items()}
    memo[id(optimizer)], memo[id(optimizer.state)] = made, defaultdict(dict)
    # Attributes that every optimizer has, its hooks among them, are made anew. A function, such as
    # a step that a scheduler has wrapped, would act on the original.
    common = vars(Optimizer([nn.Parameter(torch.zeros(1))], {}))
    own = {k: v for k, v in vars(optimizer).items() if k not in common and not callable(v)}
    inherited = {key: getattr(optimizer, key) for key in ("defaults", "state", "param_groups")}
    # Both at once, since they may share objects.
    inherited, own = copy.deepcopy((inherited, own), memo)
    made.__setstate__(inherited)
    vars(made).update(own)
    for group in made.param_groups:
        group["lr"] = TRIAL_RATE
    return made


def _run(make: Callable[[], _Trial]) -> _Trial:
    """Return a trial after its steps; with a closure, if the optimizer fails without one."""
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
    return trial


@dataclass
class _Trial:
    """Small parameters and their optimizer; see `run_trial`."""

    optimizer: Any
    parameters: list[nn.Parameter]
    indices: list[int]
    gradient_factors: tuple[float, float]
    takes_sparse: bool

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
        for index, parameter in zip(self.indices, self.parameters, strict=True):
            value = _values(index)
            # It depends on the parameter, so that a second evaluation elsewhere counts.
            moved = value + 0.1 * (parameter.detach() - value)
            gradient = moved * (1.0 + index) * (0.5 + number) * self.gradient_factors[index]
            parameter.grad = gradient.to_sparse(1) if self.takes_sparse else gradient
        return torch.zeros(())
