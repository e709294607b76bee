"""Flush of the CPU caches, before timed work that a step does once per micro-batch or batch.

In training, layers have filled the caches before such work. Repeated without a flush, the work
would find its own data in the caches, and look faster.
"""

from __future__ import annotations

import torch

# 32 MiB: more than one core's share of the caches.
FLUSH_BYTES = 32 << 20


class CpuCacheFlusher:
    """A buffer that is larger than the caches; writing to it evicts everything else."""

    def __init__(self) -> None:
        self._buffer = torch.zeros(FLUSH_BYTES, dtype=torch.uint8)

    def overwrite(self) -> None:
        """Fill the caches with the buffer, as layers fill them in training."""
        self._buffer.add_(1)
