"""Inputs of the models of transformers, by keyword, given (samples, generator)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Tokens below `FIRST_TOKEN` are special: start, end and padding.
VOCABULARY, FIRST_TOKEN, LENGTH, CLASSES = 64, 4, 8, 3
# Width and height of images in pixels.
SIZE = 32
# Bands of a spectrogram for recognition of speech, and for classification.
SPEECH_BANDS, SOUND_BANDS = 8, 16
Inputs = Callable[[int, torch.Generator], dict[str, Tensor]]


def tokens(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return token sequences."""
    ids = torch.randint(FIRST_TOKEN, VOCABULARY, (samples, LENGTH), generator=generator)
    return {"input_ids": ids}


def padded_tokens(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return token sequences, and the mask of those that are not padding."""
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (samples, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {**tokens(samples, generator), "attention_mask": mask}


def next_tokens(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return token sequences that are their own labels."""
    ids = tokens(samples, generator)["input_ids"]
    return {"input_ids": ids, "labels": ids.clone()}


def masked_tokens(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return padded token sequences with a label for each token."""
    inputs = padded_tokens(samples, generator)
    return {**inputs, "labels": tokens(samples, generator)["input_ids"]}


def detected_tokens(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return token sequences with a label, 0 or 1, for each token."""
    labels = torch.randint(2, (samples, LENGTH), generator=generator)
    return {**tokens(samples, generator), "labels": labels}


def placed_tokens(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return padded token sequences with their places on a page."""
    corners = torch.randint(0, 15, (samples, LENGTH, 2), generator=generator)
    return {**masked_tokens(samples, generator), "bbox": torch.cat([corners, corners + 1], 2)}


def waveforms(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return sounds as waveforms."""
    return {"input_values": torch.randn(samples, 400, generator=generator)}


def transcripts(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return sounds as spectrograms, with the tokens of their text."""
    features = torch.randn(samples, SPEECH_BANDS, 2 * LENGTH, generator=generator)
    return {"input_features": features, "labels": tokens(samples, generator)["input_ids"]}


def spectrograms(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return sounds as spectrograms."""
    return {"input_values": torch.randn(samples, 32, SOUND_BANDS, generator=generator)}


def images(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return images."""
    return {"pixel_values": torch.randn(samples, 3, SIZE, SIZE, generator=generator)}


def segmented_images(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return images with a label for each pixel."""
    labels = torch.randint(CLASSES, (samples, SIZE, SIZE), generator=generator)
    return {**images(samples, generator), "labels": labels}


def captioned_images(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return images with a text."""
    return {**padded_tokens(samples, generator), **images(samples, generator)}


def classified(inputs: Inputs, samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return inputs with a label for each sample."""
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    return {**inputs(samples, generator), "labels": labels}
