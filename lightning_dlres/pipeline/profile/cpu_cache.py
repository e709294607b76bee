"""Flush of the CPU caches, for the timing of what a step does once per micro-batch or batch.

In training, such work finds the caches full of layers. Repeated on its own it would look faster.
"""

from __future__ import annotations

import torch

# More bytes than one core's share of the caches.
COLD_BYTES = 32 << 20


class CpuCacheFlusher:
    """A buffer that is larger than the caches; writing to it evicts everything else."""

    def __init__(self) -> None:
        self._buffer = torch.zeros(COLD_BYTES, dtype=torch.uint8)

    def overwrite(self) -> None:
        """Fill the caches with the buffer, as layers fill them in training."""
        self._buffer.add_(1)
