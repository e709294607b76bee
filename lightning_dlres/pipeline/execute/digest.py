"""Fingerprint of a batch. Ranks compare it, so that they stop if they see different batches."""

from __future__ import annotations

import zlib

import msgspec
import torch
from torch import Tensor

from lightning_dlres.core.wire.payload import as_bytes
from lightning_dlres.core.wire.tree import Tree, flatten

# Tensors up to this size are read completely, larger ones as described at `digest`.
_WHOLE_BYTES = 1 << 20
_BLOCK_BYTES = 4096
_BLOCKS = 256


def digest(tree: Tree) -> int:
    """Return a 32-bit fingerprint of structure, shapes, dtypes and contents.

    Tensors up to 1 MiB are read byte by byte. Of larger ones the fingerprint covers the sum of
    their 8-byte words, and 256 blocks of 4 KiB spread over them. A different shuffle or
    augmentation changes it.
    """
    structure, tensors = flatten(tree)
    value = zlib.crc32(msgspec.msgpack.encode(structure))
    for tensor in tensors:
        data = as_bytes(tensor)
        value = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), value)
        value = _of_bytes(data, value)
    return value


def _of_bytes(data: Tensor, value: int) -> int:
    """Return the checksum `value` continued over flat uint8 data."""
    if data.numel() <= _WHOLE_BYTES:
        return zlib.crc32(data.cpu().numpy().tobytes(), value)
    words = data[: data.numel() // 8 * 8]
    if data.storage_offset() % 8:
        # Torch views bytes as 8-byte words only at an aligned offset.
        words = words.clone()
    value = zlib.crc32(int(words.view(torch.int64).sum()).to_bytes(8, "little", signed=True), value)
    # The last block ends with the data, so that bytes after the last whole word count too.
    starts = torch.linspace(0, data.numel() - _BLOCK_BYTES, _BLOCKS, dtype=torch.float64).long()
    blocks = torch.cat([data[start : start + _BLOCK_BYTES] for start in starts.tolist()])
    return zlib.crc32(blocks.cpu().numpy().tobytes(), value)
