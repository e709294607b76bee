"""What is put into a tier is whole, and its place is free again once nobody holds it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from lightning_dlres.memory.execute.pool import FreeList
from lightning_dlres.memory.execute.saved import ByteCounter
from lightning_dlres.memory.execute.tiers import Allocation, SlabTier


def put(tier: SlabTier, data: torch.Tensor, offset: int | None = None) -> Allocation | None:
    parcel = tier.take(data.numel(), offset)
    if parcel is not None:
        parcel.data.copy_(data)
    return parcel


def test_a_place_that_is_still_needed_is_not_written_over() -> None:
    tier = SlabTier(4096)
    first = put(tier, torch.full((700,), 1, dtype=torch.uint8), 1024)
    second = put(tier, torch.full((700,), 2, dtype=torch.uint8), 1024)
    assert first is not None
    assert second is not None
    assert bool((first.data == 1).all())
    assert bool((second.data == 2).all())
    del first
    third = put(tier, torch.full((100,), 3, dtype=torch.uint8), 1536)
    assert third is not None
    assert third.data.storage_offset() == 1536


@pytest.mark.parametrize("in_file", [False, True])
def test_a_place_is_free_once_nobody_holds_it(tmp_path: Path, in_file: bool) -> None:
    tier = SlabTier(4096, tmp_path if in_file else None)
    data = torch.arange(200, dtype=torch.uint8)
    parcels = [put(tier, data + n) for n in range(8)]
    assert put(tier, data) is None
    assert tier.taken == 1600
    for n, parcel in enumerate(parcels):
        assert parcel is not None
        assert torch.equal(parcel.data, data + n)
    del parcel, parcels[3]
    assert tier.taken == 1400
    assert put(tier, data) is not None


def test_the_garbage_collector_may_give_back_while_something_is_put(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier, take = SlabTier(4096), FreeList.take
    cycle: list[object] = [put(tier, torch.zeros(100, dtype=torch.uint8))]
    cycle.append(cycle)

    def take_and_collect(pool: FreeList, nbytes: int) -> int | None:
        gc.collect()
        return take(pool, nbytes)

    monkeypatch.setattr(FreeList, "take", take_and_collect)
    del cycle
    parcel = put(tier, torch.zeros(50, dtype=torch.uint8))
    assert parcel is not None
    assert tier.taken == 50


def test_a_ledger_knows_the_most_that_was_there() -> None:
    ledger = ByteCounter()
    for change in (10, 5, -12, 4):
        ledger.add(change)
    ledger.drop(7)
    assert (ledger.now, ledger.peak) == (0, 15)
