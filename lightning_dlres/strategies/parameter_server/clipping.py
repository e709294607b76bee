"""Clipping of merged gradients, as the Trainer or `configure_gradient_clipping` asks for it.

A rank has only its own gradients. So the precision plugin notes how to clip, and the servers clip
the merged gradients. The plugin's class is not replaced, because its name is a key in checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer


@dataclass
class Clipping:
    """Clipping of the current step.

    Attributes:
        max_norm: Largest norm of all gradients of the optimizer together; None for any.
        max_value: Largest absolute value of an element; None for any.
    """

    max_norm: float | None = None
    max_value: float | None = None
    _by_trainer: tuple[float | None, float | None] = (None, None)

    def expect(self, value: float | None, algorithm: str | None) -> None:
        """Note the Trainer's clipping, which is the same in every step.

        Args:
            value: The Trainer's `gradient_clip_val`.
            algorithm: Its `gradient_clip_algorithm`.
        """
        bound = float(value) if value else None
        self._by_trainer = (None, bound) if algorithm == "value" else (bound, None)
        self.forget()

    def forget(self) -> None:
        """Forget what was noted in a step that has ended."""
        self.max_norm, self.max_value = self._by_trainer

    def attach(self, precision: Precision) -> None:
        """Let a precision plugin note how to clip, and change no gradient."""

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
            self.max_norm = float(clip_val)

        def clip_grad_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
            self.max_value = float(clip_val)

        precision.__dict__["clip_grad_by_norm"] = clip_grad_by_norm
        precision.__dict__["clip_grad_by_value"] = clip_grad_by_value

    def detach(self, precision: Precision) -> None:
        """Let the precision plugin clip by itself again."""
        precision.__dict__.pop("clip_grad_by_norm", None)
        precision.__dict__.pop("clip_grad_by_value", None)
