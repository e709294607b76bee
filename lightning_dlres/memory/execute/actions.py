"""What can happen to memory that autograd has saved."""

from __future__ import annotations

from enum import Enum


class MemoryAction(Enum):
    """What happens to a saved_storage between its forward and its backward."""

    KEEP = "keep"
    COMPRESS = "compress"
    OFFLOAD = "offload"
    BOTH = "compress, offload"
