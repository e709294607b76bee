"""Choices for a saved storage, memory limits, and the bytes on the device under each choice.

The integer program and the simulator share these definitions. The bytes are those of a device that
waits for every copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from lightning_dlres.core.host.slab import aligned
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.profile.step_profile import Reuse, SavedStorageProfile


@dataclass(frozen=True)
class StorageChoice:
    """Action for a saved storage, and the tier that it is offloaded to."""

    action: MemoryAction = MemoryAction.KEEP
    tier: str | None = None

    @property
    def uses_tier(self) -> bool:
        """Return whether the storage moves to a tier."""
        return self.action in (MemoryAction.OFFLOAD, MemoryAction.BOTH)


KEEP = StorageChoice()

# Reserved capacity of a compressed storage, as a multiple of its compressed size in the profile. A
# storage that compresses worse in a later step goes to the fallback tier.
PACKED_MARGIN = 1.1


@dataclass(frozen=True)
class MemoryLimits:
    """Limits of a plan.

    Attributes:
        device: Bytes on the device in total.
        saved: Bytes of saved storages on the device.
        tiers: Bytes in each tier, by name; a tier without an entry has no limit.
    """

    device: float = inf
    saved: float = inf
    tiers: dict[str, float] = field(default_factory=dict)

    def of(self, tier: str) -> float:
        """Return the limit of a tier in bytes."""
        return self.tiers.get(tier, inf)


NO_LIMITS = MemoryLimits()


def tier_bytes(storage: SavedStorageProfile, choice: StorageChoice) -> int:
    """Return the bytes of a storage in its tier; 0 if it stays on the device."""
    if not choice.uses_tier:
        return 0
    if choice.action is MemoryAction.BOTH and storage.packed:
        return storage.packed
    return storage.nbytes


def tier_capacity(storage: SavedStorageProfile, choice: StorageChoice) -> int:
    """Return the bytes that are reserved for a storage in its tier, aligned to the slab."""
    if choice.action is MemoryAction.BOTH:
        return aligned(packed_capacity(storage))
    return aligned(tier_bytes(storage, choice))


def packed_capacity(storage: SavedStorageProfile, margin: float = PACKED_MARGIN) -> int:
    """Return the bytes that are reserved for the compressed form of a storage.

    Args:
        storage: Storage to compress.
        margin: Reserved bytes as a multiple of the compressed size in the profile.
    """
    return min(int((storage.packed or storage.nbytes) * margin), storage.nbytes)


def held_bytes(
    storage: SavedStorageProfile, choice: StorageChoice, margin: float = PACKED_MARGIN
) -> Iterator[tuple[int, int, int]]:
    """Yield (first interval, last interval, bytes) of a storage on the device.

    The device is assumed to wait for every copy. A storage that is saved or used at event `i`
    counts in interval `i + 1`, the one after the event.
    """
    if choice.action is MemoryAction.KEEP:
        yield storage.saved + 1, storage.end + 1, storage.nbytes
        return
    yield storage.saved + 1, storage.shared_until, storage.nbytes
    yield storage.uses[0] + 1, storage.end + 1, storage.nbytes
    if choice.action is MemoryAction.COMPRESS:
        yield storage.saved + 1, storage.end + 1, packed_capacity(storage, margin)


def reuse_changes(storage: SavedStorageProfile, reuse: Reuse) -> Iterator[tuple[int, int, int]]:
    """Yield (first interval, last interval, change in bytes) of a reuse on the device.

    The change is against keeping the storage.
    """
    if reuse.signs:
        yield storage.saved + 1, storage.end + 1, reuse.signs
    if reuse.overwritten_at is None:
        yield storage.shared_until + 1, storage.end + 1, -storage.nbytes
        return
    # While the last reader runs, this part of its gradient needs no memory of its own. Afterwards
    # the storage's memory is the gradient's, whose bytes the profile's base counts already.
    yield reuse.overwritten_at + 1, reuse.overwritten_at + 1, -reuse.nbytes
    yield reuse.overwritten_at + 2, storage.end + 1, -storage.nbytes
