"""Clipping of merged gradients, as the Trainer or `configure_gradient_clipping` asks for it.

A rank has only its own gradients. So the precision plugin notes how to clip, and the servers clip
the merged gradients. The plugin's class is not replaced, because its name is a key in checkpoints.

In plain training a call clips the gradients that are there. So a note belongs to gradients: it
holds as long as a parameter has the same ones, and new gradients of a later backward end it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dlres.core._compat import StorageReference, storage_reference, version_of
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.strategies.few_bits import unwrapped

# Version that no gradient has.
_CHANGED = -1


@dataclass(frozen=True)
class ClippingBounds:
    """Bounds of an optimizer's merged gradients; the servers apply that of the norm first.

    Attributes:
        max_norm: Largest norm of all of them together; None for any.
        max_value: Largest absolute value of an element; None for any.
    """

    max_norm: float | None = None
    max_value: float | None = None

    def and_norm(self, bound: float) -> ClippingBounds:
        """Return the bounds with a further one of the norm.

        Raises:
            UnsupportedStepError: If there is one of the values already.
        """
        if self.max_value is not None:
            raise UnsupportedStepError(
                "clip_gradients must not clip by norm after it has clipped by value, because the "
                "servers clip by norm first. Clip by norm first, or only in one way."
            )
        return ClippingBounds(bound if self.max_norm is None else min(bound, self.max_norm))

    def and_value(self, bound: float) -> ClippingBounds:
        """Return the bounds with a further one of the values."""
        value = bound if self.max_value is None else min(bound, self.max_value)
        return ClippingBounds(self.max_norm, value)


class _Note:
    """Bounds that hold for the gradients that the parameters of an optimizer have now.

    Args:
        optimizer: The optimizer.
        bounds: The bounds.
    """

    def __init__(self, optimizer: Optimizer, bounds: ClippingBounds) -> None:
        self.bounds = bounds
        # Memory and version of each gradient.
        self._gradients = {
            parameter: _state(gradient) for parameter, gradient in _gradients(optimizer).items()
        }

    def before_backward(self) -> None:
        """Forget the gradients that are None now, and note those that other code has replaced.

        The backward may give a new gradient the same memory, and adds to one that was replaced.
        """
        for parameter, before in list(self._gradients.items()):
            gradient = parameter.grad
            if gradient is None:
                del self._gradients[parameter]
            elif storage_reference(gradient) != before[0]:
                self._gradients[parameter] = storage_reference(gradient), _CHANGED

    def renew(self, parameter: nn.Parameter) -> None:
        """Take note of a gradient that backward has made, or to which it has added."""
        gradient, before = parameter.grad, self._gradients.get(parameter)
        # If autograd has added to the memory of the clipped gradient, the version shows it.
        if gradient is None or before is None or storage_reference(gradient) == before[0]:
            return
        if gradient.requires_grad:
            # Autograd adds to a gradient with a graph in new memory.
            self._gradients[parameter] = storage_reference(gradient), _CHANGED
        else:
            del self._gradients[parameter]

    def holds(self, optimizer: Optimizer) -> bool:
        """Return True if the bounds are those of the gradients, and False if none of them is.

        Raises:
            UnsupportedStepError: If the gradients have changed since.
        """
        gradients = _gradients(optimizer)
        clipped = {p: before for p, before in self._gradients.items() if p in gradients}
        is_changed = any(_state(gradients[p]) != before for p, before in clipped.items())
        if is_changed or (clipped and len(clipped) < len(gradients)):
            raise UnsupportedStepError(
                "gradients must stay as they are from clip_gradients to the optimizer's step and "
                "zero_grad, because the servers clip them in the step. Call clip_gradients after "
                "all other changes, and let zero_grad set gradients to None."
            )
        return bool(clipped)


class Clipping:
    """Clipping of the steps, by optimizer.

    Args:
        every_step: Returns the bounds of each step, if only they count; None to take notes.
    """

    def __init__(self, every_step: Callable[[], ClippingBounds] | None = None) -> None:
        self._every_step = every_step
        self._notes: dict[Optimizer, _Note] = {}

    def of(self, optimizer: Optimizer) -> ClippingBounds:
        """Return the bounds of the gradients that the optimizer's parameters have now.

        Raises:
            UnsupportedStepError: If other code has changed gradients after it clipped them.
        """
        if self._every_step is not None:
            return self._every_step()
        note = self._notes.get(optimizer)
        if note is None:
            return ClippingBounds()
        if note.holds(optimizer):
            return note.bounds
        del self._notes[optimizer]
        return ClippingBounds()

    def renew(self, parameter: nn.Parameter) -> None:
        """Take note of a gradient that backward has made, or to which it has added."""
        for note in self._notes.values():
            note.renew(parameter)

    def attach(self, precision: Precision) -> None:
        """Let a precision plugin note how to clip, and change no gradient."""

        def note(optimizer: Optimizer, bounded: Callable[[ClippingBounds], ClippingBounds]) -> None:
            inner = unwrapped(optimizer)
            if self._every_step is None:
                self._notes[inner] = _Note(inner, bounded(self.of(inner)))

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
            note(optimizer, lambda bounds: bounds.and_norm(float(clip_val)))

        def clip_grad_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
            note(optimizer, lambda bounds: bounds.and_value(float(clip_val)))

        pre_backward = precision.pre_backward

        def before_backward(*args: Any, **kwargs: Any) -> Any:
            for note in self._notes.values():
                note.before_backward()
            return pre_backward(*args, **kwargs)

        precision.__dict__["pre_backward"] = before_backward
        precision.__dict__["clip_grad_by_norm"] = clip_grad_by_norm
        precision.__dict__["clip_grad_by_value"] = clip_grad_by_value

    def detach(self, precision: Precision) -> None:
        """Let the precision plugin clip by itself again."""
        precision.__dict__.pop("pre_backward", None)
        precision.__dict__.pop("clip_grad_by_norm", None)
        precision.__dict__.pop("clip_grad_by_value", None)


def trainer_bounds(trainer: Trainer) -> ClippingBounds:
    """Return the bounds of a Trainer's `gradient_clip_val` and `gradient_clip_algorithm`."""
    value = trainer.gradient_clip_val
    if not value:
        return ClippingBounds()
    if trainer.gradient_clip_algorithm == "value":
        return ClippingBounds(max_value=float(value))
    return ClippingBounds(max_norm=float(value))


def _gradients(optimizer: Optimizer) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of an optimizer's parameters; sparse ones are refused in the step."""
    return {
        parameter: parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and parameter.grad.layout is torch.strided
    }


def _state(gradient: Tensor) -> tuple[StorageReference, int]:
    return storage_reference(gradient), version_of(gradient)
