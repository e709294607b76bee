"""Engine that treats every storage as a test says, with copies at once or at the last moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from lightning_dlres.core.device.copiers import Copier, PendingCopy
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.engine import OffloadEngine
from lightning_dlres.memory.execute.policy import Placement
from lightning_dlres.memory.execute.reuse.function import MemoryOwner
from lightning_dlres.memory.execute.saved_storage import SavedStorage
from lightning_dlres.memory.execute.spans import ByteSpan
from lightning_dlres.memory.execute.transfer.direct_copier import DirectCopier
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

    With late copies, it waits for the copy of a storage when the second storage after it is saved,
    or when backward begins to use a storage. After each use it prefetches the two storages that
    were saved before that one.
    """

    def __init__(
        self, decide: Callable[[int, Tensor], MemoryAction], tier: SlabTier, copier: Copier
    ) -> None:
        self._decide, self._tier, self._copier = decide, tier, copier
        # Saved storages that backward has not used yet, if copies overlap.
        self._copied: list[SavedStorage] = []

    def start(self) -> None:
        self._copied.clear()

    def begin_save(self, tensor: Tensor, span: ByteSpan, number: int) -> Placement:
        self._wait_offloaded(1)
        return Placement(self._decide(number, tensor), self._tier, copier=self._copier)

    def end_save(self, saved_storage: SavedStorage, is_placed: bool) -> None:
        if self._copier.overlaps:
            self._copied.append(saved_storage)

    def save_again(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        pass

    def begin_use(self, saved_storage: SavedStorage) -> None:
        self._wait_offloaded(1)

    def end_use(self, saved_storage: SavedStorage) -> None:
        if saved_storage in self._copied:
            index = self._copied.index(saved_storage)
            del self._copied[index]
            for other in self._copied[max(0, index - 2) : index]:
                other.wait_offloaded()
                other.prefetch()

    def take_ownership(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        pass

    def _wait_offloaded(self, except_latest: int) -> None:
        for saved_storage in self._copied[: max(0, len(self._copied) - except_latest)]:
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
        self._engine = OffloadEngine(min_bytes)
        self._policy = ScriptedPolicy(decide, self.tier, LateCopier() if late else DirectCopier())
        self.byte_counter = self._engine.byte_counter

    def hooks(self, exempt: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
        return self._engine.hooks(self._policy, exempt)

    @property
    def owner(self) -> MemoryOwner:
        return self._engine

    def start_step(self) -> None:
        """Drop the storages of the step before."""
        self._policy.start()
