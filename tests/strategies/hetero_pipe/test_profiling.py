"""Tests of profiling: it does not change the data of training.

If a rank lacks memory for profiling, training continues with a split by parameter bytes. Any other
error ends the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_dlres import HeteroPipeStrategy, PeerLostError
from lightning_dlres.strategies.hetero_pipe.data.loader_copy import copy_loader
from tests.support.models import Samples
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, Classifier, batches, differences_in


class ReadOnceStream(IterableDataset[Any]):
    """Stream that can be read only once.

    Args:
        generator: True: the rows are a generator, which cannot be copied.
    """

    def __init__(self, generator: bool) -> None:
        source = Samples(False, 40)
        rows = [source[index] for index in range(len(source))]
        self.rows: Iterator[Any] = (row for row in rows) if generator else iter(rows)

    def __iter__(self) -> Iterator[Any]:
        return self.rows


class NoisySamples(Samples):
    """Samples with noise that depends on a random generator and the number of reads."""

    def __init__(self) -> None:
        super().__init__(False, 32)
        self.generator, self.num_reads = torch.Generator().manual_seed(11), 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        self.num_reads += 1
        return x + torch.randn(16, generator=self.generator) / self.num_reads, y


def shuffled_loader() -> DataLoader[Any]:
    """Return a shuffled loader that has its own random generator."""
    generator = torch.Generator().manual_seed(5)
    return DataLoader(Samples(False, 32), batch_size=8, shuffle=True, generator=generator)


class RecordsBatches(Classifier):
    """Model that records a checksum of every batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.observed.append(float(batch[0].sum()))


class AugmentsBatches(RecordsBatches):
    """Model whose transfer hooks change each batch differently."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers, self.generator = 0, torch.Generator().manual_seed(11)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers += 1
        return [batch[0] * (1 + 0.1 * self.transfers), batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn(16, generator=self.generator), batch[1]]


class ModelTooLargeForRank0(Classifier):
    """Model with two layers that exceed the memory limit of rank 0.

    It checks that the plan puts them on rank 1, although rank 0 could not measure them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5000), nn.Tanh(), nn.Linear(5000, 5)
        )

    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, HeteroPipeStrategy):
            assert strategy.plan is not None
            assert strategy.plan.is_measured
            (replica,) = strategy.plan.replicas
            assert {2, 4} <= set(strategy.plan.layers_of(replica.index(1)))
            assert strategy.plan.layers[2].parameter_bytes == 17 * 5000 * 4
            assert strategy.plan.layers[2].output_bytes == 3 * 5000 * 4


class TwoLoadersModel(RecordsBatches):
    """Model that gets each batch from two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = batch.values() if isinstance(batch, dict) else batch
        both = [torch.cat(pair) for pair in zip(first, second, strict=True)]
        return super().training_step(both, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        values = batch.values() if isinstance(batch, dict) else batch
        self.observed += [float(inputs.sum()) for inputs, _ in values]


def two_loaders() -> list[DataLoader[Any]]:
    return [shuffled_loader(), DataLoader(Samples(False, 20), batch_size=4, shuffle=True)]


def named_loaders() -> dict[str, DataLoader[Any]]:
    return dict(zip("ab", two_loaders(), strict=True))


# Options of a strategy that profiles the layers before it plans.
PROFILE_FIRST = {"plan": None}
CASES = {
    "list of loaders": Case(TwoLoadersModel, data=two_loaders, options=PROFILE_FIRST),
    "dict of loaders": Case(TwoLoadersModel, data=named_loaders, options=PROFILE_FIRST),
    "combined loader": Case(
        TwoLoadersModel,
        data=lambda: CombinedLoader(named_loaders(), "min_size"),
        options=PROFILE_FIRST,
    ),
    "stream": Case(
        RecordsBatches,
        data=lambda: DataLoader(ReadOnceStream(generator=False), batch_size=8),
        options=PROFILE_FIRST,
        trainer={"max_epochs": 1},
    ),
    "own noise": Case(
        RecordsBatches, data=lambda: DataLoader(NoisySamples(), batch_size=8), options=PROFILE_FIRST
    ),
    "transfer hooks": Case(AugmentsBatches, options=PROFILE_FIRST),
    "own order": Case(RecordsBatches, data=shuffled_loader, options=PROFILE_FIRST),
}
UNCOPYABLE = {
    "generator": Case(
        RecordsBatches,
        data=lambda: DataLoader(ReadOnceStream(generator=True), batch_size=8),
        options=PROFILE_FIRST,
        trainer={"max_epochs": 1},
    )
}


class VariableArguments(RecordsBatches):
    """Model whose step takes any number of arguments, so that Lightning passes the index."""

    def training_step(self, *args: Any) -> Tensor:
        batch, batch_idx = args
        return super().training_step(batch, batch_idx)


class KeywordArguments(RecordsBatches):
    """Model whose step takes one positional argument, so that Lightning passes no index."""

    def training_step(self, batch: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


CASES |= {
    "*args": Case(VariableArguments, options=PROFILE_FIRST),
    "**options": Case(KeywordArguments, options=PROFILE_FIRST),
}


class FailsInProfiling(nn.Linear):
    """Layer that fails on one rank until training starts.

    Attributes:
        on_rank: Rank on which it fails.
        error: Class of the error.
        is_profiled: True after training has started.
    """

    on_rank = 1
    error: type[Exception] = MemoryError
    is_profiled = False

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == self.on_rank and not type(self).is_profiled:
            raise self.error("no room on this rank")
        return super().forward(x)


class ModelThatFailsInProfiling(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = FailsInProfiling(12, 12)
        FailsInProfiling.is_profiled = False

    def on_train_start(self) -> None:
        FailsInProfiling.is_profiled = True


def compare_copyable(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def compare_too_large(context: RankContext) -> dict[str, list[str]]:
    limits = {**PROFILE_FIRST, "memory_limit": ["200KiB", "64MiB"]}
    return differences_in(context, {"wide": Case(ModelTooLargeForRank0, options=limits)})


def compare_uncopyable(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, UNCOPYABLE)


def compare_failing(
    context: RankContext, rank: int, error: type[Exception] = MemoryError
) -> dict[str, list[str]]:
    FailsInProfiling.on_rank, FailsInProfiling.error = rank, error
    return differences_in(
        context, {"failing": Case(ModelThatFailsInProfiling, data=batches, options=PROFILE_FIRST)}
    )


def test_training_gets_the_same_batches_with_and_without_profiling(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(compare_copyable, 2)
    for outcome in outcomes:
        assert outcome.value == {name: [] for name in CASES}, outcome.traceback
    assert outcomes[0].output.count("profiling 5 layers") == len(CASES)
    for message in ("could not be profiled", "could not be run on a trial batch"):
        assert message not in outcomes[0].output


def test_layers_above_the_memory_limit_of_a_rank_are_not_profiled_there(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(compare_too_large, 2)
    for outcome in outcomes:
        assert outcome.value == {"wide": []}, outcome.traceback
    assert "could not be profiled" not in outcomes[0].output


def test_a_loader_that_cannot_be_copied_is_not_read_for_profiling(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(compare_uncopyable, 2)
    for outcome in outcomes:
        assert outcome.value == {"generator": []}, outcome.traceback
    assert "the data cannot be copied" in outcomes[0].output
    assert "splitting by parameter bytes" in outcomes[0].output


@pytest.mark.parametrize("rank", [0, 1])
def test_lack_of_memory_on_one_rank_splits_by_parameter_bytes_on_all_ranks(
    pool: RankPool, rank: int
) -> None:
    outcomes = pool.run_expecting_errors(compare_failing, 2, rank)
    for outcome in outcomes:
        assert outcome.value == {"failing": []}, outcome.traceback
    assert "MemoryError: no room on this rank" in outcomes[0].output
    assert "splitting by parameter bytes" in outcomes[0].output


def test_another_error_in_profiling_ends_the_run(pool: RankPool) -> None:
    failed, other = pool.run_expecting_errors(compare_failing, 2, 0, IndexError)
    assert failed.error_type == "IndexError"
    assert other.error_type == PeerLostError.__name__
    assert "IndexError: no room on this rank" in other.error_message


class NamedSamples(Dataset[Any]):
    """Data set with names as indices. Its sampler yields the names."""

    names = [f"sample {number}" for number in range(32)]

    def __init__(self) -> None:
        self.samples = Samples(False, 32)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> Any:
        return self.samples[self.names.index(name)]


def compare_named(context: RankContext) -> dict[str, list[str]]:
    def named() -> DataLoader[Any]:
        return DataLoader(NamedSamples(), batch_size=8, sampler=NamedSamples.names)

    return differences_in(
        context, {"named": Case(RecordsBatches, data=named, options=PROFILE_FIRST)}
    )


def test_a_data_set_with_names_as_indices_is_profiled(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(compare_named, 2)
    for outcome in outcomes:
        assert outcome.value == {"named": []}, outcome.traceback
    assert "splitting by parameter bytes" not in outcomes[0].output


def test_a_copied_loader_shares_large_tensors_of_several_loaders() -> None:
    large = torch.zeros(1 << 19)
    source = {"a": [DataLoader(TensorDataset(large))]}
    for loaders in (source, CombinedLoader(source)):
        copied = copy_loader(loaders)
        copied_loaders = copied["a"] if isinstance(copied, dict) else copied.iterables["a"]
        assert copied_loaders[0] is not source["a"][0]
        assert copied_loaders[0].dataset.tensors[0] is large
