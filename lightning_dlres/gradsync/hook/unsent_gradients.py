"""Residuals that no codec's state can take, until they are added to the next gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from lightning_dlres.codecs.gradient import RESIDUAL
from lightning_dlres.gradsync.execute.unit_run import is_zero
from lightning_dlres.gradsync.plan.graph import Part
from lightning_dlres.gradsync.plan.plan import RAW


class UnsentGradients:
    """Residuals of this rank by gradient, without the loss scale.

    They are added to the gradients of the next step. An optimizer may skip that step, so they are
    kept until the step after it begins.

    Attributes:
        was_filled: True once there were any. With torch's all-reduce, that is the same on all
            ranks, which get residuals together. But each rank adds its own when it has a gradient.
    """

    def __init__(self) -> None:
        self.was_filled = False
        self._values: dict[str, Tensor] = {}
        self._added: dict[str, Tensor] = {}

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to add to the next gradients."""
        return not self._values

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Keep residuals: float32[elements] by gradient."""
        self.was_filled |= bool(values)
        for name, value in values.items():
            self._values[name] = self._values[name] + value if name in self._values else value

    def begin(self) -> None:
        """Begin a step: forget what was added before, because the optimizer has used it."""
        self._added.clear()

    def add_to(
        self, gradients: Mapping[str, Tensor], loss_scale: float, unused: Collection[str] = ()
    ) -> bool:
        """Add the residuals to flat gradients by name; return True if there were any.

        Those of a gradient that is zero or `unused` stay: DistributedDataParallel drops the mean of
        a parameter that no rank has used.
        """
        names = [
            name
            for name in self._values.keys() & gradients.keys()
            if name not in unused and not is_zero(gradients[name])
        ]
        for name in names:
            value = self._added[name] = self._values.pop(name)
            # Scaled in float32: without the loss scale, small residuals vanish in float16.
            gradients[name].add_((value * loss_scale).to(gradients[name]))
        return bool(names)

    def undo(self, gradients: Collection[str] | None = None) -> None:
        """Take back what was added to gradients, or to all, because their optimizer has skipped the
        step."""
        undone = self._added.keys() if gradients is None else self._added.keys() & gradients
        self.put({name: self._added.pop(name) for name in list(undone)})

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of a checkpoint, in the form of `save_states`."""
        return [
            {
                "gradient": name,
                "start": 0,
                "stop": value.numel(),
                "part": int(Part.GRADIENT),
                "codec": RAW,
                "tensors": {RESIDUAL: value},
            }
            for name, value in self._values.items()
        ]
