"""Is every parameter's update its own affair? Only then can each stage step its own parameters.

An optimizer that computes one number over all parameters (LBFGS, D-Adaptation, Prodigy) would
compute another one on every stage. A small trial tells, for optimizers of any origin: two
parameters stepped together must move as each does alone.
"""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from lightning_dlres.core._compat import LiveBytes
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.rng import forked
from lightning_dlres.pipeline.profile.cpu_cache import Caches
from lightning_dlres.pipeline.profile.layer_times import Clock

_STEPS = 3
_TRIAL_RATE = 0.1
_TRIAL_BYTES = 16 << 20
_MOMENT_SIDE = 256  # scalars count as nothing beside it
_MOMENT_BYTES = 4 * _MOMENT_SIDE**2
_NOT_OPTIONS = ("params", "initial_lr", "param_names")


def require_separable(optimizer: Optimizer) -> None:
    """Raise unless the optimizer treats parameters one by one.

    Raises:
        ConfigError: it does not.
    """
    kind: Any = type(optimizer)
    try:
        with forked(torch.device("cpu")):
            separable = all(_is_separable(kind, options) for options in _settings(optimizer))
    except _NeedsClosure:
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
            "summed over several ranks are dense: those of several virtual machines, and of "
            "parameters outside of the layers. Use one virtual machine with the embedding among "
            "the layers, or Adam."
        )


class _NeedsClosure(Exception):
    pass


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of every parameter group, with a learning rate that moves something."""
    found = []
    for group in optimizer.param_groups:
        kept = {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
        options = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in kept.items()}
        found.append({**copy.deepcopy(options), "lr": _TRIAL_RATE})
    return found


def _is_separable(kind: Any, options: dict[str, Any]) -> bool:
    together = _trial(kind, options, [0, 1])
    alone = [_trial(kind, options, [0])[0], _trial(kind, options, [1])[0]]
    return all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def state_ratio(optimizer: Optimizer) -> float:
    """Return how many bytes of state the optimizer keeps for every byte of a parameter: 2 for Adam,
    0 for plain SGD; 0 where a trial fails."""
    ratios = [0.0]
    try:
        with forked(torch.device("cpu")):
            for options in _settings(optimizer):
                (parameter,), trial = _stepped(type(optimizer), options, [0])
                size = parameter.numel() * parameter.element_size()
                found = [t for t in trial.state[parameter].values() if isinstance(t, Tensor)]
                kept = sum(t.numel() * t.element_size() for t in found if t.dim())
                ratios.append(kept / size)
    except Exception:
        # `require_separable` says what is wrong with it.
        return 0.0
    return max(ratios)


def update_seconds(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    clock: Clock,
    repeats: int,
    caches: Caches,
) -> float:
    """Return the counted seconds that a step takes for every byte of a gradient; 0 where a trial
    fails.

    Args:
        optimizer: its kind and the options of its first group are tried.
        parameters: of whose shapes some are taken, as parameters on the clock's device; of large
            ones, a part.
        clock: what to count with.
        repeats: number of steps that count.
        caches: they are cold when a step begins.
    """
    trial_parameters, size = list[nn.Parameter](), 0
    for parameter in parameters:
        if size < _TRIAL_BYTES and parameter.requires_grad:
            shape = _at_most(parameter, _TRIAL_BYTES)
            made = torch.full(shape, 1e-3, dtype=parameter.dtype, device=clock.device)
            trial_parameters.append(nn.Parameter(made))
            size += made.numel() * made.element_size()
    if not size:
        return 0.0
    spent = []
    try:
        options = _settings(optimizer)[0]
        kind: Any = type(optimizer)
        trial = kind([{"params": trial_parameters, **options}], lr=_TRIAL_RATE)
        for parameter in trial_parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        trial.step()  # makes the state
        for _ in range(repeats):
            caches.overwrite()
            start = clock.now()
            trial.step()
            spent.append(clock.now() - start)
    except Exception:
        # It is no part of what is planned; `require_separable` says what is wrong with it.
        return 0.0
    return statistics.fmean(spent) / size


def _at_most(parameter: nn.Parameter, nbytes: int) -> list[int]:
    """Return the shape of a parameter, cut down until it has no more bytes than that."""
    shape = list(parameter.shape)
    for dimension in range(len(shape)):
        size = math.prod(shape) * parameter.element_size()
        if size > nbytes:
            shape[dimension] = max(1, shape[dimension] * nbytes // size)
    return shape


@dataclass(frozen=True)
class UpdateBytes:
    """What an optimizer's step needs for a moment.

    Adam on the CPU takes parameters one by one: it makes two tensors of the size of each, and one
    of the parameter before is still there. On a GPU it takes all of them at once.

    Attributes:
        own: bytes for every byte of the parameter that is stepped.
        before: for every byte of the one that was stepped before.
        of_all: for every byte of all parameters.
    """

    own: float = 0.0
    before: float = 0.0
    of_all: float = 0.0

    def of(self, sizes: Sequence[int]) -> int:
        """Return the bytes for parameters of these sizes, stepped in this order, but for those that
        depend on all parameters."""
        pairs = zip(sizes, [0, *sizes], strict=False)
        return math.ceil(max((self.own * a + self.before * b for a, b in pairs), default=0.0))


def update_bytes(optimizer: Optimizer, device: torch.device) -> UpdateBytes:
    """Return what a step needs for a moment; nothing where a trial fails. Sparse gradients count as
    nothing: only their rows take part."""
    if isinstance(optimizer, SparseAdam):
        return UpdateBytes()
    found = [(0.0, 0.0, 0.0)]
    try:
        with forked(device):
            for options in _settings(optimizer):
                one, two, three = (
                    _moment(type(optimizer), options, n, device) / _MOMENT_BYTES for n in (1, 2, 3)
                )
                of_all = three - two
                found.append((one - of_all, two - one - of_all, of_all))
    except Exception:
        # `require_separable` says what is wrong with it.
        return UpdateBytes()
    return UpdateBytes(*(max(0.0, *column) for column in zip(*found, strict=True)))


def _moment(kind: Any, options: dict[str, Any], count: int, device: torch.device) -> int:
    # Square: what an optimizer makes of a whole dimension would be huge for a vector.
    parameters = [
        nn.Parameter(torch.ones(_MOMENT_SIDE, _MOMENT_SIDE, device=device)) for _ in range(count)
    ]
    trial: Optimizer = kind([{"params": parameters, **copy.deepcopy(options)}], lr=_TRIAL_RATE)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    trial.step()  # makes the state
    with LiveBytes() as live:
        trial.step()
    peak: int = live.peak
    return peak


def _trial(kind: Any, options: dict[str, Any], which: list[int]) -> list[Tensor]:
    """Return two small parameters, or one of them, after a few steps with these options."""
    parameters, _ = _stepped(kind, options, which)
    return [parameter.detach() for parameter in parameters]


def _stepped(
    kind: Any, options: dict[str, Any], which: list[int]
) -> tuple[list[nn.Parameter], Optimizer]:
    values = [
        torch.linspace(-1.0, 1.0, 12).view(3, 4),
        torch.linspace(5.0, 9.0, 12).view(3, 4),
    ]
    parameters = [nn.Parameter(values[i].clone()) for i in which]
    trial: Optimizer = kind([{"params": parameters, **copy.deepcopy(options)}], lr=_TRIAL_RATE)
    with torch.enable_grad():
        for step in range(_STEPS):
            for i, parameter in zip(which, parameters, strict=True):
                gradient = values[i] * (1.0 + i) * (0.5 + step)
                takes_sparse = issubclass(kind, SparseAdam)
                parameter.grad = gradient.to_sparse(1) if takes_sparse else gradient
            try:
                trial.step()
            except TypeError as error:
                raise (_NeedsClosure() if "closure" in str(error) else error) from error
    return parameters, trial


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
