"""Tests of zero-value compression: lossless round trips, and bytes that follow the format."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dlres import codecs
from lightning_dlres.codecs import ZeroValue
from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.kernels import workers, zvc, zvc_cpu, zvc_portable

ZVC = ZeroValue()
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.bool,
    torch.int32,
    torch.float64,
    torch.complex64,
]


@pytest.fixture
def threads() -> Iterator[None]:
    """Fixture that lets kernels use three threads on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def random_tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...], density: float) -> Tensor:
    """Return a tensor of random bits in which a share `density` of the elements is not zero."""
    random = np.random.default_rng(seed)
    count = int(np.prod(shape))
    data = random.integers(0, 256, (count, dtype.itemsize), dtype=np.uint8)
    data[random.random(count) >= density] = 0
    if dtype is torch.bool:
        data = (data != 0).astype(np.uint8)
    return torch.from_numpy(data.reshape(-1)).view(dtype).view(shape)


def bits(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as uint8[n]."""
    flat = tensor.contiguous().view(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def expected_bytes(elements: np.ndarray) -> bytes:
    """Return the bytes that the format prescribes, computed without the kernels."""
    mask = np.packbits(elements != 0, bitorder="little").tobytes()
    return mask.ljust(-(-elements.size // 64) * 8, b"\0") + elements[elements != 0].tobytes()


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple) | st.integers(0, 3000).map(
    lambda count: (count,)
)


@given(
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from(DTYPES),
    shape=shapes,
    density=st.sampled_from([0.0, 0.03, 0.4, 0.8, 1.0]),
    order=st.randoms(),
    step=st.integers(1, 3),
)
def test_any_bits_shape_and_stride_survive_a_round_trip(
    seed: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    density: float,
    order: object,
    step: int,
) -> None:
    tensor = random_tensor(seed, dtype, shape, density)
    dims = list(range(tensor.dim()))
    order.shuffle(dims)  # type: ignore[attr-defined]
    tensor = tensor.permute(dims)
    if tensor.dim():
        tensor = tensor[::step]
    encoded = ZVC.encode(tensor)
    decoded = codecs.decode(encoded)
    assert (decoded.dtype, decoded.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(bits(decoded), bits(tensor))
    assert encoded.nbytes <= tensor.numel() * tensor.element_size()


@given(
    seed=st.integers(0, 1 << 30),
    width=st.sampled_from(zvc.WIDTHS),
    count=st.integers(0, 2000),
    density=st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]),
    native=st.booleans(),
)
def test_bytes_follow_the_format(
    seed: int, width: int, count: int, density: float, native: bool
) -> None:
    dtype = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[width]
    source = random_tensor(seed, dtype, (count,), density)
    elements = source.numpy()
    memory = np.full(zvc.bound(count, width), 0xA5, np.uint8)
    mask, values = np.split(memory, [zvc.mask_bytes(count)])
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setitem(zvc_cpu.ENCODERS, width, zvc_portable.ENCODERS[width])
            patch.setitem(zvc_cpu.DECODERS, width, zvc_portable.DECODERS[width])
        nonzero = zvc_cpu.encode(elements.view(np.uint8), width, mask, values)
        encoded = memory[: zvc.mask_bytes(count) + nonzero * width]
        assert encoded.tobytes() == expected_bytes(elements)
        out = np.full(count * width, 0x5A, np.uint8)
        zvc_cpu.decode(mask, values[: nonzero * width].copy(), width, out)
    assert out.tobytes() == elements.tobytes()


def test_nan_infinity_negative_zero_and_subnormals_survive_a_round_trip() -> None:
    words = [0x7FC00001, 0xFFC00000, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x80000001, 0]
    data = bytearray(struct.pack("<8I", *words) * 100 + bytes(8000))
    tensor = torch.frombuffer(data, dtype=torch.float32)
    encoded = ZVC.encode(tensor)
    assert encoded.codec == "zvc"
    assert torch.equal(bits(codecs.decode(encoded)), bits(tensor))


@pytest.mark.parametrize("width", zvc.WIDTHS)
@pytest.mark.usefixtures("threads")
def test_several_threads_write_the_same_bytes(width: int) -> None:
    count = 5 * zvc_cpu._PIECE_BYTES // width + 77
    dtype = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[width]
    source = random_tensor(1, dtype, (count,), 0.4)
    assert len(zvc_cpu._pieces(count, width)) == 4
    encoded = ZVC.encode(source)
    assert encoded.payload.numpy().tobytes() == expected_bytes(source.numpy())
    assert torch.equal(codecs.decode(encoded), source)


@pytest.mark.usefixtures("threads")
def test_several_threads_can_encode_at_once() -> None:
    sources = [random_tensor(seed, torch.float16, (1_500_000,), 0.3) for seed in range(6)]
    with ThreadPoolExecutor(len(sources)) as pool:
        encoded = list(pool.map(ZVC.encode, sources))
        decoded = list(pool.map(ZVC.decode, encoded))
    for source, result in zip(sources, decoded, strict=True):
        assert torch.equal(bits(source), bits(result))


@pytest.mark.usefixtures("threads")
def test_a_forked_process_can_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random_tensor(2, torch.float32, (500_000,), 0.3)
    expected = ZVC.encode(source).payload
    # torch's own threads do not survive a fork.
    monkeypatch.setattr(workers, "count", lambda: 3)
    torch.set_num_threads(1)
    if not (child := os.fork()):
        os._exit(0 if torch.equal(ZVC.encode(source).payload, expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_permuted_memory_keeps_its_strides() -> None:
    tensor = torch.relu(torch.randn(4, 8, 5, 5) - 1).to(memory_format=torch.channels_last)
    encoded = ZVC.encode(tensor)
    assert encoded.stride == tensor.stride()
    assert codecs.decode(encoded).is_contiguous(memory_format=torch.channels_last)


def test_dense_data_is_encoded_raw() -> None:
    tensor = torch.randn(10_000)
    encoded = ZVC.encode(tensor)
    assert (encoded.codec, encoded.nbytes) == ("raw", 40_000)
    assert torch.equal(codecs.decode(encoded), tensor)


def test_elements_of_eight_bytes_are_encoded_raw() -> None:
    encoded = ZVC.encode(torch.zeros(100, dtype=torch.float64))
    assert encoded.codec == "raw"


def test_data_denser_than_its_sample_is_encoded_raw() -> None:
    tensor = torch.ones(64, 640, dtype=torch.int8)
    tensor[:, :64] = 0
    assert zvc.density(tensor.view(-1).view(torch.uint8), 1) == 0
    encoded = ZVC.encode(tensor)
    assert encoded.codec == "raw"
    assert torch.equal(codecs.decode(encoded), tensor)


@given(seed=st.integers(0, 1 << 30), density=st.floats(0, 1), count=st.integers(1, 50_000))
def test_density_is_close_to_the_share_of_nonzero_elements(
    seed: int, density: float, count: int
) -> None:
    tensor = random_tensor(seed, torch.int32, (count,), density)
    estimate = zvc.density(tensor.view(torch.uint8), 4)
    true = float((tensor != 0).float().mean())
    # Five standard deviations of a sample of 2048 elements.
    assert abs(estimate - true) <= (1e-6 if count <= 2048 else 0.056)


def test_the_memory_of_the_caller_is_used() -> None:
    tensor = torch.relu(torch.randn(5000))
    out = torch.empty(ZVC.bound(tensor), dtype=torch.uint8)
    encoded = ZVC.encode(tensor, out)
    assert encoded.data.data_ptr() == out.data_ptr()
    target = torch.empty_like(tensor)
    assert codecs.decode(encoded, target) is target
    assert torch.equal(target, tensor)


def test_encoded_data_hold_only_the_memory_that_they_need() -> None:
    encoded = ZVC.encode(torch.zeros(1 << 16))
    # The mask, and a vector that the last store may write to.
    assert encoded.data.untyped_storage().nbytes() == (1 << 16) // 8 + 32


def test_too_little_memory_is_refused() -> None:
    small = torch.empty(10, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="at least 4128 bytes, got 10"):
        ZVC.encode(torch.zeros(1000), small)
    with pytest.raises(ConfigError, match="128 bytes of the mask, got 10"):
        ZVC.encode_within(torch.zeros(1000), small)


def test_a_target_of_another_shape_is_refused() -> None:
    encoded = ZVC.encode(torch.zeros(8, 8))
    with pytest.raises(ProtocolError, match=r"\(8, 8\)"):
        codecs.decode(encoded, torch.zeros(64))


@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_damaged_data_is_refused(cut: int) -> None:
    good = ZVC.encode(torch.relu(torch.randn(1000) - 0.5))
    payload = good.payload[:-cut].clone()
    bad = replace(good, data=payload, used=payload.numel())
    with pytest.raises(ProtocolError, match="compressed data must have"):
        codecs.decode(bad)


@pytest.mark.parametrize("count", [1, 63, 65, 1000])
def test_a_mask_of_too_many_elements_is_refused(count: int) -> None:
    good = ZVC.encode(torch.zeros(count).index_fill(0, torch.tensor([0]), 1.0), density=0.0)
    bad = replace(good, codec="zvc", data=torch.zeros(-(-count // 64) * 8 + 4, dtype=torch.uint8))
    # The mask gives the one value to an element after the last one. The number of values is right.
    bad.data[count // 8] = 1 << count % 8
    with pytest.raises(ProtocolError, match=f"bits after element {count - 1}"):
        codecs.decode(replace(bad, used=bad.data.numel()))


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="to_dense"):
        ZVC.encode(torch.eye(3).to_sparse())


def test_memory_that_cannot_be_read_or_written_is_refused() -> None:
    tensor = torch.zeros(1000)
    with pytest.raises(ConfigError, match="must be contiguous and on the CPU"):
        ZVC.encode(tensor.to("meta"))
    one = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="must be contiguous and on the CPU"):
        ZVC.encode(tensor, one.expand(ZVC.bound(tensor)))


def test_encode_within_reports_the_bytes_that_do_not_fit() -> None:
    tensor = torch.relu(torch.randn(1000))
    whole = ZVC.encode(tensor)
    for size in (whole.nbytes + 8, whole.nbytes, whole.nbytes - 4, 128):
        memory = torch.full((size + 8,), 0xA5, dtype=torch.uint8)
        encoded = ZVC.encode_within(tensor, memory[:size])
        assert encoded.nbytes == whole.nbytes
        common = min(size, whole.nbytes)
        assert torch.equal(memory[:common], whole.payload[:common])
        assert set(memory[size:].tolist()) == {0xA5}
        if size >= whole.nbytes:
            assert torch.equal(codecs.decode(encoded), tensor)
