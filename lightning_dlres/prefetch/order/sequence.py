"""The order of an epoch (C2) and who gets what of it: pure functions of a few numbers, so that
every rank, after any restart and with any number of ranks, knows them without a word to the others.

The generator is written out here because a checkpoint outlives versions of NumPy, whose shuffles
may change.
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
Positions = NDArray[np.uint32]
# A position and a sample's number are kept in 32 bits, one of them for other uses.
MOST_SAMPLES = 2**31 - 1

_WORD = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # SplitMix64: Steele, Lea and Flood, OOPSLA 2014


def shuffled(count: int, seed: int, epoch: int) -> Positions:
    """Return uint32[count], the numbers of the samples in the order of this epoch: a permutation,
    each with the same probability (Fisher and Yates)."""
    order = np.arange(count, dtype=np.uint32)
    _shuffle(order, np.uint64(mixed(mixed(seed & _WORD) + epoch)))
    return order


@dataclass(frozen=True)
class ShardSpec:
    """How what is left of an epoch is dealt to ranks: one sample to each in turn.

    So the first n batches of all ranks are always the next n * ranks * batch samples of the epoch,
    and a run that goes on with other ranks loses and repeats nothing.

    Args:
        samples: how many the epoch has.
        consumed: how many of them have been trained on, by all ranks.
        ranks: among how many the rest is dealt.
        batch: samples in one batch of a rank.
        tail: what happens to samples that fill no batch of every rank. "drop": they are left out,
            so that all batches are full. "pad": samples from the start of the epoch are added until
            every rank has as many, and the last batch may be smaller. "uneven": nothing is left out
            or added, and some ranks have one sample less, perhaps one batch less.

    Raises:
        ConfigError: a number that cannot be.
    """

    samples: int
    consumed: int = 0
    ranks: int = 1
    batch: int = 1
    tail: Tail = "pad"

    def __post_init__(self) -> None:
        if not 0 <= self.samples <= MOST_SAMPLES:
            raise ConfigError(
                got_expected("samples", self.samples, f"0 to {MOST_SAMPLES}", "several data sets")
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
        """How many samples are dealt to all ranks, those dealt twice counted twice."""
        left = self.samples - self.consumed
        whole = self.ranks * self.batch
        if self.tail == "drop":
            return left // whole * whole
        return -(-left // self.ranks) * self.ranks if self.tail == "pad" else left

    def num_samples(self, rank: int) -> int:
        """Return how many samples a rank gets."""
        return self.num_assigned // self.ranks + (rank < self.num_assigned % self.ranks)

    def num_batches(self, rank: int) -> int:
        """Return how many batches a rank gets."""
        return -(-self.num_samples(rank) // self.batch)

    def consumed_after(self, batches: int) -> int:
        """Return how many samples of the epoch have been trained on after so many further batches
        of every rank; padding does not count."""
        return min(self.consumed + batches * self.ranks * self.batch, self.samples)

    def sample_ids(self, order: Positions, ranks: tuple[int, ...]) -> Positions:
        """Return the numbers of the samples dealt to some ranks (ascending), in the order of the
        epoch; `order` is uint32[samples].

        The j-th sample of the l-th of these ranks is at j * len(ranks) + l.
        """
        dealt = order[self.consumed : self.consumed + self.num_assigned]
        if (missing := self.num_assigned - len(dealt)) > 0:
            # More ranks than samples: the start of the epoch comes round again.
            dealt = np.concatenate([dealt, np.resize(order, missing)])
        if len(ranks) == self.ranks:
            return dealt
        chosen = np.zeros(self.ranks, dtype=np.bool_)
        chosen[list(ranks)] = True
        return dealt[np.resize(chosen, len(dealt))]


def mixed(word: int) -> int:
    """Return 64 bits in which every bit of a number counts (SplitMix64)."""
    word = (word + _STEP) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
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
        # Lemire, 2019: the upper half of a product is the number; what would make some numbers
        # likelier than others is drawn again.
        least = (np.uint64(1) << half) % choices
        while True:
            state += step
            word = state
            word = (word ^ (word >> np.uint64(30))) * first
            word = (word ^ (word >> np.uint64(27))) * second
            product = ((word ^ (word >> np.uint64(31))) >> half) * choices
            if (product & low) >= least:
                break
        other = np.int64(product >> half)
        order[last], order[other] = order[other], order[last]
