"""Table of the mirror's region: where each parameter, gradient and optimizer history lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_dlres.core.host.slab import aligned
from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes

Kind = Literal["parameter", "gradient", "history"]
KINDS: tuple[Kind, ...] = ("parameter", "gradient", "history")


@dataclass(frozen=True, kw_only=True)
class RegionItem:
    """Tensor that needs a place in the region.

    Attributes:
        kind: "parameter", "gradient" or "history".
        unit: Unit of the parameter.
        name: Name of the parameter in the model. For optimizer history, the number of the optimizer
            and the key of its state follow, such as "head.weight/0/exp_avg".
        dtype: Name of the dtype, such as "float32".
        nbytes: Bytes of its elements.
    """

    kind: Kind
    unit: int
    name: str
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class RegionTable:
    """Places of all items, in one flat region.

    Attributes:
        items: The items.
        offsets: Offset of each item in bytes.
        nbytes: Size of the region in bytes.
    """

    items: tuple[RegionItem, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def places(self, kind: Kind) -> Iterator[tuple[RegionItem, int]]:
        """Yield the items of a kind with their offsets."""
        for item, offset in zip(self.items, self.offsets, strict=True):
            if item.kind == kind:
                yield item, offset

    def bytes_of(self, kind: Kind) -> int:
        """Return the bytes of all items of a kind."""
        return sum(item.nbytes for item, _ in self.places(kind))

    def table(self) -> str:
        """Return the sizes as a table for printing."""
        rows = [
            [kind, sum(1 for _ in self.places(kind)), format_bytes(self.bytes_of(kind))]
            for kind in KINDS
        ]
        rows.append(["region", len(self.items), format_bytes(self.nbytes)])
        return render("Mirror in host memory", ["tensors", "number", "bytes"], rows)


def make_table(items: Iterable[RegionItem]) -> RegionTable:
    """Return a table in which the items of a unit lie together, parameters before all others.

    The update of a unit then walks through one part of the memory. All parameters form a prefix of
    the region, which other processes can share without the rest.
    """
    ordered = sorted(items, key=lambda item: (item.kind != "parameter", item.unit))
    offsets, end = [], 0
    for item in ordered:
        offsets.append(end)
        end += aligned(item.nbytes)
    return RegionTable(items=tuple(ordered), offsets=tuple(offsets), nbytes=end)
