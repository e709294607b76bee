"""Small data set that the prefetch tests read from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

# Number of samples in the data set.
SAMPLES = 97


def bytes_of(sample_id: int) -> bytes:
    """Return the content of a sample's file: 0 to 399 bytes; every 11th file is empty."""
    size = (sample_id * 37) % 400 if sample_id % 11 else 0
    return np.random.default_rng(sample_id).integers(0, 256, size, dtype=np.uint8).tobytes()


def pack_of(store: Path, pack: int = 0) -> Path:
    """Return the path of pack file number `pack` in a store."""
    return sorted(store.glob("samples-*-of-*.bin"))[pack]
