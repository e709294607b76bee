"""Loaders that would read only one rank's part of the data.

They are changed to read all of it, or an error or a warning names them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from torch import Tensor
from torch.distributed import get_rank, get_world_size
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_dlres import ConfigError, PipelinePlan
from lightning_dlres.strategies.hetero_pipe.data.sharding import describe, undo_sharding
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Classifier, trainer_for

Sample = tuple[Tensor, Tensor, int]


def sample(index: int) -> Sample:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(16, generator=generator), torch.tensor(index % 5), index


class Numbered(Dataset[Sample]):
    """Dataset whose samples hold their number."""

    def __init__(self, indices: Any = range(30)) -> None:
        self.indices = list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return sample(self.indices[index])


class Stream(IterableDataset[Sample]):
    """Stream that divides its samples by the rank and world size at the time of reading."""

    def __init__(self, position: Callable[[], tuple[int, int]]) -> None:
        self.position = position

    def __iter__(self) -> Iterator[Sample]:
        rank, ranks = self.position()
        return map(sample, range(rank, 30, ranks))


class RecordsSamples(Classifier):
    """Model that records the numbers of all samples in training, validation and prediction."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.observed += batch[2].tolist()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.observed += batch[2].tolist()

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


# Positions are the rank and the number of ranks. `POSITION` is that of the run in progress.
ALONE = (0, 1)
POSITION = ALONE


def position_of_torch() -> tuple[int, int]:
    # A plain run has no process group.
    return (get_rank(), get_world_size()) if POSITION != ALONE else ALONE


def position_of_environment() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class ShardedData(LightningDataModule):
    """Data module that makes its loader in a hook, from the Trainer's rank and world size.

    Args:
        by_size: True: each rank has smaller batches. False: each rank has a part of the samples.
    """

    def __init__(self, by_size: bool) -> None:
        super().__init__()
        self.by_size = by_size

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        if self.by_size:
            return DataLoader(Numbered(), batch_size=8 // self.trainer.world_size)
        part = range(self.trainer.global_rank, 30, self.trainer.world_size)
        return DataLoader(Numbered(part), batch_size=8)


def sampler(**options: Any) -> DistributedSampler[Any]:
    rank, ranks = POSITION
    return DistributedSampler(Numbered(), num_replicas=ranks, rank=rank, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "sampler": lambda: DataLoader(Numbered(), batch_size=8, sampler=sampler()),
    "in order": lambda: DataLoader(
        Numbered(), batch_size=8, sampler=sampler(shuffle=False, drop_last=True)
    ),
    "batch sampler": lambda: DataLoader(
        Numbered(), batch_sampler=BatchSampler(sampler(seed=5), 8, drop_last=True)
    ),
    "stream, torch": lambda: DataLoader(Stream(position_of_torch), batch_size=8),
    "stream, worker": lambda: DataLoader(Stream(position_of_torch), batch_size=8, num_workers=1),
    "stream, environment": lambda: DataLoader(Stream(position_of_environment), batch_size=8),
    "data module": lambda: ShardedData(by_size=False),
    "batch size": lambda: ShardedData(by_size=True),
}


def samples_of(context: RankContext, name: str, piped: bool, stage: str = "fit") -> list[float]:
    """Return the sample numbers of a run, in order."""
    global POSITION
    POSITION = (context.rank, context.world_size) if piped else ALONE
    seed_everything(3, verbose=False)
    saved = {key: os.environ.get(key) for key in ("RANK", "WORLD_SIZE")}
    os.environ.update(zip(saved, map(str, POSITION), strict=True))
    plan = PipelinePlan(replicas=((0, 1, 2),), split=(2, 2, 1)) if context.world_size == 3 else None
    options = {"plan": plan, "stages": 3} if plan is not None else {}
    try:
        model, trainer = RecordsSamples(), trainer_for(context if piped else None, **options)
        data = LOADERS[name]()
        if stage == "fit":
            trainer.fit(model, data)
        else:
            getattr(trainer, stage)(model, data)
    finally:
        for key, value in saved.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    return model.observed


def compare(context: RankContext) -> dict[str, bool]:
    runs = [(name, "fit") for name in LOADERS]
    runs += [("sampler", "validate"), ("stream, torch", "validate"), ("batch sampler", "predict")]
    expected = {run: samples_of(context, run[0], False, run[1]) for run in runs}
    actual = {run: samples_of(context, run[0], True, run[1]) for run in runs}
    return {
        f"{n}, {s}": actual[n, s] == expected[n, s] and len(expected[n, s]) >= 24 for n, s in runs
    }


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_all_ranks_train_on_all_samples(pool: RankPool, ranks: int) -> None:
    for actual in pool.run(compare, ranks):
        assert all(actual.values()), actual


def test_the_undo_restores_the_user_s_sampler() -> None:
    own = DistributedSampler(Numbered(), num_replicas=4, rank=3)
    before, part = dict(vars(own)), list(own)
    undo = undo_sharding(DataLoader(own.dataset, batch_size=2, sampler=own))
    assert sorted(own) == list(range(30))
    assert len(own) == 30
    undo()
    assert vars(own) == before
    assert list(own) == part


class OtherSampler:
    """Sampler that counts its samples in another way than `DistributedSampler`."""

    def __init__(self) -> None:
        self.num_replicas, self.rank, self.num_samples = 2, 0, 7

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


def test_a_sampler_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"\.sampler .*num_replicas=1, rank=0"):
        undo_sharding(DataLoader(Numbered(), sampler=OtherSampler()))


class Divided(Numbered):
    """Dataset that has its rank and the number of ranks as attributes."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(range(30))
        self.rank, self.world = rank, ranks


def divided_before(context: RankContext) -> list[str]:
    model, messages = RecordsSamples(), []
    with pytest.raises(ConfigError) as error:
        trainer_for(context).fit(
            model, DataLoader(Divided(context.rank, context.world_size), batch_size=8)
        )
    messages.append(str(error.value))
    part = Numbered(range(context.rank, 30, context.world_size))
    with contextlib.ExitStack() as stack:
        if context.rank == 0:
            stack.enter_context(pytest.warns(UserWarning, match="only rank 0 reads"))
        trainer_for(context, max_epochs=1).fit(model, DataLoader(part, batch_size=8))
    return messages


def test_data_that_was_divided_before_the_run_is_named(pool: RankPool) -> None:
    for (message,) in pool.run(divided_before, 2):
        assert "DataLoader.dataset" in message
        assert "rank=0, world=2" in message


class Proxy:
    """Object that answers for attributes with an error, as a table or a remote object may do."""

    def __init__(self) -> None:
        self.names = ["a", "b"]

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_the_search_asks_no_code_of_the_users_for_attributes() -> None:
    dataset = Numbered()
    dataset.proxy, dataset.libraries = Proxy(), ctypes.cdll  # type: ignore[attr-defined]
    sampler = DistributedSampler(dataset, num_replicas=2, rank=1)
    loader = DataLoader(dataset, sampler=sampler, batch_size=5)
    undo = undo_sharding(loader)
    assert sampler.num_replicas == 1
    assert any("proxy" in path for path, *_ in describe(loader))
    undo()
    assert sampler.num_replicas == 2
