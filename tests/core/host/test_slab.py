"""Slab: a file without a name or host memory, and requests that do not fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.host.slab import Slab


def test_the_file_of_a_slab_has_no_name(tmp_path: Path) -> None:
    slab = Slab(10_000, tmp_path)
    slab.piece(512, 100).fill_(7)
    assert list(tmp_path.iterdir()) == []
    assert slab.piece(500, 24).tolist() == [0] * 12 + [7] * 12


@pytest.mark.parametrize("place", [(-1, 5), (0, 1001), (1000, 1)])
def test_a_piece_beyond_the_slab_is_refused(place: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="within its 1000"):
        Slab(1000).piece(*place)


def test_a_slab_that_is_too_large_for_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of free space, got"):
        Slab(1 << 50, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory must be writable"):
        Slab(100, tmp_path / "absent")
