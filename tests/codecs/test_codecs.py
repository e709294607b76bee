"""Tests of what all codecs share: names, small shapes, sums and refused data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_dlres import codecs
from lightning_dlres.codecs import Codec, Raw, ZeroValue, register
from lightning_dlres.core.errors import ConfigError, ProtocolError


def test_codecs_are_found_by_name() -> None:
    assert {"raw", "zvc"} <= set(codecs.names())
    assert isinstance(codecs.codec("zvc"), ZeroValue)
    with pytest.raises(ConfigError, match=", got 'zip'"):
        codecs.codec("zip")


def test_two_codecs_cannot_have_one_name() -> None:
    class Other(Raw):
        name = "zvc"

    with pytest.raises(ConfigError, match="got 'zvc', the name of ZeroValue"):
        register(Other)
    assert isinstance(codecs.codec("zvc"), ZeroValue)


@pytest.mark.parametrize("name", ["raw", "zvc"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7)])
def test_small_shapes_survive_a_round_trip(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    decoded = codecs.decode(codecs.codec(name).encode(tensor))
    assert torch.equal(decoded, tensor)


@pytest.mark.parametrize("codec", [Raw(), ZeroValue()])
def test_merge_sums_tensors_of_different_codecs(codec: Codec) -> None:
    sparse, dense = torch.relu(torch.randn(1000) - 1), torch.randn(1000)
    merged = codec.merge([ZeroValue().encode(sparse), Raw().encode(dense)])
    assert torch.equal(codecs.decode(merged), sparse + dense)


def test_merge_refuses_different_shapes_and_no_parts() -> None:
    parts = [Raw().encode(torch.zeros(3)), Raw().encode(torch.zeros(4))]
    with pytest.raises(ConfigError, match="parts must be"):
        Raw().merge(parts)
    with pytest.raises(ConfigError, match="parts must be"):
        Raw().merge([])


def test_merge_changes_no_part() -> None:
    part = Raw().encode(torch.ones(4))
    Raw().merge([part, part])
    assert torch.equal(codecs.decode(part), torch.ones(4))


def test_raw_data_of_another_length_are_refused() -> None:
    part = replace(Raw().encode(torch.ones(4)), used=8)
    with pytest.raises(ProtocolError, match=r"must have 16 bytes .* got 8 bytes"):
        codecs.decode(part)


@pytest.mark.parametrize("stride", [(0, 1), (8, 2), (1,), (4, 1, 1), (3, 1)])
@pytest.mark.parametrize("name", codecs.names())
def test_strides_that_leave_gaps_or_overlap_are_refused(name: str, stride: tuple[int, ...]) -> None:
    encoded = codecs.codec(name).encode(torch.eye(4))
    with pytest.raises(ProtocolError, match="must leave no gaps and no overlaps"):
        codecs.decode(replace(encoded, stride=stride))
