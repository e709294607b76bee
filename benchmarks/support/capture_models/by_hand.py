"""Models written by hand, each with a structure that is difficult to cut into stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from benchmarks.support.capture_models.blocks import AdapterLinear, ResidualBlock, TransformerBlock
from benchmarks.support.capture_models.case import Batch, CaptureCase, seeded
from benchmarks.support.capture_models.names import BY_HAND

FAMILY = "by hand"
VOCABULARY, LENGTH, WIDTH, CLASSES = 32, 8, 16, 5
# Width and height of images in pixels.
SIZE = 16
# Models that mix the samples of a micro-batch, or whose state passes from one to the next.
MIXING = {"batchnorm_cnn", "running_statistics"}


class UNet(nn.Module):
    """Encoder and decoder of images; each level's output skips to the decoder's same level."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_convolution(3, 8), _convolution(8, 16)])
        self.middle = _convolution(16, 32)
        self.up = nn.ModuleList([_convolution(32 + 16, 16), _convolution(16 + 8, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], 1))
        return self.head(x)


class BatchNormCNN(nn.Module):
    """Residual network of images, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.layer1 = ResidualBlock(8, 8)
        self.layer2 = ResidualBlock(8, 16, stride=2)
        self.layer3 = ResidualBlock(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.head(x.mean((2, 3)))


class LSTMClassifier(nn.Module):
    """Classifier of token sequences by the last state of an LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embed(tokens))
        return self.head(hidden[-1])


class PackedGRUClassifier(nn.Module):
    """Classifier of token sequences of unequal lengths, by a GRU of two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, hidden = self.gru(packed)
        return self.head(torch.cat([hidden[0], hidden[1]], 1))


class EncoderDecoder(nn.Module):
    """Encoder and decoder, two children that forward calls one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        arguments: dict[str, Any] = {"dim_feedforward": 2 * WIDTH, "batch_first": True}
        encoder = nn.TransformerEncoderLayer(WIDTH, 2, **arguments)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, **arguments), 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.embed(source))
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        decoded = self.decoder(self.embed(target), memory, tgt_mask=mask, tgt_is_causal=True)
        return self.head(decoded)


class Siamese(nn.Module):
    """Two views of a sample, which the same encoder reads in two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )
        self.predictor = nn.Linear(WIDTH, WIDTH)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        encoded, other = self.encoder(first), self.encoder(second)
        return self.predictor(encoded) - other, self.predictor(other) - encoded


class TiedLanguageModel(nn.Module):
    """Language model whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(TransformerBlock(WIDTH) for _ in range(3)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


class Adapters(nn.Module):
    """Frozen layers with low-rank adapters that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(AdapterLinear(WIDTH, rank=2) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return self.head(x)


class RunningStatistics(nn.Module):
    """Layers that normalise by running statistics, buffers that each forward updates."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.calls += 1
        # A copy: the next micro-batch changes the buffer before this one's backward.
        return self.second(functional.gelu(x - self.mean.clone()))


class ClassToken(nn.Module):
    """Vision transformer whose own forward uses the parameters `cls_token` and `pos_embed`."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (SIZE // 4) ** 2 + 1, WIDTH))
        self.blocks = nn.Sequential(*(TransformerBlock(WIDTH, is_causal=False) for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.blocks(x)[:, 0])


class ModuleListTransformer(nn.Module):
    """Transformer whose own forward adds the residuals of the layers in its lists."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * depth))
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True) for _ in range(depth)
        )
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, (attention, network) in enumerate(
            zip(self.attentions, self.networks, strict=True)
        ):
            normed = self.norms[2 * layer](x)
            x = x + attention(normed, normed, normed, need_weights=False)[0]
            x = x + network(self.norms[2 * layer + 1](x))
        return self.head(x)


class SharedDepth(nn.Module):
    """One block that forward calls four times, with an embedding of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.depths = nn.Embedding(4, WIDTH)
        self.block = TransformerBlock(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for depth in self.depths.weight:
            x = self.block(x + depth)
        return self.head(x)


def cases() -> dict[str, CaptureCase]:
    """Return the cases by name."""
    models: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
        "unet": (UNet, _images),
        "batchnorm_cnn": (BatchNormCNN, _images),
        "lstm_classifier": (LSTMClassifier, _tokens),
        "packed_gru_classifier": (PackedGRUClassifier, _tokens_with_lengths),
        "encoder_decoder": (EncoderDecoder, _source_and_target),
        "siamese": (Siamese, partial(_vectors, 2)),
        "tied_language_model": (TiedLanguageModel, _tokens),
        "adapters": (Adapters, partial(_vectors, 1)),
        "running_statistics": (RunningStatistics, partial(_vectors, 1)),
        "class_token": (ClassToken, _images),
        "module_list_transformer": (ModuleListTransformer, _tokens),
        "shared_depth": (SharedDepth, _tokens),
    }
    return {
        name: CaptureCase(name, FAMILY, *models[name], is_per_sample=name not in MIXING)
        for name in BY_HAND
    }


def _convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU()
    )


def _images(samples: int, seed: int) -> Batch:
    return (torch.randn(samples, 3, SIZE, SIZE, generator=seeded(seed)),)


def _vectors(count: int, samples: int, seed: int) -> Batch:
    return torch.randn(count, samples, WIDTH, generator=seeded(seed)).unbind()


def _tokens(samples: int, seed: int) -> Batch:
    return (torch.randint(VOCABULARY, (samples, LENGTH), generator=seeded(seed)),)


def _tokens_with_lengths(samples: int, seed: int) -> Batch:
    generator = seeded(seed)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    return tokens, torch.randint(2, LENGTH + 1, (samples,), generator=generator)


def _source_and_target(samples: int, seed: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (2, samples, LENGTH), generator=seeded(seed))
    return {"source": tokens[0], "target": tokens[1, :, 1:]}
