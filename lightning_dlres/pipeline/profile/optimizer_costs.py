"""An optimizer's costs: seconds, temporary bytes and state of one step, found by trials."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from lightning_dlres.core._compat import LiveBytes
from lightning_dlres.core.rng import forked
from lightning_dlres.pipeline.profile.cpu_cache import CpuCacheFlusher
from lightning_dlres.pipeline.profile.layer_times import ComputeClock
from lightning_dlres.pipeline.profile.optimizer_trials import TRIAL_RATE, stepped, trial_options

_TRIAL_BYTES = 16 << 20
_MOMENT_SIDE = 256  # scalars count as nothing beside it
_MOMENT_BYTES = 4 * _MOMENT_SIDE**2


def state_ratio(optimizer: Optimizer) -> float:
    """Return how many bytes of state the optimizer keeps for every byte of a parameter: 2 for Adam,
    0 for plain SGD; 0 where a trial fails."""
    ratios = [0.0]
    try:
        with forked(torch.device("cpu")):
            for options in trial_options(optimizer):
                (parameter,), trial = stepped(type(optimizer), options, [0])
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
    clock: ComputeClock,
    repeats: int,
    caches: CpuCacheFlusher,
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
        options = trial_options(optimizer)[0]
        kind: Any = type(optimizer)
        trial = kind([{"params": trial_parameters, **options}], lr=TRIAL_RATE)
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
            for options in trial_options(optimizer):
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
    trial: Optimizer = kind([{"params": parameters, **copy.deepcopy(options)}], lr=TRIAL_RATE)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    trial.step()  # makes the state
    with LiveBytes() as live:
        trial.step()
    peak: int = live.peak
    return peak
