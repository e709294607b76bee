"""Units of gradient synchronisation: partitions of gradients, each owned by one rank.

One codec call encodes exactly one unit. A large gradient may be cut into partitions, so that all
ranks share the work of merging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_dlres.core.errors import ConfigError, got_expected

# A gradient is cut if it has more than 1 / (this number x ranks) of all elements. A smaller number
# balances the owners' work less well. A larger one adds the fixed time of more partitions.
_PIECES_PER_RANK = 4


@dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """A gradient to be synchronised.

    Attributes:
        name: Name of the parameter.
        count: Number of elements.
        is_compressible: False for a gradient that no codec may change.
    """

    name: str
    count: int
    is_compressible: bool = True

    def is_compressed(self, least_elements: int) -> bool:
        """Return True if a codec for gradients of at least `least_elements` compresses this one."""
        return self.is_compressible and self.count >= least_elements


@dataclass(frozen=True, kw_only=True)
class SyncUnit:
    """A partition of a gradient.

    Attributes:
        index: Number of the unit in the plan.
        gradient: Name of the parameter.
        start: First element in the flat gradient.
        stop: Index after the last element in the flat gradient.
        codec: Name of the codec; "raw" sends the elements as they are.
        owner: Rank that merges the unit (topology "ps"), or at which its ring begins ("ring").
    """

    index: int
    gradient: str
    start: int
    stop: int
    codec: str
    owner: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def cut(count: int, partitions: int, alignment: int) -> list[tuple[int, int]]:
    """Return the bounds of nearly equal partitions of `count` elements.

    Partitions begin at multiples of `alignment`, and there are fewer of them if a gradient is too
    small for as many. An empty gradient has one empty partition.
    """
    blocks = -(-count // alignment)
    partitions = max(min(partitions, blocks), 1)
    bounds = [min(blocks * i // partitions * alignment, count) for i in range(partitions + 1)]
    return list(pairwise(bounds))


def partitions_for(count: int, total: int, world_size: int) -> int:
    """Return the number of partitions that let all ranks share the merging of a gradient.

    Each partition costs time of its own on every rank. A gradient is therefore only cut if it is
    larger than its part of a fair division of all gradients.

    Args:
        count: Elements of the gradient.
        total: Elements of all gradients.
        world_size: Number of ranks.
    """
    piece = max(total // (_PIECES_PER_RANK * world_size), 1)
    return max(1, min(world_size, -(-count // piece)))


def assign_owners(sizes: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Return an owner for each size, so that what a rank owns is proportional to its share.

    The largest size goes first, to the rank whose sum would be smallest in relation to its share
    (Graham's rule for parallel machines, 1969). Ties go to the lowest rank.

    Args:
        sizes: Sizes, such as elements of units.
        shares: Share of each rank, at least one of them positive. A rank with the share 0 owns
            nothing.

    Raises:
        ConfigError: If a share is negative or all are 0.
    """
    if not shares or min(shares) < 0 or max(shares) <= 0:
        raise ConfigError(
            got_expected("shares", list(shares), "at least 0, and one above 0", "[1.0, 1.0]")
        )
    sums = [0.0] * len(shares)
    owners = [0] * len(sizes)
    ranks = [rank for rank, share in enumerate(shares) if share > 0]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = max(sizes[index], 1)
        owner = min(ranks, key=lambda rank: ((sums[rank] + size) / shares[rank], rank))
        owners[index] = owner
        sums[owner] += size
    return owners
