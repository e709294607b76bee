"""Shares of samples for ranks of different speed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_dlres import OneBitAdam
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.strategies import CompressedDDPStrategy
from lightning_dlres.strategies.compressed_ddp.balance import checked_shares
from lightning_dlres.strategies.compressed_ddp.balanced_loaders import SampleShares
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool

BATCH = 4


class Numbers(Dataset[tuple[Tensor, int]]):
    """Dataset of pairs of a random sample and its number."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], index


class Model(LightningModule):
    """Network that records the samples of each step.

    Args:
        seconds: Time that each sample takes on this rank.
        has_momentum: Train with OneBitAdam in the place of SGD.

    Attributes:
        seen: Numbers of the samples, by epoch and step.
    """

    def __init__(self, seconds: float, has_momentum: bool = False) -> None:
        super().__init__()
        self.has_momentum = has_momentum
        torch.manual_seed(2)
        self.net = nn.Linear(6, 1)
        self.seconds, self.seen = seconds, [[], []]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen[self.current_epoch].append(batch[1].tolist())
        time.sleep(self.seconds * len(batch[0]))
        return F.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        if self.has_momentum:
            return OneBitAdam(self.parameters(), freeze_step=4)
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(
    context: RankContext,
    shares: Any,
    samples: int,
    seconds: tuple[float, ...] = (0.0,) * 4,
    *,
    drop_last: bool = False,
    workers: int = 0,
    has_momentum: bool = False,
) -> tuple[dict[str, Tensor], list[list[list[int]]]]:
    """Return the weights, and the numbers of this rank's samples by epoch and step.

    Args:
        context: This rank.
        shares: `share_samples` of the strategy.
        samples: Number of samples.
        seconds: Time that each sample takes, by rank.
        drop_last: See DataLoader.
        workers: Worker processes of each DataLoader.
    """
    seed_everything(3, verbose=False)
    model = Model(seconds[context.rank], has_momentum)
    trainer = Trainer(
        strategy=CompressedDDPStrategy(algorithm="raw", topology="ps", share_samples=shares),
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        max_epochs=2,
        **QUIET,
    )
    loader = DataLoader(
        Numbers(samples), BATCH, shuffle=True, drop_last=drop_last, num_workers=workers
    )
    trainer.fit(model, loader)
    return {name: value.clone() for name, value in model.state_dict().items()}, model.seen


@pytest.mark.parametrize(("samples", "drop_last"), [(61, False), (62, False), (70, True)])
def test_given_shares_train_on_the_global_batches(
    pool: RankPool, samples: int, drop_last: bool
) -> None:
    ranks = pool.run(fit, 3, [1.0, 3.0, 2.0], samples, drop_last=drop_last)
    expected, size = Model(0.0), 3 * BATCH
    optimizer = expected.configure_optimizers()
    data = Numbers(samples)
    for epoch in range(2):
        sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
        sampler.set_epoch(epoch)
        order = list(sampler)
        stop = samples - samples % size if drop_last else samples
        for step, start in enumerate(range(0, stop, size)):
            batch = order[start : min(start + size, stop)]
            parts = [rank[1][epoch][step] for rank in ranks]
            # A rank without a sample in the last batch repeats its batch before, with weight 0.
            if len(batch) >= 3:
                assert [n for part in parts for n in part] == batch
            if len(batch) == size:
                assert [len(part) for part in parts] == [2, 6, 4]
            x = data.x[batch]
            optimizer.zero_grad()
            F.mse_loss(expected.net(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    for weights, _ in ranks:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("workers", "has_momentum"), [(0, False), (1, False), (0, True)])
def test_slow_ranks_get_fewer_samples(pool: RankPool, workers: int, has_momentum: bool) -> None:
    samples, seconds = 200, (0.002, 0.006)
    ranks = pool.run(fit, 2, "speed", samples, seconds, workers=workers, has_momentum=has_momentum)
    assert all(torch.equal(ranks[0][0][name], ranks[1][0][name]) for name in ranks[0][0])
    for epoch in range(2):
        seen = sorted(n for _, steps in ranks for step in steps[epoch] for n in step)
        assert set(seen) == set(range(samples))
    # A full batch near the end, when the ranks have measured their speeds.
    fast, slow = (steps[1][-3] for _, steps in ranks)
    assert len(fast) + len(slow) == 2 * BATCH
    assert len(fast) > len(slow)


@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6),
    st.integers(0, 200),
)
def test_all_samples_are_given_out(shares: list[float], count: int) -> None:
    counts = SampleShares(shares).divide(0, count)
    assert sum(counts) == count
    assert min(counts) >= (1 if count >= len(shares) else 0)
    # In smaller batches, a rank whose share rounds to 0 gets a sample of another rank.
    if count >= len(shares) / min(s / sum(shares) for s in shares):
        exact = [count * share / sum(shares) for share in shares]
        assert all(abs(n - e) <= 1 for n, e in zip(counts, exact, strict=True))


def test_new_shares_apply_from_their_batch_on() -> None:
    shares = SampleShares([1.0, 1.0])
    shares.change(3, [1.0, 3.0])
    assert [shares.divide(batch, 8) for batch in (2, 3)] == [[4, 4], [2, 6]]
    shares.restart()
    assert shares.divide(0, 8) == [2, 6]


class Streamed(IterableDataset[Tensor]):
    """Iterable-style dataset, whose samples cannot be shared out."""

    def __iter__(self) -> Any:
        return iter([torch.zeros(6)])


def refusals(context: RankContext) -> list[str]:
    """Return the errors of bad shares, and of a dataset without a length."""
    messages = []
    one, other, streamed = (DataLoader(d, BATCH) for d in (Numbers(8), Numbers(40), Streamed()))
    for shares, loader in (([1.0], one), ("speed", streamed), ([1, 3], {"one": one, "two": other})):
        trainer = Trainer(
            strategy=CompressedDDPStrategy(algorithm="raw", topology="ps", share_samples=shares),
            accelerator="cpu",
            devices=2,
            plugins=[context.environment],
            max_epochs=1,
            **QUIET,
        )
        with pytest.raises(ConfigError) as error:
            trainer.fit(Model(0.0), loader)
        messages.append(str(error.value))
    return messages


def test_what_cannot_be_shared_out_is_refused(pool: RankPool) -> None:
    for messages in pool.run(refusals, 2):
        assert messages[0].startswith(
            "share_samples must be one number per rank (2), got [1.0]. Use share_samples='speed'."
        )
        assert messages[1].startswith(
            "the training loader must be a DataLoader with batch_size and a map-style dataset, "
            "whose sampler Lightning distributes, if share_samples is set, got 'the iterable-style "
            "dataset Streamed'. Use"
        )
        assert messages[2].startswith(
            "the training loader must be one DataLoader if share_samples is set, got 'several'. "
            "Use share_samples='equal'."
        )


def test_shares_may_be_a_tuple() -> None:
    assert checked_shares((1, 3)) == [1.0, 3.0]


@pytest.mark.parametrize("shares", ["fast", [], (), [1, 0], [1, "2"], None])
def test_bad_shares_are_refused(shares: Any) -> None:
    with pytest.raises(ConfigError, match="share_samples must be"):
        CompressedDDPStrategy(share_samples=shares)
