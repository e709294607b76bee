"""Compression on a GPU, without blocking the host.

The compressed size is known only when the GPU has done the work. Until then the original bytes
stay on the device.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_dlres.codecs import Codec, Encoded
from lightning_dlres.core.device.gpu import Gpu

# Alignment of a codec's output in bytes; the capacity is rounded up to a multiple of it.
_ALIGNMENT = 8


class GpuCompression:
    """Compression in flight, into memory of limited size.

    Args:
        gpu: GPU that compresses, in its current stream.
        codec: Codec that can encode the elements within a limit.
        elements: Elements to compress.
        capacity: Bytes that the result may take.

    Attributes:
        memory: uint8[capacity, rounded up]. The result takes its first bytes.
    """

    def __init__(self, gpu: Gpu, codec: Codec, elements: Tensor, capacity: int) -> None:
        self.memory = gpu.empty(-(-capacity // _ALIGNMENT) * _ALIGNMENT)
        self._encoded = codec.encode_within(elements, self.memory)
        self._used = gpu.read_async(self._encoded.used)

    def finish(self) -> Encoded | None:
        """Return the compressed elements; None if they do not fit in `memory`.

        The host waits until the GPU has compressed them, but not for later work of the stream.
        """
        used = self._used()
        return replace(self._encoded, used=used) if used <= self.memory.numel() else None
