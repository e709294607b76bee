"""What can be chosen for a step, under which limits, and what every choice holds on the device
while the device waits for every copy: what the integer program and the simulator agree on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from lightning_dlres.core.host.slab import aligned
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.profile.step_profile import Reuse, SavedStorageProfile


@dataclass(frozen=True)
class StorageChoice:
    """What happens to a saved_storage, and where it goes."""

    action: MemoryAction = MemoryAction.KEEP
    tier: str | None = None

    @property
    def leaves(self) -> bool:
        """Return whether it leaves the device."""
        return self.action in (MemoryAction.OFFLOAD, MemoryAction.BOTH)


KEEP = StorageChoice()

# Compressed data have so much more room than they took in the profile; what does not fit goes
# where what no plan knows goes.
SPARE = 1.1


@dataclass(frozen=True)
class MemoryLimits:
    """How much there may be.

    Attributes:
        device: bytes on the device, of all kinds.
        saved: bytes of data on the device.
        tiers: bytes in each tier; a tier that is missing has no limit.
    """

    device: float = inf
    saved: float = inf
    tiers: dict[str, float] = field(default_factory=dict)

    def of(self, tier: str) -> float:
        return self.tiers.get(tier, inf)


NO_LIMITS = MemoryLimits()


def away_bytes(saved_storage: SavedStorageProfile, choice: StorageChoice) -> int:
    """Return what a saved_storage takes in its tier."""
    if not choice.leaves:
        return 0
    return (
        saved_storage.packed or saved_storage.nbytes
        if choice.action is MemoryAction.BOTH
        else saved_storage.nbytes
    )


def room_for(saved_storage: SavedStorageProfile, choice: StorageChoice) -> int:
    """Return the room that is kept for a saved_storage in its tier."""
    if choice.action is MemoryAction.BOTH:
        return aligned(packed_room(saved_storage))
    return aligned(away_bytes(saved_storage, choice))


def packed_room(saved_storage: SavedStorageProfile, spare: float = SPARE) -> int:
    """Return the room that is kept for a saved_storage when it is compressed."""
    return min(int((saved_storage.packed or saved_storage.nbytes) * spare), saved_storage.nbytes)


def holding(
    saved_storage: SavedStorageProfile, choice: StorageChoice, spare: float = SPARE
) -> Iterator[tuple[int, int, int]]:
    """Yield the intervals, first to last, in which so many bytes of a saved_storage are on the device, if
    the device waits for every copy. Events are those of the intervals before them."""
    if choice.action is MemoryAction.KEEP:
        yield saved_storage.saved + 1, saved_storage.end + 1, saved_storage.nbytes
        return
    yield saved_storage.saved + 1, saved_storage.gone, saved_storage.nbytes
    yield saved_storage.uses[0] + 1, saved_storage.end + 1, saved_storage.nbytes
    if choice.action is MemoryAction.COMPRESS:
        yield saved_storage.saved + 1, saved_storage.end + 1, packed_room(saved_storage, spare)


def relief(saved_storage: SavedStorageProfile, reuse: Reuse) -> Iterator[tuple[int, int, int]]:
    """Yield the intervals, first to last, in which a reuse changes what is on the device, by so
    many bytes."""
    if reuse.signs:
        yield saved_storage.saved + 1, saved_storage.end + 1, reuse.signs
    if reuse.at is None:
        yield saved_storage.gone + 1, saved_storage.end + 1, -saved_storage.nbytes
        return
    # The gradient needs no memory of its own, and when the last reader is done, the saved_storage is it.
    yield reuse.at + 1, reuse.at + 1, -reuse.nbytes
    yield reuse.at + 2, saved_storage.end + 1, -saved_storage.nbytes
