"""Data-parallel rank of a process, and the ranks that share its host."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dlres.core.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """Data-parallel rank of this process, and the ranks that share its host's cache.

    Attributes:
        rank: This process.
        ranks: Number of data-parallel ranks.
        local: Ranks that share the cache of this host, ascending.
    """

    rank: int = 0
    ranks: int = 1
    local: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        fits = all(0 <= rank < self.ranks for rank in self.local)
        if self.rank not in self.local or not fits or list(self.local) != sorted(set(self.local)):
            raise ConfigError(
                "local must be the ranks of this host, ascending, with this one among them, got "
                f"{self.local} for rank {self.rank} of {self.ranks}. Use local=({self.rank!r},)."
            )
