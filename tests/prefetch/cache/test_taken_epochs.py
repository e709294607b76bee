"""A job begins while processes of an earlier one, killed or failed, still use a cache by its name.

It waits for them to leave, or is refused. It never gets their samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_dlres.core.errors import EpochTakenError
from lightning_dlres.prefetch.cache import client
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.loading.ranks import Ranks
from lightning_dlres.prefetch.order.sequence import shuffled
from tests.prefetch.cache.test_cache_process import open_loader
from tests.support.sample_files import SAMPLES
from tests.support.waiting import wait_until

EPOCHS = 4


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def samples_of(loader: PrefetchLoader, epochs: int = EPOCHS) -> list[list[int]]:
    """Return the sample_ids of each epoch."""
    return [torch.cat(list(loader)).tolist() for _ in range(epochs)]


def orders(seed: int, epochs: int = EPOCHS) -> list[list[int]]:
    return [shuffled(SAMPLES, seed, epoch).tolist() for epoch in range(epochs)]


def start(loader: PrefetchLoader, epochs: int) -> Iterator[Tensor]:
    """Read `epochs` epochs, and begin the next one."""
    for _ in range(epochs):
        list(loader)
    iterator = iter(loader)
    next(iterator)
    return iterator


class CountingClock:
    """The clock of a client, which counts the pauses between attempts to begin an epoch."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.pauses = 0

    def sleep(self, seconds: float) -> None:
        self.pauses += 1
        time.sleep(seconds)


@pytest.mark.parametrize("seed", [0, 1], ids=["same-order", "other-order"])
@pytest.mark.parametrize("epoch", range(EPOCHS))
def test_a_job_waits_for_the_processes_of_an_earlier_one(
    stack: ExitStack,
    folder: Path,
    background: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    epoch: int,
) -> None:
    clock = CountingClock()
    monkeypatch.setattr(client, "time", clock)
    earlier = open_loader(stack, folder, "taken", seed=0)
    begun = start(earlier, epoch)
    later = open_loader(stack, folder, "taken", seed=seed)
    assert later.client.joined.pid == earlier.client.joined.pid
    delivered = background.submit(samples_of, later)
    wait_until(lambda: clock.pauses > 0, "the later job has been refused an epoch")
    del begun
    earlier.close()
    assert delivered.result(60) == orders(seed)


def test_a_job_does_not_join_an_epoch_that_only_other_ranks_of_an_earlier_one_have_begun(
    stack: ExitStack,
    folder: Path,
    background: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = CountingClock()
    monkeypatch.setattr(client, "time", clock)
    ranks = [Ranks(rank, 2, (0, 1)) for rank in range(2)]
    monkeypatch.setenv("MASTER_PORT", "1")
    earlier = [open_loader(stack, folder, "joined", rank) for rank in ranks]
    assert len({loader.client.joined.pid for loader in earlier}) == 1
    begun = start(earlier[1], 0)
    monkeypatch.setenv("MASTER_PORT", "2")
    later = [open_loader(stack, folder, "joined", rank) for rank in ranks]
    _ = [loader.client for loader in later]
    first = background.submit(start, later[0], 0)
    wait_until(lambda: clock.pauses > 0, "the later job has been refused an epoch")
    del begun
    for loader in earlier:
        loader.close()
    first.result(60)
    start(later[1], 0)


def test_an_epoch_of_an_earlier_job_that_has_left_is_not_continued(
    stack: ExitStack, folder: Path
) -> None:
    # Both ranks of the earlier job are in the third epoch when the later job begins its first.
    ranks = [open_loader(stack, folder, "left", Ranks(rank, 2, (0, 1))) for rank in range(2)]
    iterators = [start(loader, 0) for loader in ranks]
    for _ in range(2):
        for iterator in iterators:
            list(iterator)
        iterators = [start(loader, 0) for loader in ranks]
    later = open_loader(stack, folder, "left", seed=1)
    _ = later.client
    iterators.clear()
    for loader in ranks:
        loader.close()
    assert samples_of(later) == orders(1)


@pytest.mark.parametrize(
    ("seed", "message"),
    [(1, "All ranks must start the same epoch"), (0, "Each rank must begin an epoch once")],
)
def test_an_epoch_that_stays_taken_is_an_error(
    stack: ExitStack, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, message: str
) -> None:
    monkeypatch.setattr(client, "_TAKEN_SECONDS", 0.0)
    earlier = open_loader(stack, folder, "stays", seed=0)
    begun = start(earlier, 0)
    later = open_loader(stack, folder, "stays", seed=seed)
    with pytest.raises(EpochTakenError, match=message):
        next(iter(later))
    # The refusal has not disturbed the earlier job.
    assert torch.cat(list(begun)).tolist() == orders(0)[0][7:]
