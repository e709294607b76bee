"""Small models and data for parity tests, which train them on one device and through a pipeline."""

from __future__ import annotations

import random
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

# Options of a Trainer that writes nothing and prints little.
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
CLASSES = 5
VOCABULARY = 11


def mlp(dropout: float) -> nn.Sequential:
    """Linear layers with activations that save their input, their output or a mask.

    One activation works in place. The two middle layers have one shape, so that they can be tied.
    """
    return nn.Sequential(
        nn.Linear(16, 24),
        nn.Tanh(),
        nn.Linear(24, 24),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(24, 24),
        nn.GELU(),
        nn.Linear(24, CLASSES),
    )


def cnn(dropout: float) -> nn.Sequential:
    """A convolutional network with group normalisation."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


class Embed(nn.Module):
    """Token and position embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(12, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.positions[: x.shape[1]]


class Block(nn.Module):
    """A pre-norm transformer block; `scale` stands for further arguments of a block."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # No bias: that of the keys has a gradient of rounding noise only, which AdamW blows up.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        if scale is not None:
            x = x * scale
        return x + self.drop(self.mlp(x))


class Head(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def gpt(dropout: float, width: int = 16) -> nn.Sequential:
    """A transformer as one nn.Sequential."""
    return nn.Sequential(Embed(width), *(Block(width, dropout) for _ in range(3)), Head(width))


class Task(LightningModule):
    """A classifier over one of the networks, with logs of every kind."""

    def __init__(
        self,
        network: str,
        optimizer: str = "sgd",
        dropout: float = 0.0,
        frozen: bool = False,
        tied: bool = False,
        metrics: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.optimizer = network, optimizer
        if network == "gpt_list":
            self.embed, self.head = Embed(16), Head(16)
            self.blocks = nn.ModuleList(Block(16, dropout) for _ in range(3))
        else:
            self.net = {"mlp": mlp, "cnn": cnn, "gpt": gpt}[network](dropout)
        if tied:
            self._tie()
        if frozen:
            self._freeze()
        self.accuracy = MulticlassAccuracy(num_classes=VOCABULARY) if metrics else None
        self.val_accuracy = MulticlassAccuracy(num_classes=VOCABULARY) if metrics else None

    def _tie(self) -> None:
        if self.kind == "gpt_list":
            self.head.out.weight = self.embed.tokens.weight
        elif self.kind == "gpt":
            self.net[4].out.weight = self.net[0].tokens.weight
        elif self.kind == "cnn":
            self.net[7].weight = self.net[4].weight
        else:
            self.net[5].weight = self.net[2].weight

    def _freeze(self) -> None:
        layers = {"mlp": (0, 5), "cnn": (1, 2), "gpt": (0, 2)}
        modules = (
            [self.net[i] for i in layers[self.kind]] if self.kind in layers else [self.blocks[1]]
        )
        for module in modules:
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind != "gpt_list":
            return self.net(x)
        x = self.embed(x)
        scale = torch.tensor(1.01, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, scale=scale)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict(
            {"top": logits.amax().detach()}, on_step=True, on_epoch=False, reduce_fx="max"
        )
        if self.accuracy is not None:
            self.accuracy(logits.argmax(-1).flatten(), y.flatten())
            self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits.flatten(0, -2), y.flatten()))
        if self.val_accuracy is not None:
            self.val_accuracy.update(logits.argmax(-1).flatten(), y.flatten())
            self.log("val_accuracy", self.val_accuracy)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(
                parameters, lr=0.05, momentum=0.9, weight_decay=1e-3
            )
        else:
            optimizer = torch.optim.AdamW(parameters, lr=2e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Data set of vectors with labels, or of token sequences.

    Args:
        tokens: True for token sequences.
        count: Number of samples.
        augment: True: each read changes the sample at random, with torch's and Python's generator.
        dtype: Dtype of the vectors.
    """

    def __init__(
        self, tokens: bool, count: int, augment: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens, self.augment, self.dtype = tokens, augment, dtype
        if tokens:
            self.data = torch.randint(VOCABULARY, (count, 9), generator=generator)
        else:
            self.data = torch.randn(count, 16, generator=generator, dtype=dtype)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.data[index]
        if self.tokens:
            if self.augment:
                row = row.roll(int(torch.randint(9, ()))).roll(random.randrange(9))
            return row[:-1], row[1:]
        if self.augment:
            row = row + 0.1 * torch.randn(16, dtype=self.dtype) * random.random()
        return row, self.labels[index]


def loaders(
    task: Task, samples: int, batch_size: int, shuffle: bool, workers: int, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Return a train and a validation loader for a task."""
    tokens = task.kind.startswith("gpt")
    train = Samples(tokens, samples, augment=shuffle, dtype=dtype)
    validation = Samples(tokens, 11, dtype=dtype)
    return (
        DataLoader(train, batch_size=batch_size, shuffle=shuffle, num_workers=workers),
        DataLoader(validation, batch_size=4),
    )
