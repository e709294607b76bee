"""Memory region that is divided into pieces: in host memory, or in a memory-mapped file.

A mapped file counts as page cache and not as memory of this process. One allocation for all pieces
costs less than one for each tensor. It also fails at the start if memory is short.
"""

from __future__ import annotations

import os
import weakref
from mmap import PAGESIZE
from pathlib import Path

import torch
from torch import Tensor

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.host.disk import temporary_file
from lightning_dlres.core.units import format_bytes

# Alignment of every piece in bytes, for vector instructions and the GPU's copy engine.
ALIGNMENT = 512


class Slab:
    """A region of `nbytes` bytes.

    Args:
        nbytes: Size in bytes.
        directory: Directory of the mapped file; None: host memory. The file has no name, and is
            removed when the process ends, even by a crash.
        pinned: Lock the memory, so that the GPU copies asynchronously. Needs CUDA; a mapped file is
            not pinned.

    Raises:
        ConfigError: If the directory is not writable or has too little free space, or if CUDA
            cannot lock the memory.
    """

    def __init__(self, nbytes: int, directory: Path | None = None, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self.data: Tensor
        if directory is not None:
            self.data = _mapped(nbytes, directory)
        elif pinned and nbytes:
            self.data = _whole_pages(nbytes)
            _pin(self.data)
            self.data = self.data[:nbytes]
        else:
            self.data = torch.empty(nbytes, dtype=torch.uint8)

    def piece(self, offset: int, nbytes: int) -> Tensor:
        """Return uint8[nbytes], a view from byte `offset` on."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ConfigError(
                f"a piece of a slab must lie within its {self.nbytes} bytes, got bytes {offset} to "
                f"{offset + nbytes}. Plan again."
            )
        return self.data[offset : offset + nbytes]


def aligned(nbytes: int) -> int:
    """Return the aligned size in bytes of a piece of `nbytes` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _whole_pages(nbytes: int) -> Tensor:
    """Return whole pages of memory for `nbytes` bytes.

    They share no page with other memory: CUDA refuses to lock a page twice.
    """
    pages = -(-nbytes // PAGESIZE) * PAGESIZE
    memory = torch.empty(pages + PAGESIZE, dtype=torch.uint8)
    first = -memory.data_ptr() % PAGESIZE
    return memory[first : first + pages]


def _pin(data: Tensor) -> None:
    """Lock memory until it is freed.

    torch's own pinned memory is rounded up to a power of two. That may double a large slab.
    """
    address, runtime = data.data_ptr(), torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, data.numel(), 0)
    if int(status) != 0:
        raise ConfigError(
            f"CUDA cannot lock a pinned slab of {format_bytes(data.numel())} (error "
            f"{int(status)}). Use a smaller host_budget, or raise the limit (ulimit -l)."
        )
    storage = data.untyped_storage()
    weakref.finalize(storage, runtime.cudaHostUnregister, address).atexit = False


def _mapped(nbytes: int, directory: Path) -> Tensor:
    descriptor, name = temporary_file(directory, "dlres-slab", nbytes)
    try:
        return torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
    finally:
        os.close(descriptor)
        os.unlink(name)
