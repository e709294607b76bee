"""Profiling leaves the data of training as it was. If a rank lacks memory for it, training
continues with a split by bytes; any other error ends the run."""

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


class Once(IterableDataset[Any]):
    """Stream that can be read only once; as a generator, it cannot be copied either."""

    def __init__(self, generator: bool) -> None:
        source = Samples(False, 40)
        rows = [source[index] for index in range(len(source))]
        self.rows: Iterator[Any] = (row for row in rows) if generator else iter(rows)

    def __iter__(self) -> Iterator[Any]:
        return self.rows


class OwnNoise(Samples):
    """Samples with noise from a random generator of their own, and a count of reads."""

    def __init__(self) -> None:
        super().__init__(False, 32)
        self.generator, self.visits = torch.Generator().manual_seed(11), 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        self.visits += 1
        return x + torch.randn(16, generator=self.generator) / self.visits, y


def shuffled() -> DataLoader[Any]:
    """Return a loader with a random generator of its own."""
    generator = torch.Generator().manual_seed(5)
    return DataLoader(Samples(False, 32), batch_size=8, shuffle=True, generator=generator)


class Observes(Classifier):
    """Model that records a checksum of every batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.observed.append(float(batch[0].sum()))


class Augments(Observes):
    """Model that changes each batch in another way, in the transfer hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers, self.generator = 0, torch.Generator().manual_seed(11)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers += 1
        return [batch[0] * (1 + 0.1 * self.transfers), batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn(16, generator=self.generator), batch[1]]


class Wide(Classifier):
    """Model with two layers that do not fit on rank 0."""

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


class ReadsTwo(Observes):
    """Model that gets each batch from two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = batch.values() if isinstance(batch, dict) else batch
        both = [torch.cat(pair) for pair in zip(first, second, strict=True)]
        return super().training_step(both, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        values = batch.values() if isinstance(batch, dict) else batch
        self.observed += [float(inputs.sum()) for inputs, _ in values]


def two_loaders() -> list[DataLoader[Any]]:
    return [shuffled(), DataLoader(Samples(False, 20), batch_size=4, shuffle=True)]


def two_names() -> dict[str, DataLoader[Any]]:
    return dict(zip("ab", two_loaders(), strict=True))


MEASURED = {"plan": None}
CASES = {
    "list of loaders": Case(ReadsTwo, data=two_loaders, options=MEASURED),
    "dict of loaders": Case(ReadsTwo, data=two_names, options=MEASURED),
    "combined loader": Case(
        ReadsTwo, data=lambda: CombinedLoader(two_names(), "min_size"), options=MEASURED
    ),
    "stream": Case(
        Observes,
        data=lambda: DataLoader(Once(generator=False), batch_size=8),
        options=MEASURED,
        trainer={"max_epochs": 1},
    ),
    "own noise": Case(
        Observes, data=lambda: DataLoader(OwnNoise(), batch_size=8), options=MEASURED
    ),
    "transfer hooks": Case(Augments, options=MEASURED),
    "own order": Case(Observes, data=shuffled, options=MEASURED),
}
UNCOPIED = {
    "generator": Case(
        Observes,
        data=lambda: DataLoader(Once(generator=True), batch_size=8),
        options=MEASURED,
        trainer={"max_epochs": 1},
    )
}


class FailsFirst(nn.Linear):
    """Layer that fails on one rank while the layers are measured."""

    on_rank = 1
    error: type[Exception] = MemoryError
    measured = False

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == self.on_rank and not type(self).measured:
            raise self.error("no room on this rank")
        return super().forward(x)


class FailsWhenMeasured(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = FailsFirst(12, 12)
        FailsFirst.measured = False

    def on_train_start(self) -> None:
        FailsFirst.measured = True


def compare_measured(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def compare_wide(context: RankContext) -> dict[str, list[str]]:
    limits = {**MEASURED, "memory_limit": ["200KiB", "64MiB"]}
    return differences_in(context, {"wide": Case(Wide, options=limits)})


def compare_uncopied(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, UNCOPIED)


def compare_failing(
    context: RankContext, rank: int, error: type[Exception] = MemoryError
) -> dict[str, list[str]]:
    FailsFirst.on_rank, FailsFirst.error = rank, error
    return differences_in(
        context, {"failing": Case(FailsWhenMeasured, data=batches, options=MEASURED)}
    )


def test_training_sees_the_same_samples_after_profiling(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(compare_measured, 2)
    for outcome in outcomes:
        assert outcome.value == {name: [] for name in CASES}, outcome.traceback
    assert outcomes[0].output.count("profiling 5 layers") == len(CASES)
    assert "could not be profiled" not in outcomes[0].output


def test_layers_that_do_not_fit_on_a_device_are_not_run_there(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(compare_wide, 2)
    for outcome in outcomes:
        assert outcome.value == {"wide": []}, outcome.traceback
    assert "could not be profiled" not in outcomes[0].output


def test_a_loader_that_cannot_be_copied_is_not_read(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(compare_uncopied, 2)
    for outcome in outcomes:
        assert outcome.value == {"generator": []}, outcome.traceback
    assert "the data cannot be copied" in outcomes[0].output
    assert "splitting by parameter bytes" in outcomes[0].output


@pytest.mark.parametrize("rank", [0, 1])
def test_lack_of_memory_on_one_rank_splits_by_bytes_on_all(pool: RankPool, rank: int) -> None:
    outcomes = pool.run_expecting_errors(compare_failing, 2, rank)
    for outcome in outcomes:
        assert outcome.value == {"failing": []}, outcome.traceback
    assert "MemoryError: no room on this rank" in outcomes[0].output
    assert "splitting by parameter bytes" in outcomes[0].output


def test_another_error_of_a_layer_ends_the_run(pool: RankPool) -> None:
    ours, others = pool.run_expecting_errors(compare_failing, 2, 0, IndexError)
    assert ours.error_type == "IndexError"
    assert others.error_type == PeerLostError.__name__
    assert "IndexError: no room on this rank" in others.error_message


class Named(Dataset[Any]):
    """Dataset whose samples have names instead of numbers, which its sampler knows."""

    names = [f"sample {number}" for number in range(32)]

    def __init__(self) -> None:
        self.samples = Samples(False, 32)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> Any:
        return self.samples[self.names.index(name)]


def compare_named(context: RankContext) -> dict[str, list[str]]:
    def named() -> DataLoader[Any]:
        return DataLoader(Named(), batch_size=8, sampler=Named.names)

    return differences_in(context, {"named": Case(Observes, data=named, options=MEASURED)})


def test_samples_without_numbers_are_profiled(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(compare_named, 2)
    for outcome in outcomes:
        assert outcome.value == {"named": []}, outcome.traceback
    assert "splitting by parameter bytes" not in outcomes[0].output


def test_copy_of_shares_large_tensors_of_several_loaders() -> None:
    large = torch.zeros(1 << 19)
    source = {"a": [DataLoader(TensorDataset(large))]}
    for loaders in (source, CombinedLoader(source)):
        copied = copy_loader(loaders)
        inside = copied["a"] if isinstance(copied, dict) else copied.iterables["a"]
        assert inside[0] is not source["a"][0]
        assert inside[0].dataset.tensors[0] is large
