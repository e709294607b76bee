"""Small data set in files that the tests of prefetch read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

# Number of samples.
SAMPLES = 97


def bytes_of(sample_id: int) -> bytes:
    """Return the content of a sample's file: some are empty, most have less than 400 bytes."""
    size = (sample_id * 37) % 400 if sample_id % 11 else 0
    return np.random.default_rng(sample_id).integers(0, 256, size, dtype=np.uint8).tobytes()


def pack_of(store: Path, pack: int = 0) -> Path:
    """Return the path of a pack of a store."""
    return sorted(store.glob("samples-*-of-*.bin"))[pack]
