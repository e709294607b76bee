"""Base class of gradient codecs, which are lossy.

The number of elements alone determines the size of a payload, so a receiver knows the size of every
message in advance. A codec is stateless. The caller keeps the residual and other memory in a
`State`: one for each partition of a gradient, and another where the sum of all ranks is encoded.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dlres.codecs import base as registry
from lightning_dlres.codecs.base import Codec, Encoded
from lightning_dlres.codecs.layout import require_dense
from lightning_dlres.codecs.raw import decode_target
from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.kernels import zvc

# Tensors that the caller of a codec keeps for one gradient between steps, by name.
State = dict[str, Tensor]
# Key in a state: the part of the gradient that was not sent yet.
RESIDUAL = "residual"


class GradientCodec(Codec):
    """A lossy codec of gradients.

    A codec from outside of this package implements `payload_bytes`, `compress` and `expand`, and is
    decorated with `register`. Its options are keyword-only arguments with defaults.

    Attributes:
        is_unbiased: True if the expected value of the decoded gradient is the gradient. Other
            codecs need error feedback: they keep what they did not send in `state["residual"]`, and
            send it in later steps (Seide et al., 2014; Karimireddy et al., 2019).
        suits_adam: True if its gradients may be given to Adam. One or two bits change the ratio of
            a gradient's mean to its variance so much that Adam may diverge (Tang et al., 2021).
        is_divisible: True if a gradient may be cut into partitions at multiples of the
            kernels' block of 4096 elements.
        uses_kernels: True if the codec needs the compiler of GPU kernels (numba-cuda) on a GPU.
    """

    is_lossless = False
    is_unbiased: ClassVar[bool] = False
    suits_adam: ClassVar[bool] = True
    is_divisible: ClassVar[bool] = True
    uses_kernels: ClassVar[bool] = False

    @property
    def transforms_gradient(self) -> bool:
        """True if the codec changes a rank's gradient before it compresses it, as by momentum.

        Then every rank encodes its own gradient, also the one that merges, and partial sums cannot
        be encoded: only the parameter server suits the codec.
        """
        return False

    @abstractmethod
    def payload_bytes(self, count: int) -> int:
        """Return the payload's size in bytes for `count` elements; a positive multiple of 4."""

    @abstractmethod
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        """Write the payload of a gradient, and update its state.

        An element that is not finite arrives as NaN or infinite, and leaves its state unchanged.
        Some codecs treat its whole block, or the whole gradient, in the same way.

        Args:
            values: float32[n], contiguous; not changed.
            state: State from `new_state`, updated in place.
            payload: uint8[payload_bytes(n)], aligned to 4 bytes, on the same device.
            scale: Power of two by which the values are multiplied.
            seed: Seed of stochastic rounding. Steps, units and ranks have different seeds.
        """

    @abstractmethod
    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        """Decode a payload. Equal payloads must give equal values, bit for bit, on all ranks.

        Args:
            payload: uint8[payload_bytes(n)], aligned to 4 bytes; not changed.
            out: float32[n], contiguous, on the same device.
            scale: Factor of the decoded values.
            accumulate: Add to `out` instead of replacing its values.
        """

    def check_payload(self, payload: Tensor, count: int) -> None:
        """Raise if a payload of the right size cannot be decoded.

        Codecs that take positions from a payload override it. Wrong values are no error.

        Args:
            payload: uint8[payload_bytes(count)] on the CPU, aligned to 4 bytes.
            count: Number of elements.

        Raises:
            ProtocolError: If a position in it is not one of the `count` elements.
        """

    def new_state(self, count: int, device: torch.device, *, is_aggregator: bool = False) -> State:
        """Return the state of a gradient of `count` elements before the first step.

        Args:
            count: Number of elements.
            device: Device of the gradient.
            is_aggregator: True for the sum of all ranks' gradients. Memory of a single rank's
                gradient, such as momentum, is left out.
        """
        if self.is_unbiased:
            return {}
        return {RESIDUAL: torch.zeros(count, device=device)}

    def at_step(self, step: int) -> GradientCodec:
        """Return the codec of a step, from 0; codecs with a warm-up change over the steps."""
        return self

    def runs_on_gpus(self) -> bool:
        # All kernels need the same compiler, so ask those of zero-value compression.
        return zvc.runs_on_gpus() or not self.uses_kernels

    def bound(self, tensor: Tensor) -> int:
        return self.payload_bytes(tensor.numel())

    def encode(self, tensor: Tensor, out: Tensor | None = None) -> Encoded:
        """Encode a tensor without a residual; see `Codec.encode`.

        Raises:
            ConfigError: If the tensor is sparse, has no values or no floating-point dtype, or `out`
                is too small.
        """
        require_dense(tensor)
        if tensor.is_meta:
            raise ConfigError(
                f"tensor must have values for codec {self.name!r}, got one on the meta device. "
                "Move its module with to_empty() and initialise it first."
            )
        if not tensor.dtype.is_floating_point:
            raise ConfigError(
                f"tensor must have a floating-point dtype for codec {self.name!r}, got "
                f"{tensor.dtype}. Use codec 'raw'."
            )
        values = tensor.detach().to(torch.float32).contiguous().view(-1)
        used = self.payload_bytes(values.numel())
        if out is None:
            out = torch.empty(used, dtype=torch.uint8, device=tensor.device)
        elif out.numel() < used:
            raise ConfigError(
                f"out must have at least {used} bytes, got {out.numel()}. Use `bound`."
            )
        self.compress(values, self.new_state(values.numel(), tensor.device), out[:used])
        return Encoded(
            codec=self.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            stride=torch.empty(tensor.shape, device="meta").stride(),
            data=out,
            used=used,
        )

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        result, _ = decode_target(encoded, out)
        count = encoded.shape.numel()
        if encoded.nbytes != self.payload_bytes(count):
            raise ProtocolError(
                f"data of codec {self.name!r} must have {self.payload_bytes(count)} bytes for "
                f"{count} elements, got {encoded.nbytes} bytes. Check that both sides use the same "
                "options."
            )
        values = torch.empty(count, device=encoded.data.device)
        self.expand(encoded.payload, values)
        return result.copy_(values.view(encoded.shape))


def gradient_codec_names() -> list[str]:
    """Return the names of all registered codecs of gradients."""
    return [name for name in registry.names() if isinstance(registry.codec(name), GradientCodec)]


def gradient_codec(name: str) -> GradientCodec:
    """Return the codec of a name from `gradient_codec_names`, with default options."""
    codec = registry.codec(name)
    assert isinstance(codec, GradientCodec)
    return codec
