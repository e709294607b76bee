"""A loader that has ended repeats a batch until the other ranks' loaders end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.strategies.compressed_ddp.uneven_loaders import UnevenLoader


class StatefulLoader:
    """Loader that continues an epoch after `used` batches, as a stateful one does."""

    def __init__(self, batches: list[int], used: int) -> None:
        self.batches, self._used = batches, used

    def __iter__(self) -> Iterator[int]:
        first, self._used = self._used, 0
        yield from self.batches[first:]


def uneven(loader: StatefulLoader, others: int, next_batch: int) -> UnevenLoader:
    """Return a loader beside that of another rank, which has `others` batches left."""
    return UnevenLoader(
        loader,
        length=others,
        any_rank=lambda flag: flag,
        next_batch=lambda: next_batch,
        name="rank 1",
    )


def test_a_run_that_resumes_after_its_own_last_batch_repeats_one() -> None:
    loader = uneven(StatefulLoader([7, 8], used=2), others=3, next_batch=5)
    assert list(loader) == [7, 7, 7]
    assert not loader.has_data(5)


def test_a_run_that_resumes_before_its_last_batch_repeats_that_one() -> None:
    loader = uneven(StatefulLoader([7, 8], used=1), others=3, next_batch=5)
    assert list(loader) == [8, 8, 8]
    assert [loader.has_data(batch) for batch in (5, 6)] == [True, False]


def test_a_rank_without_any_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one batch on each rank, got 0 on rank 1"):
        list(uneven(StatefulLoader([], used=0), others=3, next_batch=0))
