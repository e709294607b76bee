"""Data-parallel ranks of a Trainer, in the form that `PrefetchLoader` takes."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.loading.ranks import Ranks
from lightning_dlres.strategies.capabilities import reads_for_all_ranks


def data_parallel_ranks(trainer: Trainer) -> tuple[Ranks, bool]:
    """Return (ranks of this process and host, True if the host's processes share a cache).

    The processes of a host share a cache if their data-parallel ranks are consecutive. Under model
    parallelism they are not, and each process has a separate cache.
    """
    sampler_arguments = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    if sampler_arguments is None or reads_for_all_ranks(trainer.strategy):
        # The strategy has one data-parallel rank, or one rank reads for all.
        return Ranks(), True
    rank, ranks = sampler_arguments["rank"], sampler_arguments["num_replicas"]
    first_rank = trainer.node_rank * trainer.num_devices
    is_consecutive = ranks == trainer.world_size and rank == first_rank + trainer.local_rank
    if is_consecutive:
        return Ranks(rank, ranks, tuple(range(first_rank, first_rank + trainer.num_devices))), True
    return Ranks(rank, ranks, (rank,)), False


def attached(trainer: Trainer | None) -> Trainer:
    """Return the Trainer of a data module.

    Raises:
        ConfigError: If there is none.
    """
    if trainer is None:
        raise ConfigError(
            "PrefetchCacheDataModule must be attached to a Trainer, got none. Pass it to one: "
            "trainer.fit(model, datamodule=...)."
        )
    return trainer
