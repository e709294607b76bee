"""Training loaders whose batches have no clear number of samples, or that a user has subclassed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.strategies import CompressedDDPStrategy
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool


class Model(LightningModule):
    """Network that records the sums of its inputs.

    Args:
        make_loaders: Returns the training loaders of a rank.
    """

    def __init__(self, make_loaders: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)
        self.make_loaders, self.sums = make_loaders, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        x = x[0] if isinstance(x, (list, tuple)) else x
        self.sums.append(float(x.sum()))
        return self.net(x).mean()

    def train_dataloader(self) -> Any:
        return self.make_loaders(self.trainer.global_rank)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class FromIterator(Model):
    """Network that takes batches out of Lightning's iterator."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class ScalingLoader(DataLoader[Any]):
    """Loader that makes `collate_fn` from an option of its own, which it requires."""

    def __init__(self, dataset: Any, *, factor: float, **options: Any) -> None:
        options.pop("collate_fn", None)
        self.factor = factor
        super().__init__(
            dataset,
            collate_fn=lambda rows: [factor * torch.stack([row[0] for row in rows])],
            **options,
        )


def samples(count: int, value: float = 1.0) -> TensorDataset:
    return TensorDataset(torch.full((count, 4), value))


def equal_loaders(rank: int) -> Any:
    return DataLoader(samples(8), 2)


def uneven_loaders(rank: int) -> Any:
    return DataLoader(samples(8 + 4 * rank), 2)


def one_uneven_of_two(rank: int) -> Any:
    return {"x": uneven_loaders(rank), "other": equal_loaders(rank)}


class Stream(IterableDataset[Any]):
    """Samples of a stream, whose length is unknown."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter([(torch.ones(4),)] * self.count)


def equal_streams(rank: int) -> Any:
    return {"x": DataLoader(Stream(8), 2), "other": equal_loaders(rank)}


def uneven_streams(rank: int) -> Any:
    return {"x": DataLoader(Stream(8 + 4 * rank), 2), "other": DataLoader(Stream(8 + 4 * rank), 2)}


def scaling_loaders(rank: int) -> Any:
    return ScalingLoader(samples(16), factor=10.0, batch_size=2)


def with_boxes(rank: int) -> Any:
    """Return a loader of the rank whose batches begin with a tensor of boxes; rank 0 has none."""

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        return {"boxes": torch.zeros(2 * rank, 4), "x": torch.stack([row[0] for row in rows])}

    return DataLoader(samples(4 + 2 * rank, 1.0 + rank), 2, collate_fn=collate)


def fit(
    context: RankContext, make_loaders: Any, model: Any = Model, shares: Any = "equal"
) -> tuple[list[float], Tensor]:
    """Return the sums of the inputs, and the change of the weights."""
    module = model(make_loaders)
    before = module.net.weight.detach().clone()
    trainer = Trainer(
        strategy=CompressedDDPStrategy(
            algorithm="raw", topology="ps", timeout=30.0, share_samples=shares
        ),
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        max_epochs=1,
        use_distributed_sampler=shares != "equal",
        **QUIET,
    )
    trainer.fit(module)
    return module.sums, module.net.weight.detach() - before


def refusal(context: RankContext, make_loaders: Any, model: Any = Model) -> str:
    with pytest.raises(ConfigError) as error:
        fit(context, make_loaders, model)
    return str(error.value)


def test_an_iterator_is_refused_where_batches_have_weights(pool: RankPool) -> None:
    for message in pool.run(refusal, 2, uneven_loaders, FromIterator):
        assert message == (
            "training_step must take a batch if the ranks' loaders differ in length or "
            "share_samples is set, got dataloader_iter. Use training_step(self, batch, batch_idx)."
        )
    for sums, _ in pool.run(fit, 2, equal_loaders, FromIterator):
        assert sums == [8.0] * 4


@pytest.mark.parametrize("loaders", [one_uneven_of_two, uneven_streams])
def test_several_loaders_of_other_lengths_are_refused(pool: RankPool, loaders: Any) -> None:
    for message in pool.run(refusal, 2, loaders):
        assert message.startswith(
            "the training loaders must have the same length on all ranks if there are several"
        )


def test_several_streams_of_one_length_are_trained(pool: RankPool) -> None:
    for sums, _ in pool.run(fit, 2, equal_streams):
        assert sums == [8.0] * 4


def test_a_subclass_of_a_loader_keeps_its_options(pool: RankPool) -> None:
    ranks = pool.run(fit, 2, scaling_loaders, Model, [3.0, 1.0])
    assert [sums for sums, _ in ranks] == [[120.0] * 4, [40.0] * 4]


class Rows(Dataset[Tensor]):
    """Dataset whose samples have the value 1."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (torch.ones(4),)


class OwnLoader(DataLoader[Any]):
    """Subclass of a loader."""


def iterated_before(loader_class: Any, rank: int) -> Any:
    """Return a loader with persistent workers that was iterated over, and a sampler of its own."""
    loader = loader_class(
        Rows(),
        2,
        num_workers=1,
        persistent_workers=True,
        sampler=DistributedSampler(Rows(), shuffle=False),
    )
    assert len(list(loader)) == 4
    return loader


@pytest.mark.parametrize("loader_class", [DataLoader, OwnLoader])
def test_a_loader_that_was_iterated_before_is_shared_out(pool: RankPool, loader_class: Any) -> None:
    loaders = partial(iterated_before, loader_class)
    ranks = pool.run(fit, 2, loaders, Model, [3.0, 1.0])
    assert [sums for sums, _ in ranks] == [[12.0] * 4, [4.0] * 4]


def test_a_batch_whose_first_tensor_is_empty_counts(pool: RankPool) -> None:
    """Rank 0 has no boxes, and is trained on all the same."""
    (_, change), _ = pool.run(fit, 2, with_boxes)
    # Two steps with both ranks, of which rank 1 counts twice, and one of rank 1 alone.
    expected = 2 * (1.0 / 3 * 1.0 + 2.0 / 3 * 2.0) + 2.0
    torch.testing.assert_close(change, torch.full((1, 4), -expected), rtol=1e-5, atol=0)
