"""Compression on a GPU: how many bytes data take is known when the GPU has come so far. Until then
the original stays, and the host goes on."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_dlres.codecs import Encoded, ZeroValue
from lightning_dlres.memory.execute.gpu import Gpu

_ZERO_VALUE = ZeroValue()
# Of the memory that a codec writes to.
_ALIGNMENT = 8


class Packing:
    """Data that are compressed into so much room and no more.

    Args:
        gpu: what compresses them, in its current stream.
        elements: the data, of 1, 2 or 4 bytes each.
        room: bytes.

    Attributes:
        memory: uint8[room], rounded up; what the data take is in its first bytes.
    """

    def __init__(self, gpu: Gpu, elements: Tensor, room: int) -> None:
        self.memory = gpu.empty(-(-room // _ALIGNMENT) * _ALIGNMENT)
        self._encoded = _ZERO_VALUE.encode_within(elements, self.memory)
        self._used = gpu.read_later(self._encoded.used)

    def finish(self) -> Encoded | None:
        """Return the compressed data, or None where the room was too small. The host waits until
        the GPU has compressed them, not for what comes after it."""
        used = self._used()
        return replace(self._encoded, used=used) if used <= self.memory.numel() else None
