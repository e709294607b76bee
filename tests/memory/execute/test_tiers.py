"""Tiers: offloaded bytes stay whole, and are free once their references are dropped."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from lightning_dlres.memory.execute.transfer.free_list import FreeList
from lightning_dlres.memory.execute.transfer.tiers import Allocation, SlabTier


def put(tier: SlabTier, data: torch.Tensor, offset: int | None = None) -> Allocation | None:
    allocation = tier.allocate(data.numel(), offset)
    if allocation is not None:
        allocation.data.copy_(data)
    return allocation


def test_an_offset_in_use_is_not_overwritten() -> None:
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
def test_an_allocation_is_free_once_its_references_are_dropped(
    tmp_path: Path, in_file: bool
) -> None:
    tier = SlabTier(4096, tmp_path if in_file else None)
    data = torch.arange(200, dtype=torch.uint8)
    # A piece takes 512 bytes, so eight of them fill the tier.
    allocations = [put(tier, data + n) for n in range(8)]
    assert put(tier, data) is None
    assert tier.used_bytes == 1600
    for n, allocation in enumerate(allocations):
        assert allocation is not None
        assert torch.equal(allocation.data, data + n)
    del allocation, allocations[3]
    assert tier.used_bytes == 1400
    assert put(tier, data) is not None


def test_the_garbage_collector_may_free_during_an_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier, allocate = SlabTier(4096), FreeList.allocate
    cycle: list[object] = [put(tier, torch.zeros(100, dtype=torch.uint8))]
    cycle.append(cycle)

    def collect_and_allocate(free_list: FreeList, nbytes: int) -> int | None:
        gc.collect()
        return allocate(free_list, nbytes)

    monkeypatch.setattr(FreeList, "allocate", collect_and_allocate)
    del cycle
    allocation = put(tier, torch.zeros(50, dtype=torch.uint8))
    assert allocation is not None
    assert tier.used_bytes == 50
