"""Tests that a codec from outside of the package needs one file and one registration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dlres import codecs
from lightning_dlres.codecs import Codec, Encoded, base, codec, decode, names, register
from lightning_dlres.core.errors import ConfigError


class Inverted(Codec):
    """Toy codec that inverts every bit."""

    name = "inverted"
    is_lossless = True

    def bound(self, tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def encode(self, tensor: Tensor, out: Tensor | None = None) -> Encoded:
        source = tensor.contiguous().view(-1).view(torch.uint8)
        data = torch.empty_like(source) if out is None else out[: source.numel()]
        torch.bitwise_not(source, out=data)
        return Encoded(
            codec=self.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            stride=tensor.contiguous().stride(),
            data=data,
            used=data.numel(),
        )

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        tensor = torch.bitwise_not(encoded.payload).view(encoded.dtype).view(encoded.shape)
        return tensor if out is None else out.copy_(tensor)


@pytest.fixture
def inverted() -> Iterator[str]:
    """Fixture that registers the toy codec during one test."""
    assert register(Inverted) is Inverted
    yield Inverted.name
    del base._codecs[Inverted.name]


def test_a_registered_codec_is_found_by_name(inverted: str) -> None:
    assert inverted in names()
    assert isinstance(codec(inverted), Inverted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_a_registered_codec_encodes_and_decodes(inverted: str, dtype: torch.dtype) -> None:
    tensor = torch.arange(35).reshape(5, 7).to(dtype)
    encoded = codec(inverted).encode(tensor)
    assert (encoded.codec, encoded.nbytes) == (inverted, 35 * dtype.itemsize)
    assert not torch.equal(encoded.payload, tensor.view(-1).view(torch.uint8))
    decoded = decode(encoded)
    assert decoded.dtype == dtype
    assert torch.equal(decoded, tensor)


def test_a_registered_codec_uses_the_memory_of_the_caller(inverted: str) -> None:
    tensor = torch.randn(100)
    out = torch.empty(codec(inverted).bound(tensor), dtype=torch.uint8)
    encoded = codec(inverted).encode(tensor, out)
    assert encoded.data.data_ptr() == out.data_ptr()
    target = torch.empty_like(tensor)
    assert decode(encoded, target) is target
    assert torch.equal(target, tensor)


def test_a_registered_codec_merges_with_the_codecs_of_the_package(inverted: str) -> None:
    sparse, dense = torch.relu(torch.randn(1000) - 1), torch.randn(1000)
    parts = [codec("zvc").encode(sparse), codec(inverted).encode(dense)]
    merged = codec(inverted).merge(parts)
    assert merged.codec == inverted
    assert torch.equal(decode(merged), sparse + dense)
    assert torch.equal(decode(codec("raw").merge(parts)), sparse + dense)


def test_a_registered_codec_needs_no_optional_method(inverted: str) -> None:
    tensor, toy = torch.randn(10), codec(inverted)
    assert toy.is_worthwhile(tensor)
    assert toy.runs_on_gpus()
    assert not toy.can_encode_within(tensor)
    with pytest.raises(ConfigError, match="encode within a limit, got 'inverted'"):
        toy.encode_within(tensor, torch.empty(4, dtype=torch.uint8))


def test_registering_a_class_again_changes_nothing(inverted: str) -> None:
    before = codec(inverted)
    register(Inverted)
    assert codec(inverted) is before


def test_an_unregistered_codec_cannot_decode() -> None:
    encoded = Inverted().encode(torch.zeros(4))
    with pytest.raises(ConfigError, match=r"codec must be one of .*, got 'inverted'"):
        codecs.decode(encoded)


@pytest.mark.parametrize("argument", ["own", object, type("Nameless", (Inverted,), {"name": None})])
def test_only_named_codecs_are_registered(argument: Any) -> None:
    with pytest.raises(ConfigError, match="must be a subclass of Codec with a class attribute"):
        register(argument)
