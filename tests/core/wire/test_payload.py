"""Tests of payloads: every dtype and layout arrives bit by bit, and nothing is pickled."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.payload import (
    INLINE_BYTES,
    decode,
    decode_header,
    encode,
    large_sizes,
)
from tests.support.examples import examples

KEY = ("step", 7)
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


def transfer(tree: Any) -> Any:
    """Encode a tree, copy the bytes as a socket would, and decode them."""
    data, large = encode(tree, KEY)
    assert all(t.dtype == torch.uint8 and t.dim() == 1 and t.is_contiguous() for t in large)
    header = decode_header(bytes(data), "rank 1")
    assert tuple(header.key) == KEY
    assert large_sizes(header) == [t.numel() for t in large]
    return decode(header, [t.clone() for t in large])


def bits(tensor: Tensor) -> bytes:
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_arrives(tensor: Tensor) -> None:
    (received,) = transfer([tensor])
    assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
    assert bits(received) == bits(tensor)
    assert received.requires_grad == tensor.requires_grad
    assert received.is_leaf


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (), (0,), (2, 0, 3), (1024, 9)], ids=str)
def test_every_dtype_and_shape_arrives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_arrives(random(shape, dtype))


@pytest.mark.parametrize("rows", [3, 200])
def test_every_layout_arrives(rows: int) -> None:
    x = random((rows, 3, 8), torch.float32)
    z = random((rows, 6), torch.complex64)
    for tensor in (
        x.transpose(0, 2),
        x[1:, ::2],
        x[0, 0, 0].expand(rows, 40),
        x.as_strided((4, 3), (1, 2), 5),
        z.conj(),
        z.conj().imag,
        z.resolve_conj()[:, 1].real,
    ):
        assert_arrives(tensor)


@pytest.mark.parametrize("count", [INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1])
def test_small_tensors_travel_in_the_header(count: int) -> None:
    tensor = random((count,), torch.uint8)
    data, large = encode([tensor], KEY)
    assert (len(data) > count) == (count <= INLINE_BYTES) == (not large)
    assert_arrives(tensor)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 1500), st.sampled_from(DTYPES)), max_size=5))
def test_small_and_large_tensors_keep_their_places(kinds: list[tuple[int, torch.dtype]]) -> None:
    tree = [random((count,), dtype) for count, dtype in kinds]
    received = transfer(tree)
    assert [(t.dtype, bits(t)) for t in received] == [(t.dtype, bits(t)) for t in tree]


def test_requires_grad_is_sent() -> None:
    leaf = nn.Parameter(torch.ones(2))
    for tensor in (leaf, leaf * 2, leaf.detach(), torch.ones(3000, requires_grad=True)):
        assert_arrives(tensor)
    assert not transfer([torch.ones(2)])[0].requires_grad


def test_a_large_tensor_is_not_copied() -> None:
    tensor = torch.zeros(INLINE_BYTES)
    _, (large,) = encode([tensor], KEY)
    assert large.data_ptr() == tensor.data_ptr()


def test_received_tensors_are_writable() -> None:
    small, array, large = transfer([torch.zeros(2), np.zeros(2), torch.zeros(INLINE_BYTES)])
    small += 1
    array += 1
    large += 1
    assert (small.sum(), array.sum(), large.sum()) == (2, 2, INLINE_BYTES)


class Explosive:
    def __reduce__(self) -> Any:
        raise AssertionError("pickled")


def test_nothing_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, explode)
    with pytest.raises(ConfigError, match="Explosive"):
        encode({"x": Explosive()}, KEY)
    assert transfer({"x": [torch.ones(2), "y"]})["x"][1] == "y"


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x93\x01\x02\x03", pickle.dumps(Explosive), msgspec.msgpack.encode({"a": 1})],
    ids=["empty", "no msgpack", "too short", "a pickle", "a map"],
)
def test_garbage_is_a_protocol_error_that_names_the_peer(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="stage 1 sent a header"):
        decode_header(data, "stage 1")


def header(
    structure: Any = ("t", 0),
    dtype: str = "uint8",
    shape: tuple[int, ...] = (1,),
    nbytes: int = 1,
    version: int = payload.VERSION,
    codec: str = payload.RAW,
    inline: bytes = b"a",
    requires_grad: bool = False,
) -> bytes:
    tensors = [[codec, dtype, shape, nbytes, requires_grad]]
    return msgspec.msgpack.encode([version, KEY, structure, tensors, inline])


@pytest.mark.parametrize("options", [{"version": 2}, {"codec": "gzip"}, {"dtype": "float1"}])
def test_an_unknown_version_codec_or_dtype_is_a_protocol_error(options: dict[str, Any]) -> None:
    assert decode(decode_header(header(), "stage 1"), []).tolist() == [ord("a")]
    with pytest.raises(ProtocolError, match="version or codec"):
        decode_header(header(**options), "stage 1")


@pytest.mark.parametrize(
    "data",
    [
        b"\x95\x01\x91\xa2\xff\xfe\x92\xa1t\x00\x90\xc4\x00",
        b"\x95\x01\x90" + b"\x91" * 5000 + b"\x90\x90\xc4\x00",
    ],
    ids=["not UTF-8", "too deep"],
)
def test_malformed_msgpack_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_header(data, "stage 1")


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "save"},
        {"dtype": "float32"},
        {"shape": (2,)},
        {"nbytes": 2},
        {"inline": b""},
        {"structure": ("t", 1)},
        {"structure": ()},
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself_is_a_protocol_error(options: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decode(decode_header(header(**options), "stage 1"), [])


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation.*")
@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_layouts_without_plain_memory_are_refused() -> None:
    for tensor, words in (
        (torch.eye(2).to_sparse(), "send it dense"),
        (torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "dequantize it"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "send it dense"),
    ):
        with pytest.raises((ConfigError, ProtocolError), match=words):
            encode([tensor], KEY)
    with pytest.raises(ProtocolError, match="has no contents"):
        encode([torch.ones(2, device="meta")], KEY)


class Boxes(Tensor):
    """A tensor with an attribute."""


def test_a_tensor_with_attributes_is_refused() -> None:
    boxes = torch.ones(2).as_subclass(Boxes)
    assert type(transfer([boxes])[0]) is Tensor
    boxes.canvas = (5, 5)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Boxes cannot be sent .*\['canvas'\] would be lost"):
        encode([boxes], KEY)


@pytest.mark.parametrize("shape", [(1 << 62, 4, 0), (0, 1 << 63)])
def test_an_impossible_shape_is_a_protocol_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError):
        decode(decode_header(header(shape=shape, nbytes=0, inline=b""), "stage 1"), [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_column_of_a_single_row_arrives(dtype: torch.dtype) -> None:
    assert_arrives(torch.ones(1, 4, dtype=dtype)[:, 0])


def test_requires_grad_of_integers_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        decode(decode_header(header(requires_grad=True), "stage 1"), [])


@pytest.mark.parametrize(("size", "sizes"), [(5000, [8192]), (9000, [8192, 900])])
def test_a_frame_is_padded_unless_it_may_be_short(size: int, sizes: list[int]) -> None:
    header, large = payload.encode(torch.zeros(size, dtype=torch.uint8), ())
    padded, _ = payload.pack(header, large, 8192)
    short, _ = payload.pack(header, large, 8192, is_padded=False)
    assert [len(transfer) for transfer in padded][:1] == sizes[:1]
    assert len(padded) == len(short) == len(sizes)
    # The message has a prefix, a header and an alignment of less than 200 bytes together.
    assert size < sum(map(len, short)) < size + 200
    assert torch.equal(torch.cat(padded)[: sum(map(len, short))], torch.cat(short))
