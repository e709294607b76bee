"""The data-parallel ranks of a Trainer, as a loader counts them."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_dlres.prefetch.loading.ranks import Ranks
from lightning_dlres.strategies.capabilities import reads_for_all_ranks


def data_parallel_ranks(trainer: Trainer) -> tuple[Ranks, bool]:
    """Return who this process is among the data-parallel ranks, and whether those of this host can
    share a cache."""
    dealt = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    if dealt is None or reads_for_all_ranks(trainer.strategy):
        # There is only one, or one reads for all.
        return Ranks(), True
    rank, ranks = dealt["rank"], dealt["num_replicas"]
    first = trainer.node_rank * trainer.num_devices
    plain = ranks == trainer.world_size and rank == first + trainer.local_rank
    if plain:
        return Ranks(rank, ranks, tuple(range(first, first + trainer.num_devices))), True
    return Ranks(rank, ranks, (rank,)), False
