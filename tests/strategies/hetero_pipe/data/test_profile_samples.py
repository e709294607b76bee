"""Samples of the profile have the sizes of real micro-batches, for every kind of loader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_dlres import ConfigError, ProfileConfig
from lightning_dlres.pipeline.profile.config import ProfileSamples
from lightning_dlres.pipeline.stage.microbatch import samples_in
from lightning_dlres.strategies.hetero_pipe.data.profile_samples import read_samples
from lightning_dlres.strategies.hetero_pipe.replay.metrics import MetricStates
from lightning_dlres.strategies.hetero_pipe.step.module_search import find_pipelined_module
from lightning_dlres.strategies.hetero_pipe.step.step_context import StepContext
from tests.support.models import QUIET, Samples
from tests.support.training_cases import Classifier

MICROBATCHES = 3


class EvenSampler(BatchSampler):
    """Batch sampler of the user's, whose `batch_size` is none of its batches' sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([2 * at for at in range(8)], [3, 5])


class Stream(IterableDataset[Any]):
    """Stream of samples."""

    def __iter__(self) -> Iterator[Any]:
        source = Samples(False, 32)
        return (source[index] for index in range(len(source)))


def batch_sampler(kind: type[BatchSampler], batch_size: int) -> DataLoader[Any]:
    samples = Samples(False, 32)
    sampler = kind(SequentialSampler(samples), batch_size, drop_last=False)
    return DataLoader(samples, batch_sampler=sampler)


def ready_batches() -> DataLoader[Any]:
    """Return a loader of batches of eight samples, which the data set makes."""
    batches = list(DataLoader(Samples(False, 32), batch_size=8))
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


LOADERS = {
    "batch size": lambda: DataLoader(Samples(False, 32), batch_size=8),
    "batch sampler": lambda: batch_sampler(BatchSampler, 8),
    "own batch sampler": lambda: batch_sampler(EvenSampler, 5),
    "ready batches": ready_batches,
    "stream": lambda: DataLoader(Stream(), batch_size=8),
}


class CountsLoaders(Classifier):
    """Makes another loader in each call of `train_dataloader`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes = 0, list[int]()

    def train_dataloader(self) -> DataLoader[Any]:
        self.calls += 1
        self.sizes.append(4 * self.calls)
        self.samples = Samples(False, self.sizes[-1])
        return DataLoader(self.samples, batch_size=4)


class ConsumingData(LightningDataModule):
    """Takes its loaders' data from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {"left": [Samples(False, size) for size in (4, 8, 12)]}
        self.calls = 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.calls += 1
        return DataLoader(self.parts["left"].pop(0), batch_size=4)


def samples_of(
    loader: Any, module: LightningModule | None = None, **options: Any
) -> ProfileSamples:
    """Return the samples that are read when training on a loader starts.

    Args:
        loader: Loader, or datamodule; None for the module's own.
        module: Module to train; None for a `Classifier`.
        options: Options of the profile.
    """
    results = []

    class Reader(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            context = StepContext(
                pl_module,
                find_pipelined_module(pl_module, None),
                MetricStates(pl_module),
                torch.device("cpu"),
                nullcontext,
            )
            config = ProfileConfig(**options)
            results.append(read_samples(trainer, context, config, MICROBATCHES))

    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=[Reader()], **QUIET)
    trainer.fit(Classifier() if module is None else module, loader)
    return results[0]


def sizes_of(samples: ProfileSamples) -> list[int]:
    """Return the number of samples of each part."""
    sizes = [len(batch[0]) for batch in samples.batches]
    assert [samples_in(inputs) for inputs in samples.inputs] == sizes
    return sizes


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("count", "expected"), [(1, [1]), (3, [3]), (4, [2, 2]), (8, [3, 3, 2])])
def test_a_number_of_samples_is_profiled_in_parts_of_a_micro_batch(
    loader: str, count: int, expected: list[int]
) -> None:
    samples = samples_of(LOADERS[loader](), samples=count)
    assert sizes_of(samples) == expected
    assert samples.microbatches == MICROBATCHES
    assert len(samples.whole_batch[0]) >= 2


@pytest.mark.parametrize("loader", LOADERS)
def test_by_default_no_part_is_larger_than_a_micro_batch(loader: str) -> None:
    samples = samples_of(LOADERS[loader]())
    assert sizes_of(samples) in ([3], [3, 3, 2])
    assert samples.microbatches == MICROBATCHES


def test_a_batch_of_few_samples_has_as_many_micro_batches() -> None:
    loader = DataLoader(Samples(False, 4), batch_sampler=[[0, 1], [2, 3]])
    samples = samples_of(loader, samples=1)
    assert sizes_of(samples) == [1]
    assert samples.microbatches == 2


def test_a_loader_that_is_made_for_samples_leaves_no_trace() -> None:
    module, data = CountsLoaders(), ConsumingData()
    samples_of(None, module)
    assert (module.calls, module.sizes, len(module.samples)) == (1, [4], 4)
    samples_of(data)
    assert (data.calls, [len(part) for part in data.parts["left"]]) == (1, [8, 12])


class EmptyStream(IterableDataset[Any]):
    """Stream without samples, as of a folder that is empty."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_an_empty_training_set_is_named() -> None:
    with pytest.raises(ConfigError, match="The training set must not be empty"):
        samples_of(DataLoader(EmptyStream(), batch_size=8))
