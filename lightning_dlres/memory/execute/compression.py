"""Codec with which saved storages are compressed, found in the registry of codecs."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dlres import codecs
from lightning_dlres.codecs import Codec

# Lossless, as gradients must not change by a bit.
_CODEC_NAME = "zvc"


def storage_codec() -> Codec:
    """Return the codec of saved storages."""
    return codecs.codec(_CODEC_NAME)


def elements_of(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uint8[n] viewed as elements of a dtype.

    Bytes that are no whole number of elements, or are not aligned for them, are returned unchanged.
    """
    fits = data.numel() % dtype.itemsize == 0 and data.storage_offset() % dtype.itemsize == 0
    return data.view(dtype) if fits else data
