"""Zero-value compression (Method D, D5): a mask of the elements that are not zero, and these.

Of elements of b bits, of which a part d is not zero, d + 1/b of the bytes remain: a half of what a
ReLU leaves, more than all of dense data, which therefore goes raw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dlres.codecs.base import Codec, Encoded, register
from lightning_dlres.codecs.layout import dense_bytes
from lightning_dlres.codecs.raw import copied, target_of
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.kernels import zvc

# Of the bytes: what does not save a tenth costs more time than it saves.
_WORTH = 0.9


@register
class ZeroValue(Codec):
    """Keeps what is not zero, bit for bit: NaN, -0.0, infinities and denormal numbers too.

    Elements of 8 bytes or more, and data of which a sample shows few zeros, go raw.
    """

    name = "zvc"
    is_lossless = True

    def bound(self, tensor: Tensor) -> int:
        return zvc.bound(tensor.numel(), tensor.element_size())

    def encode(
        self, tensor: Tensor, out: Tensor | None = None, density: float | None = None
    ) -> Encoded:
        """See `Codec.encode`.

        Args:
            density: which part of the elements is not zero, if that is known: on a GPU the stream
                is waited for where it is not.
        """
        width = tensor.element_size()
        source, stride = dense_bytes(tensor)
        if width not in zvc.WIDTHS or not pays(
            zvc.density(source, width) if density is None else density, width
        ):
            return copied(tensor, source, stride, out)
        if out is None and not tensor.is_cuda:
            tight = zvc.encode_tightly(source, width)
            if tight is None:
                # The sample has promised too much.
                return copied(tensor, source, stride, out)
            return Encoded(self.name, tensor.dtype, tensor.shape, stride, tight, tight.numel())
        data, bound = out, self.bound(tensor)
        if data is None:
            data = torch.empty(bound, dtype=torch.uint8, device=tensor.device)
        if data.numel() < bound:
            raise ConfigError(
                f"out must have room for {bound} bytes, got {data.numel()}. Ask `bound`, or use "
                "`encode_within`."
            )
        used = zvc.encode(source, width, data)
        if isinstance(used, int) and used >= source.numel():
            return copied(tensor, source, stride, out)
        return Encoded(self.name, tensor.dtype, tensor.shape, stride, data, used)

    def is_worthwhile(self, tensor: Tensor) -> bool:
        """See `Codec.is_worthwhile`. The density of a sample decides."""
        width = tensor.element_size()
        return width in zvc.WIDTHS and pays(
            float(zvc.density(dense_bytes(tensor)[0], width)), width
        )

    def runs_on_gpus(self) -> bool:
        return zvc.runs_on_gpus()

    def can_encode_within(self, tensor: Tensor) -> bool:
        return tensor.element_size() in zvc.WIDTHS

    def encode_within(self, tensor: Tensor, out: Tensor) -> Encoded:
        """Encode a tensor of elements of 1, 2 or 4 bytes, whether that pays or not. Nothing is
        waited for. Where it uses more bytes than `out` has, it has failed.

        Args:
            tensor: see `Codec.encode`.
            out: uint8[at least the mask's bytes], which the result keeps.
        """
        source, stride = dense_bytes(tensor)
        used = zvc.encode(source, tensor.element_size(), out)
        return Encoded(self.name, tensor.dtype, tensor.shape, stride, out, used)

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        result, target = target_of(encoded, out)
        data = encoded.data if encoded.data.is_cuda else encoded.payload
        zvc.decode(data, encoded.dtype.itemsize, target)
        return result


def pays(density: float, width: int) -> bool:
    """Return whether compression is worth it for elements of so many bytes."""
    return density + 1 / (8 * width) < _WORTH
