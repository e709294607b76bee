"""Host memory or a file, with the tensors of a `RegionTable`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lightning_dlres.core.host.slab import Slab

# Smaller tensors get no file of their own.
LEAST_FILE_BYTES = 1 << 16


class MirrorRegion:
    """Memory of a mirror.

    Args:
        nbytes: Size in bytes.
        directory: Directory of a mapped file with the bytes; None: host memory.
        pinned: Lock host memory, so that copies of a GPU overlap with computation.

    Raises:
        ConfigError: If the directory is not writable or has too little space.
    """

    def __init__(self, nbytes: int, directory: Path | None = None, *, pinned: bool = False) -> None:
        self.nbytes = nbytes
        # An array, which keeps the slab alive as long as a tensor lies over its memory.
        self._memory = Slab(nbytes, directory, pinned).data.numpy()

    def tensor(self, offset: int, like: Tensor) -> Tensor:
        """Return the tensor at an offset, with the dtype, shape and strides of another one.

        It is the only owner of a storage over a part of the region. `torch.save` would write the
        whole region if all tensors shared one storage.

        Args:
            offset: First byte, aligned.
            like: Dense tensor without overlaps.
        """
        if not like.numel():
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return over(flat.untyped_storage(), like)

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        """Return uint8[nbytes] at an offset."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)


def over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Return a tensor at the beginning of a storage in host memory.

    It is no view of another tensor, which would be one more owner of the storage.

    Args:
        storage: The storage.
        like: Tensor with the dtype, shape and strides.
    """
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())


def new_tensor(like: Tensor, directory: Path | None) -> Tensor:
    """Return a tensor in host memory or in a file of its own, with the dtype, shape and strides of
    another one, and without its values.

    The file has no name, and ends with the tensor. Small tensors lie in memory: a mapped file takes
    whole pages.

    Args:
        like: The other tensor, on any device.
        directory: Directory of the file; None for host memory.

    Raises:
        ConfigError: If the directory is not writable or has too little space.
    """
    nbytes = like.numel() * like.element_size()
    if directory is None or nbytes < LEAST_FILE_BYTES:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return MirrorRegion(nbytes, directory).tensor(0, like)
