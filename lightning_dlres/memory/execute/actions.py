"""Actions that the engine can apply to a storage that autograd saves."""

from __future__ import annotations

from enum import Enum


class MemoryAction(Enum):
    """Treatment of a saved storage between its forward and its backward."""

    KEEP = "keep"
    COMPRESS = "compress"
    OFFLOAD = "offload"
    BOTH = "compress, offload"
