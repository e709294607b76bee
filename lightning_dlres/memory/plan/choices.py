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
    """What happens to a datum, and where it goes."""

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


def away_bytes(datum: SavedStorageProfile, choice: StorageChoice) -> int:
    """Return what a datum takes in its tier."""
    if not choice.leaves:
        return 0
    return datum.packed or datum.nbytes if choice.action is MemoryAction.BOTH else datum.nbytes


def room_for(datum: SavedStorageProfile, choice: StorageChoice) -> int:
    """Return the room that is kept for a datum in its tier."""
    if choice.action is MemoryAction.BOTH:
        return aligned(packed_room(datum))
    return aligned(away_bytes(datum, choice))


def packed_room(datum: SavedStorageProfile, spare: float = SPARE) -> int:
    """Return the room that is kept for a datum when it is compressed."""
    return min(int((datum.packed or datum.nbytes) * spare), datum.nbytes)


def holding(
    datum: SavedStorageProfile, choice: StorageChoice, spare: float = SPARE
) -> Iterator[tuple[int, int, int]]:
    """Yield the intervals, first to last, in which so many bytes of a datum are on the device, if
    the device waits for every copy. Events are those of the intervals before them."""
    if choice.action is MemoryAction.KEEP:
        yield datum.saved + 1, datum.end + 1, datum.nbytes
        return
    yield datum.saved + 1, datum.gone, datum.nbytes
    yield datum.uses[0] + 1, datum.end + 1, datum.nbytes
    if choice.action is MemoryAction.COMPRESS:
        yield datum.saved + 1, datum.end + 1, packed_room(datum, spare)


def relief(datum: SavedStorageProfile, reuse: Reuse) -> Iterator[tuple[int, int, int]]:
    """Yield the intervals, first to last, in which a reuse changes what is on the device, by so
    many bytes."""
    if reuse.signs:
        yield datum.saved + 1, datum.end + 1, reuse.signs
    if reuse.at is None:
        yield datum.gone + 1, datum.end + 1, -datum.nbytes
        return
    # The gradient needs no memory of its own, and when the last reader is done, the datum is it.
    yield reuse.at + 1, reuse.at + 1, -reuse.nbytes
    yield reuse.at + 2, datum.end + 1, -datum.nbytes
