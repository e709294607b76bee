"""Small GPT over bytes, for the demo and the example configs. It needs no download."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional

# Number of values of a byte.
NUM_BYTES = 256
# Standard deviation of initial weights.
INITIAL_STD = 0.02


class ByteGPT(LightningModule):
    """Model that predicts the next byte of a text.

    `net` is an `nn.Sequential` of an embedding, `depth` blocks and a head, so that a pipeline can
    cut it between any two of them.

    Args:
        width: Size of the embedding of a byte; a multiple of `heads`.
        depth: Number of blocks.
        heads: Number of attention heads in a block.
        context: Maximum length of a text, in bytes.
        dropout: Probability that an activation is dropped in training, 0 to 1.
        lr: Learning rate of AdamW after the warm-up.
        warmup_steps: Number of optimizer steps over which the learning rate rises to `lr`.
        weight_decay: Weight decay of AdamW.
    """

    def __init__(
        self,
        width: int = 128,
        depth: int = 8,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        lr: float = 3e-3,
        warmup_steps: int = 20,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"width must be a multiple of heads ({heads}), got {width}. Use width={heads * 32}."
            )
        self.save_hyperparameters()
        self.lr, self.warmup_steps, self.weight_decay = lr, warmup_steps, weight_decay
        blocks = [Block(width, heads, depth, dropout) for _ in range(depth)]
        self.net = nn.Sequential(Embedding(width, context, dropout), *blocks, Head(width))

    def forward(self, text: Tensor) -> Tensor:
        """Return logits [samples, length, 256] of the next byte after each byte of `text`."""
        return self.net(text)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss over windows of bytes, in nats per byte."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss, in nats and in bits per byte."""
        self._log_evaluation("val", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss, in nats and in bits per byte."""
        self._log_evaluation("test", batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return uint8[samples, length - 1], the most likely byte after each byte but the last."""
        return self(batch[:, :-1]).argmax(-1).to(torch.uint8)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW, and a schedule with a warm-up."""
        optimizer = torch.optim.AdamW(
            self.parameters(), self.lr, betas=(0.9, 0.95), weight_decay=self.weight_decay
        )
        warmup = max(1, self.warmup_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().long())

    def _log_evaluation(self, name: str, batch: Tensor) -> None:
        loss = self._loss(batch)
        self.log(f"{name}_loss", loss, prog_bar=True, batch_size=len(batch))
        self.log(f"{name}_bits_per_byte", loss / math.log(2), batch_size=len(batch))


class Embedding(nn.Module):
    """Embedding of bytes and their positions."""

    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=INITIAL_STD)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        if length > self.context:
            raise ValueError(
                f"text must have at most {self.context} bytes, got {length}. Use "
                f"ByteGPT(context={length})."
            )
        position_ids = torch.arange(length, device=text.device)
        embedded: Tensor = self.dropout(self.bytes(text.long()) + self.positions(position_ids))
        return embedded


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, with residual connections."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        for linear in (self.qkv, self.project, self.expand, self.contract):
            nn.init.normal_(linear.weight, std=INITIAL_STD)
            nn.init.zeros_(linear.bias)
        for linear in (self.project, self.contract):
            # Scale down, so that 2 * depth additions do not make the residual stream grow
            # (Radford et al., 2019).
            nn.init.normal_(linear.weight, std=INITIAL_STD / math.sqrt(2 * depth))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.project(self._attend(self.norm1(x))))
        out: Tensor = x + self.drop(self.contract(functional.gelu(self.expand(self.norm2(x)))))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        query, key, value = (
            part.view(samples, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return attended.transpose(1, 2).reshape(samples, length, width)


class Head(nn.Module):
    """Projection of vectors to logits of the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, NUM_BYTES, bias=False)
        nn.init.normal_(self.logits.weight, std=INITIAL_STD)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits
