"""Costs of an optimizer, measured in trials: seconds, temporary bytes and state of one step."""

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

from lightning_dlres.core.device.live_bytes import LiveBytes
from lightning_dlres.core.rng import forked
from lightning_dlres.pipeline.profile.cpu_cache import CpuCacheFlusher
from lightning_dlres.pipeline.profile.layer_times import ComputeClock
from lightning_dlres.pipeline.profile.optimizer_trials import TRIAL_RATE, run_trial, trial_options

# Bytes of parameters in a timed trial.
_TRIAL_BYTES = 16 << 20
# Side of the square float32 parameters in a memory trial; large, to make scalar state negligible.
_SIDE = 256
_PARAMETER_BYTES = 4 * _SIDE**2


def state_ratio(optimizer: Optimizer) -> float:
    """Return the bytes of optimizer state per byte of parameter: 2 for Adam, 0 for plain SGD.

    The largest ratio over the parameter groups counts. It is 0 if a trial fails.
    """
    ratios = [0.0]
    try:
        with forked(torch.device("cpu")):
            for options in trial_options(optimizer):
                (parameter,), trial = run_trial(type(optimizer), options, [0])
                size = parameter.numel() * parameter.element_size()
                state = [t for t in trial.state[parameter].values() if isinstance(t, Tensor)]
                state_bytes = sum(t.numel() * t.element_size() for t in state if t.dim())
                ratios.append(state_bytes / size)
    except Exception:
        # `execute.optimizers.require_separable` reports the problem.
        return 0.0
    return max(ratios)


def update_seconds(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    clock: ComputeClock,
    repeats: int,
    flusher: CpuCacheFlusher,
) -> float:
    """Return the seconds of a step per byte of gradient, by the given clock.

    It is 0 if nothing is trained, or if a trial fails.

    Args:
        optimizer: Optimizer whose class and first group's options the trial uses.
        parameters: Parameters of the model. The trial makes new ones of the same shapes, on the
            clock's device, until these have `_TRIAL_BYTES`. A larger one is cut down.
        clock: Clock that measures.
        repeats: Number of timed steps.
        flusher: Flushes the caches before each step.
    """
    trial_parameters, size = list[nn.Parameter](), 0
    for parameter in parameters:
        if size < _TRIAL_BYTES and parameter.requires_grad:
            shape = _cut_shape(parameter, _TRIAL_BYTES)
            values = torch.full(shape, 1e-3, dtype=parameter.dtype, device=clock.device)
            trial_parameters.append(nn.Parameter(values))
            size += values.numel() * values.element_size()
    if not size:
        return 0.0
    step_seconds = []
    try:
        options = trial_options(optimizer)[0]
        optimizer_class: Any = type(optimizer)
        trial = optimizer_class([{"params": trial_parameters, **options}], lr=TRIAL_RATE)
        for parameter in trial_parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        trial.step()  # creates the optimizer state
        for _ in range(repeats):
            flusher.overwrite()
            start = clock.now()
            trial.step()
            step_seconds.append(clock.now() - start)
    except Exception:
        # The plan counts no time then; `execute.optimizers.require_separable` reports the problem.
        return 0.0
    return statistics.fmean(step_seconds) / size


def _cut_shape(parameter: nn.Parameter, nbytes: int) -> list[int]:
    """Return the shape of a parameter, cut down to at most this many bytes."""
    shape = list(parameter.shape)
    for dimension in range(len(shape)):
        size = math.prod(shape) * parameter.element_size()
        if size > nbytes:
            shape[dimension] = max(1, shape[dimension] * nbytes // size)
    return shape


@dataclass(frozen=True)
class UpdateBytes:
    """Temporary memory of an optimizer's step, in bytes per byte of parameter.

    Adam on the CPU steps parameters one by one: it makes two tensors of the size of each, and one
    of the previous parameter's tensors is still alive. On a GPU it steps all of them at once.

    Attributes:
        current: Bytes per byte of the parameter that is stepped.
        previous: Bytes per byte of the parameter that was stepped before it.
        total: Bytes per byte of all parameters.
    """

    current: float = 0.0
    previous: float = 0.0
    total: float = 0.0

    def of(self, sizes: Sequence[int]) -> int:
        """Return the peak while parameters of these sizes are stepped in this order, in bytes.

        It does not include `total`.
        """
        pairs = zip(sizes, [0, *sizes], strict=False)
        return math.ceil(max((self.current * a + self.previous * b for a, b in pairs), default=0.0))


def update_bytes(optimizer: Optimizer, device: torch.device) -> UpdateBytes:
    """Return the temporary memory of a step; 0 if a trial fails.

    SparseAdam counts as 0, since only the rows with a gradient take part in its step.
    """
    if isinstance(optimizer, SparseAdam):
        return UpdateBytes()
    trials = [(0.0, 0.0, 0.0)]
    try:
        with forked(device):
            for options in trial_options(optimizer):
                one, two, three = (
                    _step_bytes(type(optimizer), options, n, device) / _PARAMETER_BYTES
                    for n in (1, 2, 3)
                )
                # one = current + total, two = current + previous + 2 total, three = two + total.
                total = three - two
                trials.append((one - total, two - one - total, total))
    except Exception:
        # `execute.optimizers.require_separable` reports the problem.
        return UpdateBytes()
    return UpdateBytes(*(max(0.0, *column) for column in zip(*trials, strict=True)))


def _step_bytes(
    optimizer_class: Any, options: dict[str, Any], count: int, device: torch.device
) -> int:
    """Return the temporary memory of one step with this many parameters, in bytes."""
    # Square: an optimizer that makes a matrix per dimension would make a huge one for a vector.
    parameters = [nn.Parameter(torch.ones(_SIDE, _SIDE, device=device)) for _ in range(count)]
    group = {"params": parameters, **copy.deepcopy(options)}
    trial: Optimizer = optimizer_class([group], lr=TRIAL_RATE)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    trial.step()  # creates the optimizer state
    with LiveBytes() as live:
        trial.step()
    peak: int = live.peak
    return peak
