"""Modes of torch in which a training step calls the pipelined module.

The layers run on other ranks, in the modes that are in force around the whole step. A call in
another mode would train other weights than plain training, or weights that it does not train.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from lightning_dlres import _compat
from lightning_dlres.core._compat import is_transforming
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.capture.block_calls import checkpoint_around
from lightning_dlres.pipeline.stage.module_attributes import are_identical
from lightning_dlres.strategies.hetero_pipe.calls.needs_cut import NeedsCutStepError


@dataclass(frozen=True)
class CallModes:
    """Modes of torch in which a call is made.

    Attributes:
        autocast: For each kind of device, whether autocast is on, and its dtype.
        records_gradients: Whether autograd records operations.
        default_dtype: Dtype of new tensors.
        functions: Modes that see torch functions or operations, and hooks for the tensors that
            autograd saves.
    """

    autocast: list[tuple[bool, torch.dtype]]
    records_gradients: bool
    default_dtype: torch.dtype
    functions: list[Any]

    @classmethod
    def now(cls) -> CallModes:
        """Return the modes in force."""
        autocast = [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ]
        functions = _compat.function_modes()
        return cls(autocast, torch.is_grad_enabled(), torch.get_default_dtype(), functions)

    def require_unchanged(self, step: str, path: str, frame: CodeType) -> None:
        """Check, at the call of the pipelined module, that these modes are still in force.

        Args:
            step: Name of the step, for the error.
            path: Name of the module.
            frame: Code that runs the step: an activation checkpoint is looked for within it.

        Raises:
            UnsupportedStepError: If another mode is in force.
        """
        now = CallModes.now()
        if is_transforming():
            raise UnsupportedStepError(
                f"{step} must call {path!r} outside of transforms of torch.func, got a call "
                "within one, such as vmap or grad. Enter it in the forward of a layer, or train "
                "on a single device: Trainer(devices=1)."
            )
        if now.autocast != self.autocast:
            raise UnsupportedStepError(
                f"{step} must call {path!r} in the precision of the Trainer, since other "
                "ranks run its layers in that, got a call within another torch.autocast. Enter it "
                "in the forward of a layer instead."
            )
        if now.records_gradients != self.records_gradients:
            self._refuse_gradient_mode(step, path, frame)
        if now.default_dtype != self.default_dtype:
            raise UnsupportedStepError(
                f"{step} must call {path!r} with the default dtype {self.default_dtype} of the "
                f"step's start, since other ranks run its layers with that, got "
                f"{now.default_dtype}. Set it in the forward of a layer instead."
            )
        if not are_identical(now.functions, self.functions):
            known = set(map(id, self.functions))
            names = [_name(mode) for mode in now.functions if id(mode) not in known]
            raise UnsupportedStepError(
                f"{step} must call {path!r} outside of modes for torch functions and hooks for "
                "saved tensors, since other ranks run its layers without them, got a call within "
                f"{', '.join(names) or 'fewer of them than at the start of the step'}. Enter them "
                "in the forward of a layer, or train on a single device: Trainer(devices=1)."
            )

    def _refuse_gradient_mode(self, step: str, path: str, frame: CodeType) -> None:
        if checkpoint_around(frame) == "reentrant":
            raise UnsupportedStepError(
                f"{step} must call {path!r} where gradients are recorded, got a call within "
                "an activation checkpoint with use_reentrant=True. Set use_reentrant=False."
            )
        raise NeedsCutStepError(
            f"{step} must call {path!r} where gradients are recorded, since other ranks train "
            "its layers, got a call within torch.no_grad() or the like.",
            "Cut the step instead, where some modules may be called so: "
            "HeteroPipeStrategy(module='training_step').",
        )


def _name(mode: Any) -> str:
    """Return how an error names a mode, or a function that packs saved tensors."""
    return getattr(mode, "__qualname__", None) or type(mode).__name__
