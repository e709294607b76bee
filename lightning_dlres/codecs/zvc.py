"""Zero-value compression: a bit mask of the non-zero elements, followed by these elements.

For elements of b bits with a share d of non-zero elements, d + 1/b of the bytes remain. That is
about a half after a ReLU. Dense data would grow, and is therefore encoded raw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dlres.codecs.base import Codec, Encoded, register
from lightning_dlres.codecs.layout import dense_bytes
from lightning_dlres.codecs.raw import decode_target, encode_raw
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.kernels import zvc

# Largest share of the bytes that may remain. Compression that saves less than a tenth takes more
# time than it saves.
_WORTHWHILE_SHARE = 0.9


@register
class ZeroValue(Codec):
    """Codec that stores non-zero elements bit for bit: NaN, -0.0, infinities and subnormals too.

    It encodes two kinds of tensors raw: those with elements of 8 bytes or more, and those with few
    zeros in a sample.
    """

    name = "zvc"
    is_lossless = True

    def bound(self, tensor: Tensor) -> int:
        return zvc.bound(tensor.numel(), tensor.element_size())

    def encode(
        self, tensor: Tensor, out: Tensor | None = None, density: float | None = None
    ) -> Encoded:
        """Encode a tensor; see `Codec.encode`.

        Args:
            tensor: See `Codec.encode`.
            out: See `Codec.encode`.
            density: Share of non-zero elements, if it is known. None samples the tensor; on a GPU
                this synchronizes the stream.
        """
        width = tensor.element_size()
        source, stride = dense_bytes(tensor)
        # A GPU does not tell the size in time, but with few elements the mask alone is too large.
        is_tiny = zvc.mask_bytes(tensor.numel()) >= source.numel()
        if (
            width not in zvc.WIDTHS
            or is_tiny
            or not _saves_enough(zvc.density(source, width) if density is None else density, width)
        ):
            return encode_raw(tensor, source, stride, out)
        if out is None and not tensor.is_cuda:
            compressed = zvc.encode_tightly(source, width)
            if compressed is None:
                # The sample had a larger share of zeros than the whole tensor.
                return encode_raw(tensor, source, stride, out)
            return self._encoded(tensor, stride, compressed, compressed.numel())
        data, bound = out, self.bound(tensor)
        if data is None:
            data = torch.empty(bound, dtype=torch.uint8, device=tensor.device)
        if data.numel() < bound:
            raise ConfigError(
                f"out must have at least {bound} bytes, got {data.numel()}. Use `bound`, or "
                "`encode_within`."
            )
        used = zvc.encode(source, width, data)
        if isinstance(used, int) and used >= source.numel():
            return encode_raw(tensor, source, stride, out)
        return self._encoded(tensor, stride, data, used)

    def is_worthwhile(self, tensor: Tensor) -> bool:
        """Return True if a sample of the tensor has enough zeros; see `Codec.is_worthwhile`."""
        width = tensor.element_size()
        return width in zvc.WIDTHS and _saves_enough(
            float(zvc.density(dense_bytes(tensor)[0], width)), width
        )

    def runs_on_gpus(self) -> bool:
        return zvc.runs_on_gpus()

    def can_encode_within(self, tensor: Tensor) -> bool:
        return tensor.element_size() in zvc.WIDTHS

    def encode_within(self, tensor: Tensor, out: Tensor) -> Encoded:
        """Encode a tensor without waiting for the GPU; see `Codec.encode_within`.

        Dense data is not encoded raw here, so the result may be larger than the tensor.

        Args:
            tensor: Tensor with elements of 1, 2 or 4 bytes.
            out: See `Codec.encode_within`. It must have room for at least the mask.
        """
        source, stride = dense_bytes(tensor)
        used = zvc.encode(source, tensor.element_size(), out)
        return self._encoded(tensor, stride, out, used)

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        result, target = decode_target(encoded, out)
        data = encoded.data if encoded.data.is_cuda else encoded.payload
        zvc.decode(data, encoded.dtype.itemsize, target)
        return result

    def _encoded(
        self, tensor: Tensor, stride: tuple[int, ...], data: Tensor, used: Tensor | int
    ) -> Encoded:
        return Encoded(
            codec=self.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            stride=stride,
            data=data,
            used=used,
        )


def _saves_enough(density: float, width: int) -> bool:
    """Return True if compression is worthwhile for elements of `width` bytes."""
    return density + 1 / (8 * width) < _WORTHWHILE_SHARE
