"""One region of memory that is cut into pieces: in the host's memory, or a file that is mapped into
it, which counts as the file's cache and not as this process's own.

Asking the system for memory once costs less than for every tensor, and shows at the start that
there is enough.
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

# Of every piece: what vector instructions and pages of a GPU's copy engine like.
ALIGNMENT = 512


class Slab:
    """So many bytes.

    Args:
        nbytes: size.
        directory: where the file lies; None: in memory. The file has no name, and is gone with the
            process, however that ends.
        pinned: whether the memory is locked, so that a GPU copies from and to it beside its other
            work. Needs CUDA; a file is not pinned.

    Raises:
        ConfigError: the directory cannot be written to, or has too little room.
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
        """Return uint8[nbytes], a view from this offset on."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ConfigError(
                f"a piece of a slab: got bytes {offset} to {offset + nbytes}, expected them within "
                f"its {self.nbytes}. Plan again."
            )
        return self.data[offset : offset + nbytes]


def aligned(nbytes: int) -> int:
    """Return what a piece of so many bytes takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _whole_pages(nbytes: int) -> Tensor:
    """Return pages of memory that hold so many bytes, and nothing else: CUDA refuses to lock a page
    that it has locked for another slab."""
    pages = -(-nbytes // PAGESIZE) * PAGESIZE
    memory = torch.empty(pages + PAGESIZE, dtype=torch.uint8)
    first = -memory.data_ptr() % PAGESIZE
    return memory[first : first + pages]


def _pin(data: Tensor) -> None:
    """Lock memory for as long as it is held. torch's own pinned memory is rounded up to a power of
    two, which for one large slab may be twice what is needed."""
    address, runtime = data.data_ptr(), torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, data.numel(), 0)
    if int(status) != 0:
        raise ConfigError(
            f"a pinned slab of {format_bytes(data.numel())}: CUDA cannot lock that much (error "
            f"{int(status)}). Try a smaller host_budget, or raise the limit (ulimit -l)."
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
