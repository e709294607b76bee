"""A model on which capture is judged: how to make it, its batches and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Inputs of a model: arguments by keyword or by position. Samples lie along dimension 0.
Batch = dict[str, Tensor] | tuple[Tensor, ...]
# Samples of a batch, and of the micro-batches that it is cut into.
SAMPLES, MICRO_SAMPLES = 4, 2


def wave_loss(output: Any) -> Tensor:
    """Return the mean square of the difference between the output's tensors and a fixed wave.

    The mean square of a normalised output is constant, and its gradients vanish. The wave prevents
    this. Each sample gets the same wave, so the loss is a mean over samples.
    """
    losses = [
        (tensor.float() - _wave(tensor)).square().mean()
        for tensor in tensors_of(output)
        if tensor.requires_grad
    ]
    return torch.stack(losses).sum()


def own_loss(output: Any) -> Tensor:
    """Return the loss that a model of transformers computes from its labels."""
    return output.loss


@dataclass(frozen=True)
class CaptureCase:
    """A model on which capture is judged.

    Models stay in `train()` mode, with the dropout of their library. The seed of torch's default
    generator, set before `make` and before a call of the model, determines parameters and results.

    Attributes:
        name: Name of the case; distinct over all families.
        family: "transformers", "torchvision" or "by hand".
        make: Makes the model with random parameters.
        batch: Returns inputs, given (samples, seed).
        loss: Returns the scalar loss of an output.
        is_per_sample: True if the loss is a mean over samples that do not affect each other. False
            for layers such as BatchNorm: micro-batches then change loss and gradients. Dropout is
            not considered.
    """

    name: str
    family: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any], Tensor] = wave_loss
    is_per_sample: bool = True


def call(model: nn.Module, batch: Batch) -> Any:
    """Return the output of a model."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def cut(batch: Batch, samples: int) -> list[Batch]:
    """Return the micro-batches of a batch, each with this number of samples."""
    if isinstance(batch, tuple):
        return list(zip(*(tensor.split(samples) for tensor in batch), strict=True))
    columns = zip(*(tensor.split(samples) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, column, strict=True)) for column in columns]


def seeded(seed: int) -> torch.Generator:
    """Return a generator for the inputs of a batch."""
    return torch.Generator().manual_seed(seed)


def _wave(tensor: Tensor) -> Tensor:
    sample = tensor.shape[1:]
    return torch.arange(sample.numel(), dtype=torch.float32).cos().view(sample)


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, also those inside its mappings, tuples and lists."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_of(value)
