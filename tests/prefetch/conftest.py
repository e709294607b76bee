"""A small data set in files, and the same bytes beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

SAMPLES = 97


def bytes_of(number: int) -> bytes:
    """What file `number` holds: some are empty, some alike, most small."""
    size = (number * 37) % 400 if number % 11 else 0
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8).tobytes()


def pack_of(store: Path, pack: int = 0) -> Path:
    """The file of a store's pack."""
    return sorted(store.glob("samples-*-of-*.bin"))[pack]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `SAMPLES` files in two folders below it, in the order of their numbers."""
    root = tmp_path_factory.mktemp("data") / "set"
    for number in range(SAMPLES):
        path = root / f"part{number // 50}" / f"sample {number:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes_of(number))
    (root / ".hidden").write_bytes(b"not a sample")
    return root


@pytest.fixture(autouse=True)
def own_runtime_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Path:  # type: ignore[no-untyped-def]
    """Sockets and locks of each test apart, in a short path."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="dl") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield Path(short)
