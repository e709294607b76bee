"""Contents of the small data set in files that prefetch tests read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SAMPLES = 97


def bytes_of(number: int) -> bytes:
    """What file `number` holds: some are empty, some alike, most small."""
    size = (number * 37) % 400 if number % 11 else 0
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8).tobytes()


def pack_of(store: Path, pack: int = 0) -> Path:
    """The file of a store's pack."""
    return sorted(store.glob("samples-*-of-*.bin"))[pack]
