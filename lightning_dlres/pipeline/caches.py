"""What a step does once for every micro-batch or batch finds the processor's caches full of layers.
Repeated on its own it would look faster than it is in training."""

from __future__ import annotations

import torch

# More than a core's share of the caches.
COLD_BYTES = 32 << 20


class Caches:
    """The caches of a CPU; nothing where the device is another."""

    def __init__(self, device: torch.device) -> None:
        size = COLD_BYTES if device.type == "cpu" else 0
        self._other = torch.zeros(size, dtype=torch.uint8)

    def overwrite(self) -> None:
        """Fill them with something else, as layers do."""
        self._other.add_(1)
