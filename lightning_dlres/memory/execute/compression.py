"""Codec that compresses saved storages, by its name in the registry."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dlres import codecs
from lightning_dlres.codecs import Codec

# The codec must be lossless: gradients must be bitwise equal to those of plain training.
_CODEC_NAME = "zvc"


def storage_codec() -> Codec:
    """Return the codec of saved storages."""
    return codecs.codec(_CODEC_NAME)


def elements_of(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uint8[n] viewed as elements of a dtype.

    Bytes that do not hold a whole number of aligned elements are returned unchanged.
    """
    can_view = data.numel() % dtype.itemsize == 0 and data.storage_offset() % dtype.itemsize == 0
    return data.view(dtype) if can_view else data
