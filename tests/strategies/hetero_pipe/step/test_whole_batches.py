"""Steps that need whole batches: with one micro-batch for each batch they are cut all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from lightning_dlres import ConfigError, PeerLostError
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    batches,
    differences_in,
    fit,
    no_differences_in,
)

OPTIONS: dict[str, Any] = {"plan": None, "module": "training_step"}


class Experts(nn.Module):
    """Two experts; beside its output it returns a scalar for their balance over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(1)
        chosen, output = shares.argmax(1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                rows = mask.nonzero()[:, 0]
                output = output.index_add(0, rows, expert(x[rows]) * shares[rows, index, None])
        counts = F.one_hot(chosen, 2).float().mean(0)
        return x + output, (shares.mean(0) * counts).sum()


class Balanced(Classifier):
    """Sums the balance of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(16, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, balance = batch[0], torch.zeros(())
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one
        loss = F.cross_entropy(self.head(x), batch[1]) + 0.1 * balance
        self.log("loss", loss)
        return loss


class Packed(Classifier):
    """Packs sequences of unlike lengths between its modules."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.first, self.last = nn.Linear(4, 12), nn.Linear(12, 5)
        self.middle = nn.GRU(12, 12, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sequences, lengths, labels = batch
        packed = pack_padded_sequence(
            self.first(sequences).tanh(), lengths, batch_first=True, enforce_sorted=False
        )
        output, _ = pad_packed_sequence(self.middle(packed)[0], batch_first=True)
        return F.cross_entropy(self.last(output.sum(1)), labels)


class GraphNetwork(nn.Module):
    """Sums what neighbours have; the nodes of all graphs of a batch lie in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor, graphs: int) -> Tensor:
        for layer in (self.first, self.second):
            nodes = nodes + torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])
            nodes = layer(nodes).tanh()
        return self.last(torch.zeros(graphs, nodes.shape[1]).index_add(0, graph, nodes))


class Graphs(Classifier):
    """Two such networks, one after the other, if `is_deep`."""

    def __init__(self, is_deep: bool) -> None:
        super().__init__()
        self.net = GraphNetwork()
        if is_deep:
            self.widen, self.second = nn.Linear(5, 4), GraphNetwork()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        nodes, edges, graph, labels = batch
        output = self.net(nodes, edges, graph, len(labels))
        if hasattr(self, "second"):
            output = self.second(self.widen(output)[graph], edges, graph, len(labels))
        return F.cross_entropy(output, labels)


class Pairs(Classifier):
    """Gives its modules the distances of all pairs of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        distances = torch.cdist(batch[0], batch[0])
        same = (batch[1][:, None] == batch[1]).float()
        hidden = self.net[1](self.net[0](distances.flatten()[:, None]))
        predicted = self.net[3](self.net[2](hidden)).view_as(distances)
        return F.binary_cross_entropy_with_logits(predicted, same)


def sequence(index: int) -> tuple[Tensor, int]:
    """Return a sequence of 2 to 5 rows, and its class."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(2 + index % 4, 4, generator=generator), index % 5


def padded(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    sequences, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(one) for one in sequences])
    return (
        nn.utils.rnn.pad_sequence(sequences, batch_first=True),
        lengths,
        torch.tensor(labels),
    )


def joined(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return one graph of all samples, whose rows are rings of nodes."""
    sequences, labels = zip(*samples, strict=True)
    lengths = [len(one) for one in sequences]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rings = [
        torch.stack([start + torch.arange(n), start + (torch.arange(n) + 1) % n])
        for start, n in zip(starts, lengths, strict=False)
    ]
    graph = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.cat(sequences), torch.cat(rings, dim=1), graph, torch.tensor(labels)


def sequences(collate: Any) -> DataLoader[Any]:
    """Return a loader of batches of eight samples; the last one has four."""
    data: Any = list(map(sequence, range(28)))
    return DataLoader(data, batch_size=8, collate_fn=collate)


WHOLE = {**OPTIONS, "microbatches": 1}
CASES = {
    "experts": Case(Balanced, options=WHOLE),
    "packed": Case(Packed, data=lambda: sequences(padded), options=WHOLE),
    "graphs": Case(lambda: Graphs(is_deep=True), data=lambda: sequences(joined), options=WHOLE),
    "graphs in a module": Case(
        lambda: Graphs(is_deep=False),
        data=lambda: sequences(joined),
        options={**WHOLE, "module": "net"},
    ),
    "pairs": Case(Pairs, data=batches, options=WHOLE),
}


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def test_steps_of_whole_batches_train_as_on_one_device(pool: RankPool) -> None:
    assert pool.run(compare, 2) == no_differences_in(CASES)


CUT = ("experts", "packed", "graphs")


def fit_with_micro_batches(context: RankContext, name: str) -> None:
    case = CASES[name]
    words = "(?s) must be one that can be cut .*microbatches=1"
    with pytest.raises((ConfigError, PeerLostError), match=words):
        fit(context, Case(case.make, data=case.data, options=OPTIONS))


@pytest.mark.parametrize("name", CUT)
def test_a_step_that_needs_whole_batches_is_told_so(pool: RankPool, name: str) -> None:
    pool.run(fit_with_micro_batches, 2, name)
