"""What every codec can do, and where one is found by its name.

What a codec has made of a tensor says itself by which codec: a codec that would not pay hands the
tensor to another one (dense data to `raw`), and who decodes need not know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lightning_dlres.core.errors import ConfigError, got_expected


@dataclass(frozen=True)
class Encoded:
    """A tensor as a codec has left it.

    Attributes:
        codec: name of the codec that decodes it.
        dtype, shape, stride: of the tensor, and of the one that `decode` returns.
        data: uint8[...], on the tensor's device; what lies behind `used` bytes is undefined.
        used: how many bytes of `data` count. Where a GPU finds out, int64[] there: reading it waits
            for the stream.
    """

    codec: str
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    data: Tensor
    used: Tensor | int

    @property
    def nbytes(self) -> int:
        """Return how many bytes count. On a GPU the stream is waited for."""
        return int(self.used)

    @property
    def payload(self) -> Tensor:
        """Return the bytes that count. On a GPU the stream is waited for."""
        return self.data[: self.nbytes]


class Codec(ABC):
    """A way to make a tensor smaller.

    Attributes:
        name: under which it is registered, and which travels with what it has made.
        is_lossless: whether `decode` returns every bit.
    """

    name: ClassVar[str]
    is_lossless: ClassVar[bool]

    @abstractmethod
    def bound(self, tensor: Tensor) -> int:
        """Return the most bytes that `encode` may need room for."""

    @abstractmethod
    def encode(self, tensor: Tensor, out: Tensor | None = None) -> Encoded:
        """Encode a tensor, on the current stream.

        Args:
            tensor: strided, of any shape and dtype.
            out: uint8[at least `bound(tensor)`], on the tensor's device, aligned to 8 bytes, which
                the result keeps; None allocates what is needed.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Return the tensor, on the current stream.

        Args:
            encoded: what this codec has made.
            out: a tensor of that dtype, shape and stride to write to; None allocates it.

        Raises:
            ProtocolError: the data cannot be what this codec has made.
        """

    def is_worthwhile(self, tensor: Tensor) -> bool:
        """Return whether `encode` is likely to make a tensor small enough to be worth its time.

        The estimate may read a sample of the tensor. On a GPU the host waits for it.
        """
        return True

    def can_encode_within(self, tensor: Tensor) -> bool:
        """Return whether `encode_within` supports a tensor."""
        return False

    def encode_within(self, tensor: Tensor, out: Tensor) -> Encoded:
        """Encode a tensor into memory of limited size, without waiting for the GPU.

        The encoding has failed if `used` of the result is more than the bytes of `out`.

        Args:
            tensor: Tensor to encode.
            out: uint8[n], which the result keeps.

        Raises:
            ConfigError: If the codec does not support it; see `can_encode_within`.
        """
        raise ConfigError(
            f"codec must be one that can encode within a limit, got {self.name!r}. Use `encode`."
        )

    def runs_on_gpus(self) -> bool:
        """Return whether the codec can encode tensors on a GPU in this process."""
        return True

    def merge(self, parts: Sequence[Encoded]) -> Encoded:
        """Return the sum of tensors, encoded; they may be of several codecs.

        Raises:
            ConfigError: they differ in shape or dtype, or there are none.
        """
        if len({(part.dtype, part.shape) for part in parts}) != 1:
            found = [(part.dtype, tuple(part.shape)) for part in parts]
            raise ConfigError(
                got_expected("merge", found, "tensors of one dtype and shape", "one at a time")
            )
        total = decode(parts[0])
        for part in parts[1:]:
            total = total.add_(decode(part))
        return self.encode(total)


_codecs: dict[str, Codec] = {}
C = TypeVar("C", bound=type[Codec])


def register(cls: C) -> C:
    """Make a codec known by its name; used as a decorator of its class.

    Raises:
        ConfigError: another class has that name.
    """
    known = _codecs.setdefault(cls.name, cls())
    if type(known) is not cls:
        raise ConfigError(
            f"codec {cls.name!r}: got {cls.__qualname__}, but {type(known).__qualname__} has that "
            "name. Give it another one."
        )
    return cls


def codec(name: str) -> Codec:
    """Return a codec by its name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _codecs:
        raise ConfigError(got_expected("codec", name, f"one of {names()}", "'zvc'"))
    return _codecs[name]


def names() -> list[str]:
    """Return the names of all codecs."""
    return sorted(_codecs)


def decode(encoded: Encoded, out: Tensor | None = None) -> Tensor:
    """Return the tensor, by the codec that has encoded it; see `Codec.decode`."""
    return codec(encoded.codec).decode(encoded, out)
