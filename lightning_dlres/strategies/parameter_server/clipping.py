"""Clipping of merged gradients, as the Trainer or `configure_gradient_clipping` asks for it.

A rank has only its own gradients. So the precision plugin notes how to clip, and the servers clip
the merged gradients. The plugin's class is not replaced, because its name is a key in checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_dlres.strategies.few_bits import unwrapped


@dataclass(frozen=True)
class ClippingBounds:
    """Bounds of an optimizer's merged gradients.

    Attributes:
        max_norm: Largest norm of all of them together; None for any.
        max_value: Largest absolute value of an element; None for any.
    """

    max_norm: float | None = None
    max_value: float | None = None


class Clipping:
    """Clipping of the current step, by optimizer.

    Args:
        value: The Trainer's `gradient_clip_val`, which holds in every step.
        algorithm: Its `gradient_clip_algorithm`.
    """

    def __init__(self, value: float | None = None, algorithm: str | None = None) -> None:
        bound = float(value) if value else None
        is_value = algorithm == "value"
        self._by_trainer = ClippingBounds(None if is_value else bound, bound if is_value else None)
        self._noted: dict[Optimizer, ClippingBounds] = {}

    def of(self, optimizer: Optimizer) -> ClippingBounds:
        """Return the bounds for the next step of an optimizer."""
        return self._noted.get(optimizer, self._by_trainer)

    def forget(self, optimizer: Optimizer) -> None:
        """Forget what was noted for a step that has ended."""
        self._noted.pop(optimizer, None)

    def attach(self, precision: Precision) -> None:
        """Let a precision plugin note how to clip, and change no gradient."""

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
            inner = unwrapped(optimizer)
            self._noted[inner] = replace(self.of(inner), max_norm=float(clip_val))

        def clip_grad_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
            inner = unwrapped(optimizer)
            self._noted[inner] = replace(self.of(inner), max_value=float(clip_val))

        precision.__dict__["clip_grad_by_norm"] = clip_grad_by_norm
        precision.__dict__["clip_grad_by_value"] = clip_grad_by_value

    def detach(self, precision: Precision) -> None:
        """Let the precision plugin clip by itself again."""
        precision.__dict__.pop("clip_grad_by_norm", None)
        precision.__dict__.pop("clip_grad_by_value", None)
