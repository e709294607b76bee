"""An engine that does to every saved_storage what a test says, and copies that are late."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.copies import Copies, DirectCopies, Ticket
from lightning_dlres.memory.execute.engine import SavedTensors
from lightning_dlres.memory.execute.reuse.function import Owner
from lightning_dlres.memory.execute.saved import Placement, SavedStorage
from lightning_dlres.memory.execute.spans import ByteSpan
from lightning_dlres.memory.execute.tiers import SlabTier

ROOM = 16 << 20


class LateCopies:
    """Copies as on a GPU's streams, at the last moment that is allowed: until somebody waits, the
    target holds garbage."""

    overlaps = True

    def out(self, source: Tensor, target: Tensor) -> Ticket:
        target.fill_(0xAB)
        return _Late(source, target)

    def back(self, source: Tensor, device: torch.device) -> tuple[Tensor, Ticket]:
        data = torch.full((source.numel(),), 0xCD, dtype=torch.uint8)
        return data, _Late(source, data)


class _Late:
    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source: Tensor | None = source
        self._target = target

    def wait(self) -> None:
        assert self._source is not None, "waited for twice"
        self._target.copy_(self._source)
        self._source = None


class ScriptedPolicy:
    """Does what a function says. With late copies, a saved_storage has left when the next one is saved, and
    comes back when the one used before it does."""

    def __init__(
        self, decide: Callable[[int, Tensor], MemoryAction], tier: SlabTier, copies: Copies
    ) -> None:
        self._decide, self._tier, self._copies = decide, tier, copies
        self._order: list[SavedStorage] = []

    def start(self) -> None:
        self._order.clear()

    def begin_save(self, tensor: Tensor, span: ByteSpan, number: int) -> Placement:
        self.wait_offloaded(1)
        return Placement(self._decide(number, tensor), self._tier, None, self._copies)

    def end_save(self, saved_storage: SavedStorage, done: bool) -> None:
        if self._copies.overlaps:
            self._order.append(saved_storage)

    def save_again(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        pass

    def begin_use(self, saved_storage: SavedStorage) -> None:
        self.wait_offloaded(1)

    def end_use(self, saved_storage: SavedStorage) -> None:
        if saved_storage in self._order:
            place = self._order.index(saved_storage)
            del self._order[place]
            for other in self._order[max(0, place - 2) : place]:
                other.wait_offloaded()
                other.fetch()

    def take_ownership(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        pass

    def wait_offloaded(self, but_for: int) -> None:
        for saved_storage in self._order[: max(0, len(self._order) - but_for)]:
            saved_storage.wait_offloaded()


class ScriptedEngine:
    """See `ScriptedPolicy`."""

    def __init__(
        self,
        decide: Callable[[int, Tensor], MemoryAction],
        directory: Path | None = None,
        min_bytes: int = 0,
        room: int = ROOM,
        late: bool = False,
    ) -> None:
        self.tier = SlabTier(room, directory)
        self._engine = SavedTensors(min_bytes)
        self._conductor = ScriptedPolicy(
            decide, self.tier, LateCopies() if late else DirectCopies()
        )
        self.ledger = self._engine.ledger

    def hooks(self, stays: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
        return self._engine.hooks(self._conductor, stays)

    @property
    def owner(self) -> Owner:
        return self._engine

    def forget(self) -> None:
        self._conductor.start()
