"""Base class of codecs, and their registry.

`Encoded` names the codec that decodes it, so the function `decode` needs no argument for the codec.
A codec may therefore leave a tensor that it cannot shrink to another codec: zero-value compression
leaves dense data to `raw`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lightning_dlres.core.errors import ConfigError, got_expected


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """An encoded tensor.

    Attributes:
        codec: Name of the codec that decodes it.
        dtype: Dtype of the original tensor, which `decode` returns.
        shape: Shape of the original tensor.
        stride: Strides of the tensor that `decode` returns. They are those of the original, or
            contiguous ones if the original had gaps or the codec does not keep its strides.
        data: uint8[n], on the tensor's device. Bytes from `used` on are undefined.
        used: Number of bytes of `data` in use. After a GPU kernel: a scalar int64 tensor on the
            GPU; reading it synchronizes the stream.
    """

    codec: str
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    data: Tensor
    used: Tensor | int

    @property
    def nbytes(self) -> int:
        """Number of bytes in use. On a GPU this synchronizes the stream."""
        return int(self.used)

    @property
    def payload(self) -> Tensor:
        """Bytes in use, a view of `data`. On a GPU this synchronizes the stream."""
        return self.data[: self.nbytes]


class Codec(ABC):
    """Base class of methods that encode tensors in fewer bytes.

    A codec from outside of this package is one class in one file, decorated with `register`. Its
    constructor must need no arguments.

    Attributes:
        name: Name in the registry, which `Encoded` carries.
        is_lossless: True if `decode` returns exactly the bits that `encode` got.
    """

    name: ClassVar[str]
    is_lossless: ClassVar[bool]

    @abstractmethod
    def bound(self, tensor: Tensor) -> int:
        """Return the largest number of bytes that `encode` may write for a tensor."""

    @abstractmethod
    def encode(self, tensor: Tensor, out: Tensor | None = None) -> Encoded:
        """Encode a tensor, on the current stream.

        Args:
            tensor: Strided tensor of any shape. Lossless codecs accept any dtype.
            out: uint8[at least `bound(tensor)`] for the result, on the tensor's device, aligned to
                8 bytes. `Encoded.data` shares its memory. None allocates memory.

        Raises:
            ConfigError: If the codec does not support the tensor.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Return the decoded tensor, on the current stream: the original if the codec is lossless.

        Args:
            encoded: A result of this codec.
            out: Tensor for the result, with dtype, shape and strides of `encoded`. None allocates
                one.

        Raises:
            ProtocolError: If the data cannot be a result of this codec, or `out` does not fit.
        """

    def is_worthwhile(self, tensor: Tensor) -> bool:
        """Return True if `encode` is likely to make a tensor small enough to be worth its time.

        The estimate may read a sample of the tensor. On a GPU this synchronizes the stream.
        """
        return True

    def can_encode_within(self, tensor: Tensor) -> bool:
        """Return True if `encode_within` supports a tensor."""
        return False

    def encode_within(self, tensor: Tensor, out: Tensor) -> Encoded:
        """Encode a tensor into memory of limited size, without waiting for the GPU.

        The encoding failed if `used` of the result is larger than the size of `out`.

        Args:
            tensor: Tensor to encode.
            out: uint8[n] for the result, on the tensor's device, aligned to 8 bytes. `Encoded.data`
                shares its memory.

        Raises:
            ConfigError: If the codec does not support this method; see `can_encode_within`.
        """
        raise ConfigError(
            f"codec must be able to encode within a limit, got {self.name!r}. Use `encode`."
        )

    def runs_on_gpus(self) -> bool:
        """Return True if the codec can encode tensors on a GPU in this process."""
        return True

    def merge(self, parts: Sequence[Encoded]) -> Encoded:
        """Return the sum of tensors, encoded by this codec.

        Other codecs may have encoded the parts.

        Raises:
            ConfigError: If the parts differ in shape or dtype, or if there are none.
        """
        if len({(part.dtype, part.shape) for part in parts}) != 1:
            kinds = [(part.dtype, tuple(part.shape)) for part in parts]
            raise ConfigError(
                got_expected(
                    "parts",
                    kinds,
                    "encoded tensors of one dtype and shape",
                    "gradients of one parameter, for example",
                )
            )
        total = decode(parts[0])
        for part in parts[1:]:
            total = total.add_(decode(part))
        return self.encode(total)


_codecs: dict[str, Codec] = {}
# Values of `algorithm` that are no codecs.
_RESERVED = ("auto", "none", "powersgd")
C = TypeVar("C", bound=type[Codec])


def register(cls: C) -> C:
    """Class decorator that adds a codec to the registry by its name.

    Raises:
        ConfigError: If it is no codec with a name, or another class has that name, or arguments
            give it another meaning.
    """
    is_codec = isinstance(cls, type) and issubclass(cls, Codec)
    if not (is_codec and isinstance(getattr(cls, "name", None), str)):
        raise ConfigError(
            f"cls must be a subclass of Codec with a class attribute `name`, got {cls!r}. Decorate "
            "such a class with @register_codec, without arguments."
        )
    if not cls.name or cls.name in _RESERVED:
        rule = f"a text that is none of {list(_RESERVED)}"
        raise ConfigError(
            got_expected(f"name of codec {cls.__qualname__}", cls.name, rule, "'mine'")
        )
    registered = _codecs.setdefault(cls.name, cls())
    if type(registered) is not cls:
        raise ConfigError(
            f"name of codec {cls.__qualname__} must be unused, got {cls.name!r}, the name of "
            f"{type(registered).__qualname__}. Use another name."
        )
    return cls


def codec(name: str) -> Codec:
    """Return the codec of a name.

    Raises:
        ConfigError: If no codec has that name.
    """
    if name not in _codecs:
        raise ConfigError(got_expected("codec", name, f"one of {names()}", "'zvc'"))
    return _codecs[name]


def names() -> list[str]:
    """Return the names of all registered codecs."""
    return sorted(_codecs)


def decode(encoded: Encoded, out: Tensor | None = None) -> Tensor:
    """Return the tensor, decoded by the codec that `encoded` names; see `Codec.decode`.

    Raises:
        ConfigError: If no codec has that name.
        ProtocolError: If the data cannot be a result of that codec, or `out` does not fit.
    """
    return codec(encoded.codec).decode(encoded, out)
