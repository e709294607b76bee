"""Table of the mirror's regions, with the place of each parameter, gradient and history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_dlres.core.host.slab import aligned
from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes

Kind = Literal["parameter", "gradient", "history"]
KINDS: tuple[Kind, ...] = ("parameter", "gradient", "history")


@dataclass(frozen=True, kw_only=True)
class RegionItem:
    """Tensor that needs a place in the region of its kind.

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
    """Places of all items, in one region for each kind.

    Attributes:
        items: The items.
        offsets: Offset of each item in its region, in bytes.
        sizes: Size of each region in bytes. There is none for a kind without items.
    """

    items: tuple[RegionItem, ...]
    offsets: tuple[int, ...]
    sizes: Mapping[Kind, int]

    @property
    def nbytes(self) -> int:
        """Size of all regions in bytes."""
        return sum(self.sizes.values())

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
        rows.append(["all", len(self.items), format_bytes(self.nbytes)])
        return render("Mirror in host memory", ["tensors", "number", "bytes"], rows)


def make_table(items: Iterable[RegionItem]) -> RegionTable:
    """Return a table in which the items of a unit lie together in each region.

    The update of a unit then walks through one part of each. The regions end with their last
    tensors: a model outlives its optimizer, and must not keep the memory of the history.
    """
    ordered = sorted(items, key=lambda item: item.unit)
    offsets, sizes = [], dict[Kind, int]()
    for item in ordered:
        offsets.append(sizes.get(item.kind, 0))
        sizes[item.kind] = offsets[-1] + aligned(item.nbytes)
    return RegionTable(items=tuple(ordered), offsets=tuple(offsets), sizes=sizes)
