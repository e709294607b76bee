"""What a step does once for every micro-batch or batch finds the processor's caches full of layers.
Repeated on its own it would look faster than it is in training."""

from __future__ import annotations

import torch

# More than a core's share of the caches.
COLD_BYTES = 32 << 20


class CpuCacheFlusher:
    """The caches of the CPU, and as much memory as it takes to fill them."""

    def __init__(self) -> None:
        self._other = torch.zeros(COLD_BYTES, dtype=torch.uint8)

    def overwrite(self) -> None:
        """Fill them with something else, as layers do."""
        self._other.add_(1)
