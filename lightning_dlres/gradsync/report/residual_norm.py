"""Norm of the residuals: the gradient that compression has held back, beside the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_dlres.codecs.gradient import RESIDUAL, State
from lightning_dlres.gradsync.execute.states import StateKey
from lightning_dlres.gradsync.plan.graph import Part


def residual_norm(
    states: Mapping[StateKey, State],
    gradients: Mapping[str, Tensor | None],
    *,
    world_size: int,
    loss_scale: float = 1.0,
) -> float | None:
    """Return the norm of a rank's residuals over the norm of the mean gradient.

    Only gradients with a residual count. A rank holds, for each unit, the residual of its own
    gradient, or that of the sum. The latter is divided by the number of ranks, as the mean is.

    Args:
        states: States of the rank's codecs.
        gradients: Mean gradients by name, of any shape; None for one without.
        world_size: Number of ranks.
        loss_scale: Factor of the gradients; residuals are without it.

    Returns:
        None if there is no residual, or if the gradient is zero or not finite.
    """
    residuals, names = [], set()
    for (name, _, _, part), state in states.items():
        if RESIDUAL in state:
            scale = 1 / world_size if part is Part.SUM else 1.0
            residuals.append(_norm(state[RESIDUAL]) * scale)
            names.add(name)
    held = _total(residuals)
    gradient = _total(
        _norm(tensor) for name, tensor in gradients.items() if name in names and tensor is not None
    )
    gradient /= loss_scale
    is_defined = bool(names) and gradient > 0 and math.isfinite(gradient)
    return held / gradient if is_defined else None


def _norm(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # Squares of half precision may overflow. A wider dtype must not be narrowed.
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm.float()


def _total(norms: Iterable[Tensor]) -> float:
    """Return the norm of tensors from their norms. One copy from a device brings all of them."""
    values = list(norms)
    return float(torch.stack(values).norm()) if values else 0.0
