"""LightningModules that use their parameters in the ways that are hard for a mirror."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

WIDTH, CLASSES, VOCABULARY = 16, 4, 9


class Twice(nn.Module):
    """A module that is used twice, and one whose weight is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.shared.weight
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tied(torch.tanh(self.shared(torch.relu(self.shared(x))))))


class TiedEmbedding(nn.Module):
    """An embedding whose weight is also the output layer's, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(6, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(VOCABULARY, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :6] * 2).abs().long() % VOCABULARY
        y = self.tokens(tokens) + self.positions
        y = self.norm(y + self.attention(y, y, y, need_weights=False)[0]).mean(1)
        return self.head(F.linear(y, self.tokens.weight))


class Recurrent(nn.Module):
    """An LSTM, whose module holds a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 4, 4))[0][:, -1])


class Convolutions(nn.Module):
    """Convolutions in a channels-last layout, with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.body = body.append(nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(-1, 1, 4, 4)).flatten(1))


class Normed(nn.Module):
    """Weights that other parameters are computed from, and a weight that its module changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_norm = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.clamped = Clamped(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.clamped(torch.tanh(self.spectral(torch.tanh(self.weight_norm(x)))))


class Clamped(nn.Linear):
    """A layer that changes its own weight in each forward, without a trace."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            self.bias.mul_(0.99)
        return super().forward(x)


class Checkpointed(nn.Module):
    """Blocks that run again in backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Frozen(nn.Module):
    """A frozen layer, a layer that no loss uses, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.frozen(torch.relu(self.first(x)))))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "twice": Twice,
    "tied embedding": TiedEmbedding,
    "recurrent": Recurrent,
    "convolutions": Convolutions,
    "normed": Normed,
    "checkpointed": Checkpointed,
    "reentrant": lambda: Checkpointed(reentrant=True),
    "frozen": Frozen,
}


class Classifier(LightningModule):
    """A network that classifies; it also validates.

    Args:
        network: Key of `NETWORKS`.
        optimizer: Key of `OPTIMIZERS`.
    """

    def __init__(self, network: str = "twice", optimizer: str = "adamw") -> None:
        super().__init__()
        self.network, self.optimizer = NETWORKS[network](), optimizer
        # Losses of all steps, and of validation.
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("val_loss", loss)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(self.network(batch[0]).sum().item())

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self)


def _adamw(module: nn.Module) -> Any:
    """Return AdamW with two groups and a schedule."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _adagrad(module: nn.Module) -> Any:
    """Return Adagrad with its fused kernel, which only the CPU has."""
    is_on_cpu = all(p.device.type == "cpu" for p in module.parameters())
    return torch.optim.Adagrad(module.parameters(), lr=0.05, fused=is_on_cpu or None)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adamw": _adamw,
    "adagrad": _adagrad,
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
}


def data(samples: int = 40, batch: int = 8) -> DataLoader[Any]:
    """Return the same samples in each call."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch)


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state, in the order of the parameters."""
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        yield from (value for value in state.values() if isinstance(value, Tensor))
