"""Data-parallel rank of a process, and the ranks that share its host."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dlres.core.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """Data-parallel rank of this process, and the ranks that share its host's cache.

    Attributes:
        rank: Data-parallel rank of this process.
        num_ranks: Number of data-parallel ranks.
        local_ranks: Ranks that share the cache of this host, ascending.
    """

    rank: int = 0
    num_ranks: int = 1
    local_ranks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        are_valid = all(0 <= rank < self.num_ranks for rank in self.local_ranks)
        is_ascending = list(self.local_ranks) == sorted(set(self.local_ranks))
        if self.rank not in self.local_ranks or not are_valid or not is_ascending:
            raise ConfigError(
                "local_ranks must be ascending ranks that include the rank of this process, got "
                f"{self.local_ranks} for rank {self.rank} of {self.num_ranks}. "
                f"Use local_ranks=({self.rank!r},)."
            )
