"""Ends of optimizer steps, each of which may take several backwards that synchronise gradients.

After an overflow, a gradient scaler does not call the optimizer. The caller then reports the end of
the skipped step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer


class OptimizerSteps:
    """Watch that notices the ends of optimizer steps by hooks of the optimizers.

    Args:
        optimizers: Optimizers, each of which ends the step; without any, each backward counts as a
            step.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._has_ended = True
        self._handles = [one.register_step_post_hook(self._end) for one in optimizers]

    def begin_backward(self) -> bool:
        """Return True if a backward continues the step of the backward before."""
        is_continued = bool(self._handles) and not self._has_ended
        self._has_ended = False
        return is_continued

    def end(self) -> None:
        """Note that the step has ended, or was skipped."""
        self._has_ended = True

    def close(self) -> None:
        """Remove the hooks of the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _end(self, *args: Any) -> None:
        self.end()
