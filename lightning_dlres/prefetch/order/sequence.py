"""Order of the samples in an epoch, and the share of them that each rank gets.

These are pure functions of a few numbers. Every rank computes the same order without communication,
after any restart and with any number of ranks.

The random generator is written out here and not taken from NumPy. Checkpoints outlive versions of
NumPy, which may change its shuffles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numba import uint32, uint64
from numpy.typing import NDArray

from lightning_dlres.core.checks import one_of
from lightning_dlres.core.compiled import compiled
from lightning_dlres.core.errors import ConfigError, got_expected

Tail = Literal["drop", "pad", "uneven"]
# uint32[n], indices of samples in the data set.
SampleIds = NDArray[np.uint32]
# Maximum number of samples in a data set. A sample id has 32 bits, one of which is reserved.
MAX_SAMPLES = 2**31 - 1

_WORD_MASK = 2**64 - 1
_SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15  # SplitMix64: Steele, Lea and Flood, OOPSLA 2014


def shuffled(count: int, seed: int, epoch: int) -> SampleIds:
    """Return uint32[count], all sample ids in the order of an epoch.

    Every permutation has the same probability (Fisher and Yates). Checkpoints depend on the result:
    it must never change.
    """
    order = np.arange(count, dtype=np.uint32)
    _shuffle(order, np.uint64(splitmix64(splitmix64(seed & _WORD_MASK) + epoch)))
    return order


@dataclass(frozen=True)
class ShardSpec:
    """Assignment of the rest of an epoch to ranks: one sample to each rank in turn.

    Thus the first n batches of all ranks are always the next n * ranks * batch samples of the
    epoch. A run that continues with another number of ranks skips and repeats no sample.

    Args:
        samples: Number of samples in the epoch.
        consumed: Number of samples that all ranks together have trained on before.
        ranks: Number of ranks that share the rest.
        batch: Number of samples in one batch of a rank.
        tail: Treatment of samples that do not fill a batch of every rank. "drop": they are left
            out, so that all batches are full. "pad": samples from the start of the epoch are added
            until all ranks have the same number; the last batch may be smaller. "uneven": nothing
            is left out or added; some ranks have one sample less, and perhaps one batch less.

    Raises:
        ConfigError: If a value is out of range.
    """

    samples: int
    consumed: int = 0
    ranks: int = 1
    batch: int = 1
    tail: Tail = "pad"

    def __post_init__(self) -> None:
        if not 0 <= self.samples <= MAX_SAMPLES:
            raise ConfigError(
                got_expected("samples", self.samples, f"0 to {MAX_SAMPLES}", "several data sets")
            )
        if not 0 <= self.consumed <= self.samples:
            raise ConfigError(
                got_expected("consumed", self.consumed, f"0 to {self.samples}", "consumed=0")
            )
        for name in ("ranks", "batch"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(
                    got_expected(name, getattr(self, name), "at least 1", f"{name}=1")
                )
        one_of("tail", self.tail, get_args(Tail), "tail='pad'")

    @property
    def num_assigned(self) -> int:
        """Number of samples assigned to all ranks; padding counts."""
        remaining = self.samples - self.consumed
        samples_per_step = self.ranks * self.batch
        if self.tail == "drop":
            return remaining // samples_per_step * samples_per_step
        return -(-remaining // self.ranks) * self.ranks if self.tail == "pad" else remaining

    def num_samples(self, rank: int) -> int:
        """Return the number of samples assigned to a rank."""
        return self.num_assigned // self.ranks + (rank < self.num_assigned % self.ranks)

    def num_batches(self, rank: int) -> int:
        """Return the number of batches of a rank."""
        return -(-self.num_samples(rank) // self.batch)

    def consumed_after(self, batches: int) -> int:
        """Return the number of samples that are consumed after further batches of every rank.

        Padding does not count.
        """
        return min(self.consumed + batches * self.ranks * self.batch, self.samples)

    def sample_ids(self, order: SampleIds, ranks: tuple[int, ...]) -> SampleIds:
        """Return the ids of the samples of some ranks, in the order of the epoch.

        Sample j of the l-th of these ranks is at index j * len(ranks) + l.

        Args:
            order: uint32[samples], the order of the epoch.
            ranks: Ranks to include, ascending.
        """
        assigned = order[self.consumed : self.consumed + self.num_assigned]
        if (missing := self.num_assigned - len(assigned)) > 0:
            # Pad with the epoch from its start, repeated if there are more ranks than samples.
            assigned = np.concatenate([assigned, np.resize(order, missing)])
        if len(ranks) == self.ranks:
            return assigned
        is_included = np.zeros(self.ranks, dtype=np.bool_)
        is_included[list(ranks)] = True
        return assigned[np.resize(is_included, len(assigned))]


def splitmix64(word: int) -> int:
    """Return a 64-bit hash of a number: the next output of SplitMix64 from this state."""
    word = (word + _SPLITMIX_INCREMENT) & _WORD_MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD_MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD_MASK
    return word ^ (word >> 31)


@compiled((uint32[::1], uint64), nogil=True)
def _shuffle(order: Any, state: Any) -> None:
    step, first, second = (
        np.uint64(0x9E3779B97F4A7C15),
        np.uint64(0xBF58476D1CE4E5B9),
        np.uint64(0x94D049BB133111EB),
    )
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for last in range(len(order) - 1, 0, -1):
        choices = np.uint64(last + 1)
        # Lemire, 2019: the upper half of a product is the random index. A draw whose lower half is
        # below the threshold is repeated. Otherwise some indices would be likelier than others.
        threshold = (np.uint64(1) << half) % choices
        while True:
            state += step
            word = state
            word = (word ^ (word >> np.uint64(30))) * first
            word = (word ^ (word >> np.uint64(27))) * second
            product = ((word ^ (word >> np.uint64(31))) >> half) * choices
            if (product & low) >= threshold:
                break
        other = np.int64(product >> half)
        order[last], order[other] = order[other], order[last]
