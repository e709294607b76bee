"""Tests that an endless log stays short."""

from __future__ import annotations

from pathlib import Path

from lightning_dlres.core.host.disk import trim


def test_a_long_log_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as log:
        for _ in range(1000):
            log.write(b"x" * 99 + b"\n")
            trim(log.fileno(), 5000)
            assert path.stat().st_size <= 5000
        log.write(b"last\n")
    # The note begins with the removed number of bytes, just above 5000.
    assert path.read_bytes().startswith(b"(5")
    assert path.read_bytes().endswith(b"last\n")
