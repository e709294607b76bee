"""Tests of payloads: tensors of every dtype and layout arrive unchanged, and nothing is pickled."""

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
# Elements of a float32 tensor that is too large for the header.
LARGE_COUNT = INLINE_BYTES // 4 + 1
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


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of the elements in row-major order, whatever the strides."""
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_arrives(tensor: Tensor) -> None:
    (received,) = transfer([tensor])
    assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
    assert bytes_of(received) == bytes_of(tensor)
    assert received.requires_grad == tensor.requires_grad
    assert received.is_leaf


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of random bits, which may include NaNs; of truth values for bool."""
    generator = torch.Generator().manual_seed(3)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (), (0,), (2, 0, 3), (1024, 9)], ids=str)
def test_every_dtype_and_shape_arrives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_arrives(random_bits(shape, dtype))


@pytest.mark.parametrize("rows", [3, 200])
def test_every_layout_arrives(rows: int) -> None:
    x = random_bits((rows, 3, 8), torch.float32)
    z = random_bits((rows, 6), torch.complex64)
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


@pytest.mark.parametrize("nbytes", [INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1])
def test_small_tensors_travel_in_the_header(nbytes: int) -> None:
    tensor = random_bits((nbytes,), torch.uint8)
    data, large = encode([tensor], KEY)
    is_inline = nbytes <= INLINE_BYTES
    assert len(large) == (0 if is_inline else 1)
    assert (len(data) > nbytes) == is_inline
    assert_arrives(tensor)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 1500), st.sampled_from(DTYPES)), max_size=5))
def test_small_and_large_tensors_keep_their_places(kinds: list[tuple[int, torch.dtype]]) -> None:
    tree = [random_bits((count,), dtype) for count, dtype in kinds]
    received = transfer(tree)
    assert [(t.dtype, bytes_of(t)) for t in received] == [(t.dtype, bytes_of(t)) for t in tree]


def test_requires_grad_is_sent() -> None:
    leaf = nn.Parameter(torch.ones(2))
    for tensor in (leaf, leaf * 2, leaf.detach(), torch.ones(LARGE_COUNT, requires_grad=True)):
        assert_arrives(tensor)
    assert not transfer([torch.ones(2)])[0].requires_grad


def test_a_large_tensor_is_not_copied() -> None:
    tensor = torch.zeros(LARGE_COUNT)
    _, (large,) = encode([tensor], KEY)
    assert large.data_ptr() == tensor.data_ptr()


def test_received_tensors_are_writable() -> None:
    small, array, large = transfer([torch.zeros(2), np.zeros(2), torch.zeros(LARGE_COUNT)])
    small += 1
    array += 1
    large += 1
    assert (small.sum(), array.sum(), large.sum()) == (2, 2, LARGE_COUNT)


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
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        pickle.dumps(Explosive),
        msgspec.msgpack.encode({"a": 1}),
        b"\x95\x01\x91\xa2\xff\xfe\x92\xa1t\x00\x90\xc4\x00",
        b"\x95\x01\x90" + b"\x91" * 5000 + b"\x90\x90\xc4\x00",
    ],
    ids=["empty", "not msgpack", "too short", "a pickle", "a map", "not UTF-8", "nested too deep"],
)
def test_bytes_that_are_no_header_are_a_protocol_error_that_names_the_peer(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="stage 1 sent a header"):
        decode_header(data, "stage 1")


def encoded_header(
    structure: Any = ("t", 0),
    dtype: str = "uint8",
    shape: tuple[int, ...] = (1,),
    nbytes: int = 1,
    version: int = payload.VERSION,
    codec: str = payload.RAW,
    inline: bytes = b"a",
    requires_grad: bool = False,
) -> bytes:
    """Return an encoded header of one inline tensor. The default arguments make a valid one."""
    tensors = [[codec, dtype, shape, nbytes, requires_grad]]
    return msgspec.msgpack.encode([version, KEY, structure, tensors, inline])


# `torch.save` exists, but is no dtype.
@pytest.mark.parametrize(
    "options", [{"version": 2}, {"codec": "gzip"}, {"dtype": "float1"}, {"dtype": "save"}], ids=str
)
def test_an_unknown_version_codec_or_dtype_is_a_protocol_error(options: dict[str, Any]) -> None:
    assert decode(decode_header(encoded_header(), "stage 1"), []).tolist() == [ord("a")]
    with pytest.raises(ProtocolError, match="version or codec"):
        decode_header(encoded_header(**options), "stage 1")


# A valid header has one uint8 tensor of shape (1,), with 1 byte.
@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"shape": (2,)}, {"nbytes": 2}, {"inline": b""}],
    ids=str,
)
def test_a_header_whose_sizes_disagree_is_a_protocol_error(options: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="sizes, shapes and dtypes disagree"):
        decode_header(encoded_header(**options), "stage 1")


@pytest.mark.parametrize("structure", [("t", 1), ()], ids=["a tensor that is missing", "empty"])
def test_a_malformed_structure_is_a_protocol_error(structure: tuple[Any, ...]) -> None:
    header = decode_header(encoded_header(structure), "stage 1")
    with pytest.raises(ProtocolError, match="structure of a received tree is malformed"):
        decode(header, [])


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation.*")
@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
@pytest.mark.filterwarnings("ignore:.*Sparse CSR tensor support.*")
def test_tensors_without_plain_bytes_are_the_users_error() -> None:
    rows = [torch.ones(2), torch.ones(3)]
    for tensor, words in (
        (torch.eye(2).to_sparse(), r"layout torch.sparse_coo .* Call .to_dense\(\) on it"),
        (torch.eye(2).to_sparse_csr(), r"layout torch.sparse_csr .* Call .to_dense\(\) on it"),
        (torch.quantize_per_tensor(rows[0], 1.0, 0, torch.qint8), r"Call .dequantize\(\) on it"),
        (torch.nested.nested_tensor(rows), "A nested tensor .* Pad it with"),
        (torch.nested.nested_tensor(rows, layout=torch.jagged), "A nested tensor .* Pad it with"),
        (torch.ones(2, device="meta"), "meta device .* Make it on a device"),
    ):
        with pytest.raises(ConfigError, match=words):
            encode([tensor], KEY)


class Boxes(Tensor):
    """Subclass of Tensor; the test adds an attribute to an instance."""


def test_a_tensor_with_attributes_is_refused() -> None:
    boxes = torch.ones(2).as_subclass(Boxes)
    assert type(transfer([boxes])[0]) is Tensor
    boxes.canvas = (5, 5)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Boxes cannot be sent .*\['canvas'\] would be lost"):
        encode([boxes], KEY)


@pytest.mark.parametrize("shape", [(1 << 62, 4, 0), (0, 1 << 63)])
def test_an_impossible_shape_is_a_protocol_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="cannot be built on this rank"):
        decode(decode_header(encoded_header(shape=shape, nbytes=0, inline=b""), "stage 1"), [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_column_of_a_single_row_arrives(dtype: torch.dtype) -> None:
    assert_arrives(torch.ones(1, 4, dtype=dtype)[:, 0])


def test_requires_grad_of_integers_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="dtypes disagree"):
        decode_header(encoded_header(requires_grad=True), "stage 1")


@pytest.mark.parametrize(("nbytes", "transfers"), [(5000, 1), (9000, 2)])
def test_a_frame_is_padded_unless_it_may_be_short(nbytes: int, transfers: int) -> None:
    frame_bytes = 8192
    header, large = payload.encode(torch.zeros(nbytes, dtype=torch.uint8), ())
    padded, _ = payload.pack(header, large, frame_bytes)
    short, _ = payload.pack(header, large, frame_bytes, is_padded=False)
    assert len(padded) == len(short) == transfers
    assert len(padded[0]) == frame_bytes
    short_bytes = sum(map(len, short))
    # The message has a prefix, a header and an alignment of less than 200 bytes together.
    assert nbytes < short_bytes < nbytes + 200
    # Only the first transfer of a message is a frame, so only that one is padded.
    assert sum(map(len, padded)) == max(frame_bytes, short_bytes)
    assert torch.equal(torch.cat(padded)[:short_bytes], torch.cat(short))
