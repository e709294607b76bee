"""Digest of a batch, also called its fingerprint. Ranks compare it, and stop if it differs."""

from __future__ import annotations

import zlib

import msgspec
import torch
from torch import Tensor

from lightning_dlres.core.wire.payload import as_bytes
from lightning_dlres.core.wire.tree import Tree, flatten

# Largest tensor that is read completely, in bytes; larger ones are sampled, as `digest` describes.
_WHOLE_BYTES = 1 << 20
# Size and number of the blocks that are read from a larger tensor.
_BLOCK_BYTES = 4096
_BLOCKS = 256


def digest(tree: Tree) -> int:
    """Return a 32-bit fingerprint of structure, shapes, dtypes and contents.

    Tensors up to 1 MiB are read completely. For larger ones, the fingerprint covers the sum of all
    8-byte words, and 256 blocks of 4 KiB that are spread evenly. So another shuffle or augmentation
    changes it.
    """
    structure, tensors = flatten(tree)
    value = zlib.crc32(msgspec.msgpack.encode(structure))
    for tensor in tensors:
        data = as_bytes(tensor)
        value = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), value)
        value = _update_crc(data, value)
    return value


def _update_crc(data: Tensor, value: int) -> int:
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
