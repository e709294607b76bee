"""Data-parallel ranks of a Trainer, as a loader counts them."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_dlres.prefetch.loading.ranks import Ranks
from lightning_dlres.strategies.capabilities import reads_for_all_ranks


def data_parallel_ranks(trainer: Trainer) -> tuple[Ranks, bool]:
    """Return the data-parallel rank of this process, and whether it shares a cache with the others
    of its host.

    They share one if the host's processes have consecutive data-parallel ranks. Under model
    parallelism they do not, and each has a cache of its own.
    """
    sampler_arguments = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    if sampler_arguments is None or reads_for_all_ranks(trainer.strategy):
        # There is one rank, or one that reads for all.
        return Ranks(), True
    rank, ranks = sampler_arguments["rank"], sampler_arguments["num_replicas"]
    first = trainer.node_rank * trainer.num_devices
    is_consecutive = ranks == trainer.world_size and rank == first + trainer.local_rank
    if is_consecutive:
        return Ranks(rank, ranks, tuple(range(first, first + trainer.num_devices))), True
    return Ranks(rank, ranks, (rank,)), False
