"""Plan of gradient synchronisation: the units of all gradients, their codecs and their owners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dlres.gradsync.plan.units import GradientSpec, SyncUnit, assign_owners, cut

RAW = "raw"


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """Plan of gradient synchronisation, the same on all ranks.

    Attributes:
        world_size: Number of ranks.
        topology: "ps" (parameter server) or "ring".
        units: All units, by index.
    """

    world_size: int
    topology: str
    units: tuple[SyncUnit, ...]

    def units_of(self, gradient: str) -> list[SyncUnit]:
        """Return the units of a gradient, in the order of its elements."""
        return [unit for unit in self.units if unit.gradient == gradient]


@dataclass(frozen=True, kw_only=True)
class CodecChoice:
    """Codec and partitions of one gradient.

    Attributes:
        codec: Name of the codec; "raw" sends the elements as they are.
        partitions: Number of partitions.
    """

    codec: str
    partitions: int


def make_plan(
    gradients: Sequence[GradientSpec],
    choices: Sequence[CodecChoice],
    *,
    world_size: int,
    topology: str,
    alignment: int,
    shares: Sequence[float] | None = None,
) -> SyncPlan:
    """Return the plan for a choice per gradient.

    Args:
        gradients: The gradients, in the order of the model.
        choices: Codec and partitions of each gradient.
        world_size: Number of ranks.
        topology: "ps" or "ring".
        alignment: Elements at whose multiples partitions begin.
        shares: Share of the merging work of each rank; None: equal shares.
    """
    pieces = [
        (gradient.name, start, stop, choice.codec)
        for gradient, choice in zip(gradients, choices, strict=True)
        for start, stop in cut(gradient.count, choice.partitions, alignment)
    ]
    sizes = [stop - start for _, start, stop, _ in pieces]
    owners = assign_owners(sizes, shares or [1.0] * world_size)
    units = tuple(
        SyncUnit(index=index, gradient=name, start=start, stop=stop, codec=codec, owner=owner)
        for index, ((name, start, stop, codec), owner) in enumerate(
            zip(pieces, owners, strict=True)
        )
    )
    return SyncPlan(world_size=world_size, topology=topology, units=units)
