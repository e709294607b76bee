"""Measurement of the links to the tiers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_dlres.core.host.slab import aligned
from lightning_dlres.memory.execute.transfer.direct_copier import DirectCopier
from lightning_dlres.memory.profile import links

CPU = torch.device("cpu")


@pytest.mark.parametrize("nbytes", [1 << 10, 3 << 20, 40 << 20])
def test_a_measurement_leaves_room_on_a_small_disk(
    nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, sizes, tier = 20 << 20, list[int](), links.SlabTier

    def small_disk(directory: Path) -> SimpleNamespace:
        assert directory == tmp_path
        return SimpleNamespace(free=free)

    def noted_tier(nbytes: int, directory: Path | None, pinned: bool) -> links.SlabTier:
        sizes.append(nbytes)
        return tier(nbytes, directory, pinned)

    monkeypatch.setattr(links.shutil, "disk_usage", small_disk)
    monkeypatch.setattr(links, "SlabTier", noted_tier)
    link = links.measure_link(
        "disk", DirectCopier(), CPU, directory=tmp_path, pinned=False, nbytes=nbytes
    )
    assert link.in_rate > 0
    (size,) = sizes
    assert aligned(2 << 20) <= size <= 0.75 * free
