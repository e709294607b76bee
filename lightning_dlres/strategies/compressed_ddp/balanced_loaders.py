"""Training loaders that give faster ranks more samples of each global batch.

The ranks together take the batches that they would take with equal shares: a permutation of all
samples, cut into global batches. Only the division of a global batch among the ranks differs. Each
gradient is weighted by its samples, so the mean is that of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import Sampler as TorchSampler

from lightning_dlres.core.errors import ConfigError, got_expected

# Arguments of a DataLoader that a loader with another batch sampler takes over.
_LOADER_ARGUMENTS = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class SampleShares:
    """Shares of the ranks, which may change from some batch on.

    Args:
        shares: Share of each rank; only their ratios count.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        # First batch and shares; the last entry whose batch has come applies.
        self._changes: list[tuple[int, list[float]]] = [(0, list(shares))]

    @property
    def current(self) -> list[float]:
        """The newest shares."""
        return self._changes[-1][1]

    def change(self, first_batch: int, shares: Sequence[float]) -> None:
        """Change the shares from a batch on; no rank may have drawn this batch yet."""
        self._changes.append((first_batch, list(shares)))

    def restart(self) -> None:
        """Number batches from 0 again, with the newest shares."""
        self._changes = [(0, self.current)]

    def divide(self, batch: int, count: int) -> list[int]:
        """Return the samples of each rank in a batch of `count` samples.

        Cumulative sums over the ranks are rounded to whole numbers, so every rank is within a
        sample of its share. Then each rank without a sample takes one from the rank with the most,
        if there are enough for all ranks.
        """
        shares = next(shares for first, shares in reversed(self._changes) if first <= batch)
        ranks, total = len(shares), sum(shares)
        if count < ranks:
            return [1] * count + [0] * (ranks - count)
        bounds = [round(count * sum(shares[:rank]) / total) for rank in range(ranks + 1)]
        counts = [stop - start for start, stop in pairwise(bounds)]
        while 0 in counts:
            counts[counts.index(max(counts))] -= 1
            counts[counts.index(0)] = 1
        return counts


class BalancedBatchSampler(TorchSampler[list[int]]):
    """Batch sampler of one rank: its part of each global batch.

    A rank has a batch less if it has no sample in the last one.

    Args:
        sampler: Lightning's sampler of this rank; it is changed to one over all samples.
        batch_size: Samples of a global batch.
        drop_last: True leaves out an incomplete last batch.
        shares: Shares of the ranks.
        rank: This rank.

    Attributes:
        sampler: Sampler over all samples, whose epoch Lightning sets.
        batch_size: Samples of a global batch.
        drop_last: True leaves out an incomplete last batch.
    """

    def __init__(
        self,
        sampler: DistributedSampler[Any],
        batch_size: int,
        drop_last: bool,
        shares: SampleShares,
        rank: int,
    ) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self._shares, self._rank = shares, rank
        sampler.num_replicas, sampler.rank = 1, 0
        sampler.num_samples = sampler.total_size = len(sampler.dataset)  # type: ignore[arg-type]

    def counts(self, batch: int) -> list[int]:
        """Return the samples of each rank in a batch of the epoch."""
        remaining = self.sampler.total_size - batch * self.batch_size
        return self._shares.divide(batch, max(min(self.batch_size, remaining), 0))

    def __len__(self) -> int:
        whole, rest = divmod(self.sampler.total_size, self.batch_size)
        # Only the last batch may have fewer samples than ranks. Its first ranks then get one sample
        # each, whatever the shares.
        return whole + (1 if not self.drop_last and self._shares.divide(0, rest)[self._rank] else 0)

    def __iter__(self) -> Iterator[list[int]]:
        self._shares.restart()
        order = list(self.sampler)
        for batch in range(len(self)):
            counts = self.counts(batch)
            start = batch * self.batch_size + sum(counts[: self._rank])
            yield order[start : start + counts[self._rank]]


def balanced_loader(
    loader: object, shares: SampleShares, rank: int, world_size: int
) -> DataLoader[Any]:
    """Return a loader with a rank's part of each global batch.

    Args:
        loader: DataLoader of this rank, with the distributed sampler that Lightning has added.
        shares: Shares of the ranks.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        ConfigError: If the loader is no DataLoader, or has another sampler or a batch sampler.
    """
    if not isinstance(loader, DataLoader):
        got, fix = type(loader).__name__, "share_samples='equal'"
        raise ConfigError(
            got_expected("the training loader", got, "a DataLoader if share_samples is set", fix)
        )
    if not isinstance(loader.sampler, DistributedSampler) or loader.batch_size is None:
        got = f"sampler {type(loader.sampler).__name__}"
        if isinstance(loader.dataset, IterableDataset):
            got = f"the iterable-style dataset {type(loader.dataset).__name__}"
        elif loader.batch_size is None:
            got = f"batch_size=None with batch_sampler {type(loader.batch_sampler).__name__}"
        raise ConfigError(
            got_expected(
                "the training loader",
                got,
                "a DataLoader with batch_size and a map-style dataset, whose sampler Lightning "
                "distributes, if share_samples is set",
                "share_samples='equal'",
            )
        )
    sampler = BalancedBatchSampler(
        loader.sampler, loader.batch_size * world_size, loader.drop_last, shares, rank
    )
    if type(loader) is DataLoader:
        known = {name: getattr(loader, name) for name in _LOADER_ARGUMENTS if hasattr(loader, name)}
        return DataLoader(batch_sampler=sampler, **known)
    # A subclass may have a constructor of its own. A DataLoader refuses assignments of its sampler,
    # but reads it only when an iterator is made. Persistent workers would keep an iterator with the
    # old sampler.
    balanced = copy(loader)
    balanced.__dict__.update(batch_sampler=sampler, persistent_workers=False)
    return balanced
