"""Layer that kills the process of a rank in the middle of training."""

from __future__ import annotations

import os
import signal

from torch import Tensor, nn


class KillingLayer(nn.Module):
    """Layer that kills its process in a given call, if it runs on the given rank.

    Args:
        victim: Rank whose process ends.
        fatal_call: Number of the call, from 1 on.

    Attributes:
        rank: Rank of this process. The model sets it when training starts.
    """

    def __init__(self, victim: int, fatal_call: int) -> None:
        super().__init__()
        self.victim, self.fatal_call, self.calls = victim, fatal_call, 0
        self.rank = -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.rank == self.victim and self.calls == self.fatal_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return x
