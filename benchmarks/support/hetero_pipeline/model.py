"""Model, data and loss that both contenders of benchmarks/hetero_pipeline.py train.

The module imports no Lightning, because the peer does not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SEED = 0
VOCABULARY = 64
LEARNING_RATE = 1e-3
# Number of tokens of the random text.
_TEXT = 100_000
# Tokens between the starts of neighbouring windows. It does not divide the number of possible
# starts, so each step has other windows and another loss.
_STRIDE = 37
# Number of windows: more than any run needs.
_MANY = 1 << 20


@dataclass(frozen=True)
class Task:
    """Sizes of the model and of a batch.

    A stage has many small blocks, so that a split can follow the ratio of the devices' speeds.
    """

    blocks: int = 30
    width: int = 128
    heads: int = 4
    context: int = 48
    batch: int = 32

    @property
    def layers(self) -> int:
        """Number of layers: an embedding, the blocks, a head."""
        return self.blocks + 2


class Embedding(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, task.width)
        self.places = nn.Parameter(torch.randn(task.context, task.width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.places
        return embedded


class Block(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        width = task.width
        self.heads = task.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        query, key, value = (
            part.view(samples, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(samples, length, width))
        out: Tensor = x + self.contract(nn.functional.gelu(self.expand(self.norm2(x))))
        return out


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a random text. The target is the window one token later."""

    def __init__(self, context: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.text = torch.randint(VOCABULARY, (_TEXT,), generator=generator)
        self.context = context

    def __len__(self) -> int:
        return _MANY

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * _STRIDE % (_TEXT - self.context - 1)
        window = self.text[start : start + self.context + 1]
        return window[:-1], window[1:]


def make_net(task: Task) -> nn.Sequential:
    """Return the model, with the same weights on every rank of both contenders."""
    torch.manual_seed(SEED)
    blocks = [Block(task) for _ in range(task.blocks)]
    head = nn.Linear(task.width, VOCABULARY, bias=False)
    return nn.Sequential(Embedding(task), *blocks, head)


def make_loader(task: Task) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the training batches, in a fixed order."""
    return DataLoader(Windows(task.context), batch_size=task.batch)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats per token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters of one rank."""
    return torch.optim.AdamW(parameters, LEARNING_RATE)


def parameter_bytes(net: nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(p.numel() * p.element_size() for p in net.parameters())


def task_of(order: dict[str, Any]) -> Task:
    """Return the task of an order to a rank."""
    return Task(**order["task"])
