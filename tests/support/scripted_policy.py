"""Scripted policy: an engine that treats every storage as a test says, and late copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.engine import SavedTensors
from lightning_dlres.memory.execute.policy import Placement
from lightning_dlres.memory.execute.reuse.function import MemoryOwner
from lightning_dlres.memory.execute.saved_storage import SavedStorage
from lightning_dlres.memory.execute.spans import ByteSpan
from lightning_dlres.memory.execute.transfer.copiers import Copier, DirectCopier, PendingCopy
from lightning_dlres.memory.execute.transfer.tiers import SlabTier

TIER_BYTES = 16 << 20


class LateCopier:
    """Copier whose copies happen at the last allowed time, as they may on a GPU's streams.

    Until a copy is waited for, its target holds garbage.
    """

    overlaps = True

    def to_tier(self, source: Tensor, target: Tensor) -> PendingCopy:
        target.fill_(0xAB)
        return _LateCopy(source, target)

    def to_device(self, source: Tensor, device: torch.device) -> tuple[Tensor, PendingCopy]:
        data = torch.full((source.numel(),), 0xCD, dtype=torch.uint8)
        return data, _LateCopy(source, data)

    def synchronize(self) -> None:
        pass


class _LateCopy:
    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source: Tensor | None = source
        self._target = target

    def wait(self) -> None:
        assert self._source is not None, "waited for twice"
        self._target.copy_(self._source)
        self._source = None


class ScriptedPolicy:
    """Policy that takes its actions from a function.

    With late copies a storage has left when the next one is saved. It is prefetched when the one
    that backward uses before it is restored.
    """

    def __init__(
        self, decide: Callable[[int, Tensor], MemoryAction], tier: SlabTier, copier: Copier
    ) -> None:
        self._decide, self._tier, self._copier = decide, tier, copier
        self._moved: list[SavedStorage] = []

    def start(self) -> None:
        self._moved.clear()

    def begin_save(self, tensor: Tensor, span: ByteSpan, number: int) -> Placement:
        self._wait_offloaded(1)
        return Placement(self._decide(number, tensor), self._tier, copier=self._copier)

    def end_save(self, saved_storage: SavedStorage, is_placed: bool) -> None:
        if self._copier.overlaps:
            self._moved.append(saved_storage)

    def save_again(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        pass

    def begin_use(self, saved_storage: SavedStorage) -> None:
        self._wait_offloaded(1)

    def end_use(self, saved_storage: SavedStorage) -> None:
        if saved_storage in self._moved:
            index = self._moved.index(saved_storage)
            del self._moved[index]
            for other in self._moved[max(0, index - 2) : index]:
                other.wait_offloaded()
                other.prefetch()

    def take_ownership(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        pass

    def _wait_offloaded(self, but_latest: int) -> None:
        for saved_storage in self._moved[: max(0, len(self._moved) - but_latest)]:
            saved_storage.wait_offloaded()


class ScriptedEngine:
    """Engine with a scripted policy, and one tier."""

    def __init__(
        self,
        decide: Callable[[int, Tensor], MemoryAction],
        directory: Path | None = None,
        min_bytes: int = 0,
        tier_bytes: int = TIER_BYTES,
        late: bool = False,
    ) -> None:
        self.tier = SlabTier(tier_bytes, directory)
        self._engine = SavedTensors(min_bytes)
        self._policy = ScriptedPolicy(decide, self.tier, LateCopier() if late else DirectCopier())
        self.byte_counter = self._engine.byte_counter

    def hooks(self, exempt: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
        return self._engine.hooks(self._policy, exempt)

    @property
    def owner(self) -> MemoryOwner:
        return self._engine

    def forget(self) -> None:
        self._policy.start()
