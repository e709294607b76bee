"""Rule that ends the warm-up of 1-bit Adam: the variance has become stable."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

# Checks per window. More of them would read the variance more often; fewer would prolong the
# warm-up by a larger part of a window.
_CHECKS_PER_WINDOW = 20
# Largest relative change of the variance's norm over a window for which it counts as stable.
_STABLE_CHANGE = 0.04


class FreezeRule:
    """Decides after which step the variance is frozen.

    With "auto", this is the first check at which the norm of the variance differs by less than 4 %
    from that of 1 / (1 - beta2) steps before (Tang et al., 2021). There are up to 20 checks in that
    time, so that few steps read the whole variance.

    Args:
        freeze_step: Number of steps of the warm-up, or "auto".
        beta2: Largest decay rate of the variance.

    Attributes:
        norms: Norms of the variance at the last checks, the oldest first.
    """

    def __init__(self, freeze_step: int | Literal["auto"], beta2: float) -> None:
        self._freeze_step = freeze_step
        window = max(1, round(1 / (1 - beta2)))
        self._interval = max(1, window // _CHECKS_PER_WINDOW)
        self._lag = math.ceil(window / self._interval)
        self.norms: list[float] = []

    def restore(self, norms: Iterable[float]) -> None:
        """Continue from the norms of an earlier run."""
        self.norms = list(norms)

    def needs_norm(self, step: int) -> bool:
        """Return True if the variance's norm must be added after a step, counted from 1."""
        return self._freeze_step == "auto" and step % self._interval == 0

    def add(self, norm: float) -> bool:
        """Add the norm of the variance at a check; return True if the variance is stable."""
        self.norms = [*self.norms, norm][-self._lag - 1 :]
        is_full = len(self.norms) > self._lag
        return is_full and abs(norm - self.norms[0]) < _STABLE_CHANGE * self.norms[0]

    def is_last(self, step: int) -> bool:
        """Return True if the warm-up ends with a step of a fixed number."""
        return self._freeze_step != "auto" and step >= self._freeze_step
