"""Shares of samples that follow the measured speed of the ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.strategies.compressed_ddp.balanced_loaders import (
    BalancedBatchSampler,
    SampleShares,
    balanced_loader,
)
from lightning_dlres.strategies.connection import Connection

# First steps of a run, which do not count: DistributedDataParallel and kernels are slow in them.
_WARM_UP_STEPS = 3
# Steps over which the first shares are measured. Each later measurement takes twice as many, since
# shares that are nearly right need little change.
_FIRST_STEPS = 8
# Largest number of steps of a measurement, so that shares still follow a host that slows down.
_MOST_STEPS = 256
# Batches that Lightning and the loader may have drawn from the sampler ahead of the step that
# trains. Each worker process draws further ones.
_DRAWN_BATCHES = 3


class SpeedBalance:
    """Shares of samples, given or measured.

    Args:
        shares: First share of each rank.
        is_measured: True if the shares follow the measured seconds per sample.
    """

    def __init__(self, shares: Sequence[float], *, is_measured: bool) -> None:
        self.shares = SampleShares(shares)
        self._is_measured = is_measured
        # Seconds per sample of this rank's steps since the last change.
        self._seconds: list[float] = []
        # Steps so far, the step after which the shares change next, and those that are measured
        # until then.
        self._steps, self._next_update = 0, _WARM_UP_STEPS + _FIRST_STEPS
        self._measured_steps = _FIRST_STEPS
        # Batches after the current one that some rank may have drawn already.
        self._drawn = _DRAWN_BATCHES
        self._sampler: BalancedBatchSampler | None = None

    def share(
        self, loader: object, connection: Connection, others: Sequence[object] = ()
    ) -> DataLoader[Any]:
        """Return a loader with this rank's part of each global batch; called by all ranks.

        Args:
            loader: DataLoader of this rank, with the distributed sampler that Lightning has added.
            connection: Connection to the other ranks.
            others: Other loaders of the same epoch.

        Raises:
            ConfigError: If the samples of the loader cannot be shared out, or there are others. A
                rank may then have another share of each, and a step's loss has only one weight.
        """
        if others:
            rule, fix = "one DataLoader if share_samples is set", "share_samples='equal'"
            raise ConfigError(got_expected("the training loader", "several", rule, fix))
        balanced = balanced_loader(loader, self.shares, connection.rank, connection.world_size)
        drawn = _DRAWN_BATCHES + balanced.num_workers * (balanced.prefetch_factor or 0)
        self._drawn = int(max(row[0] for row in connection.gather([float(drawn)])))
        assert isinstance(balanced.batch_sampler, BalancedBatchSampler)
        self._sampler = balanced.batch_sampler
        return balanced

    def weight(self, batch: int, rank: int) -> float:
        """Return a rank's samples of a batch over the mean of all ranks.

        Args:
            batch: Number of the batch since the loader's iterator was made.
            rank: The rank.
        """
        assert self._sampler is not None
        counts = self._sampler.counts(batch)
        return counts[rank] * len(counts) / sum(counts)

    def record(self, seconds_per_sample: float) -> None:
        """Record the seconds of computation for a sample in one step of this rank."""
        if self._is_measured:
            self._seconds.append(seconds_per_sample)

    def update(self, batch: int, connection: Connection) -> None:
        """Count a step; change the shares if enough steps were measured.

        All ranks call it after each step.

        Args:
            batch: Number of the step's batch since the loader's iterator was made.
            connection: Connection to the other ranks.
        """
        self._steps += 1
        if not self._is_measured or self._steps < self._next_update:
            return
        seconds = statistics.median(self._seconds[-self._measured_steps :] or [0.0])
        self._seconds.clear()
        measured = [row[0] for row in connection.gather([seconds])]
        # A rank reports 0 if it has measured no step.
        if min(measured) > 0:
            self.shares.change(batch + self._drawn, [1 / seconds for seconds in measured])
        self._measured_steps = min(2 * self._measured_steps, _MOST_STEPS)
        # The new shares apply only after the batches that are drawn already.
        self._next_update = self._steps + self._drawn + self._measured_steps


def checked_shares(shares: object) -> str | list[float]:
    """Return the argument `share_samples`, with shares as a new list of floats.

    Raises:
        ConfigError: If it is neither "equal" nor "speed" nor a list of positive numbers.
    """
    if shares in ("equal", "speed"):
        return str(shares)
    if (
        shares
        and isinstance(shares, (list, tuple))
        and all(_is_positive(share) for share in shares)
    ):
        return [float(share) for share in shares]
    rule = "'equal', 'speed' or a list of positive numbers"
    raise ConfigError(got_expected("share_samples", shares, rule, "share_samples='speed'"))


def _is_positive(share: object) -> bool:
    return isinstance(share, (int, float)) and 0 < share < float("inf")
