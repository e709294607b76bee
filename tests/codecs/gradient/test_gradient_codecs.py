"""Properties that every gradient codec has."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dlres import codecs
from lightning_dlres.codecs import Encoded, decode
from lightning_dlres.codecs.gradient import (
    DGC,
    QSGD,
    RESIDUAL,
    BFloat16,
    BlockwiseInt8,
    Float8,
    Float16,
    GradDrop,
    GradientCodec,
    OneBit,
    State,
    TernGrad,
    ThresholdQuantisation,
)
from lightning_dlres.core.errors import ConfigError, ProtocolError
from tests.codecs.gradient import oracles
from tests.support.examples import checkered

CPU = torch.device("cpu")
BIASED: dict[str, GradientCodec] = {
    "onebit": OneBit(),
    "tbq": ThresholdQuantisation(),
    "tbq 0.5": ThresholdQuantisation(threshold=0.5),
    "int8": BlockwiseInt8(),
    "fp8": Float8(),
    "fp8 e5m2": Float8(format="e5m2"),
    "fp16": Float16(),
    "bf16": BFloat16(),
    "graddrop": GradDrop(),
    "graddrop 0.3": GradDrop(ratio=0.3),
    "dgc": DGC(ratio=0.1),
}
UNBIASED: dict[str, GradientCodec] = {
    "qsgd 2": QSGD(bits=2),
    "qsgd 4": QSGD(),
    "qsgd 8": QSGD(bits=8),
    "terngrad": TernGrad(),
}
CODECS = BIASED | UNBIASED
SIZES = (0, 1, 3, 5, 33, 4095, 4096, 4097, 9000, 70_000)


def gradient(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def compress(codec: GradientCodec, values: Tensor, state: State, **options: float | int) -> Tensor:
    payload = torch.full((codec.payload_bytes(values.numel()),), 255, dtype=torch.uint8)
    codec.compress(values, state, payload, **options)  # type: ignore[arg-type]
    return payload


def expand(codec: GradientCodec, payload: Tensor, count: int, scale: float = 1.0) -> Tensor:
    out = torch.full((count,), math.nan)
    codec.expand(payload, out, scale=scale)
    return out


@pytest.mark.parametrize(("name", "count"), checkered(BIASED, SIZES))
def test_nothing_is_lost_over_steps(name: str, count: int) -> None:
    codec = BIASED[name]
    state = codec.new_state(count, CPU)
    given_sum, sent = (
        torch.zeros(count, dtype=torch.float64),
        torch.zeros(count, dtype=torch.float64),
    )
    for step in range(6):
        values = gradient(count, step)
        sent += expand(codec, compress(codec, values, state), count)
        given_sum += values
    total = sent + state[RESIDUAL]
    torch.testing.assert_close(total, given_sum, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "count"), checkered(CODECS, SIZES))
def test_decoding_can_add_and_scale(name: str, count: int) -> None:
    codec = CODECS[name]
    payload = compress(codec, gradient(count), codec.new_state(count, CPU), seed=3)
    decoded = expand(codec, payload, count)
    assert torch.equal(expand(codec, payload, count, scale=0.25), decoded * 0.25)
    total = gradient(count, 1)
    expected = total + decoded
    codec.expand(payload, total, accumulate=True)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("name", CODECS)
def test_the_result_does_not_depend_on_the_threads(name: str) -> None:
    codec, count, before = CODECS[name], 600_000, torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            state = codec.new_state(count, CPU)
            payloads = [compress(codec, gradient(count, i), state, seed=i) for i in range(2)]
            results.append([*payloads, expand(codec, payloads[1], count), *state.values()])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", sorted(set(CODECS) - {"fp16"}))
def test_finite_gradients_of_any_size_stay_finite(name: str) -> None:
    codec, count = CODECS[name], 64
    # 1e-45 is the smallest positive float32. Scales of blocks are then no normal numbers. The
    # largest values are those whose sum in a block of one bit does not overflow.
    for exponent in [*range(-45, -36), -20, 0, 20, 33]:
        for factor in (1.0, 2.1, 5.2, 8.6):
            values = (gradient(count).clamp(-1, 1) * float(f"{factor}e{exponent}")).float()
            decoded = expand(codec, compress(codec, values, codec.new_state(count, CPU)), count)
            assert decoded.isfinite().all(), (factor, exponent)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4096, 8999])
def test_values_that_are_not_finite_arrive_and_leave_the_state_clean(
    name: str, value: float, place: int
) -> None:
    codec, count = CODECS[name], 9000
    state = codec.new_state(count, CPU)
    compress(codec, gradient(count), state)
    before = {key: tensor.clone() for key, tensor in state.items()}
    values = gradient(count, 1)
    values[place] = value
    decoded = expand(codec, compress(codec, values, state), count)
    assert not decoded[place].isfinite()
    assert all(tensor.isfinite().all() for tensor in state.values())
    if RESIDUAL in state:
        assert state[RESIDUAL][place] == before[RESIDUAL][place]


@pytest.mark.parametrize("name", CODECS)
def test_a_power_of_two_scales_the_gradient_exactly(name: str) -> None:
    codec, count = CODECS[name], 9000
    plain, scaled = codec.new_state(count, CPU), codec.new_state(count, CPU)
    for step in range(3):
        values = gradient(count, step)
        payload = compress(codec, values, plain, seed=step)
        assert torch.equal(compress(codec, values * 1024, scaled, scale=2**-10, seed=step), payload)
    assert all(torch.equal(plain[key], scaled[key]) for key in plain)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("constant", [0.0, 1.0, -1e-30, 1e30])
def test_constant_gradients(name: str, constant: float) -> None:
    codec, count = CODECS[name], 5000
    state, sent = codec.new_state(count, CPU), torch.zeros(count, dtype=torch.float64)
    for step in range(4):
        sent += expand(codec, compress(codec, torch.full((count,), constant), state), count)
        assert sent.isfinite().all(), step
    if RESIDUAL in state:
        torch.testing.assert_close(
            sent + state[RESIDUAL], torch.full_like(sent, 4 * constant), rtol=1e-5, atol=1e-37
        )
    if constant == 0:
        assert not sent.any()


@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_of_many_codes_is_the_gradient(name: str) -> None:
    """A codec without bias fails with a probability below 1e-6, by Hoeffding's inequality for each
    of the 300 elements: its codes are two neighbouring levels."""
    codec, count, draws = UNBIASED[name], 300, 4000
    # Bounded values, which TernGrad does not clip.
    values = torch.rand(count, generator=torch.Generator().manual_seed(1)) * 2 - 1
    levels = (1 << (codec.bits - 1)) - 1 if isinstance(codec, QSGD) else 1
    distance = float(values.abs().max()) / levels
    decoded = torch.stack(
        [expand(codec, compress(codec, values, {}, seed=i), count) for i in range(draws)]
    ).double()
    bound = distance * math.sqrt(math.log(2 * count / 1e-6) / (2 * draws))
    assert (decoded.mean(0) - values).abs().max() <= bound + 1e-6
    assert (decoded - values).abs().max() <= distance * 1.0001
    assert not torch.equal(decoded[0], decoded[1])


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), max_size=40), st.sampled_from(sorted(BIASED)))
def test_any_small_gradient_is_conserved(elements: list[float], name: str) -> None:
    codec, values = BIASED[name], torch.tensor(elements, dtype=torch.float32)
    state = codec.new_state(len(elements), CPU)
    sent = expand(codec, compress(codec, values, state), len(elements))
    torch.testing.assert_close(sent + state[RESIDUAL], values, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("count", SIZES)
def test_decoded_values_are_those_of_the_definitions(count: int) -> None:
    values = gradient(count) + 0.1
    array = values.numpy()
    cases = [
        (OneBit(), oracles.onebit(array), 1e-5),
        (ThresholdQuantisation(threshold=0.7), oracles.tbq(array, np.float32(0.7)), 0.0),
        (BlockwiseInt8(), oracles.int8(array), 1e-6),
    ]
    # The largest elements of a large gradient are found with a sample.
    if 0 < count < 1 << 16:
        cases += [
            (GradDrop(ratio=0.05), oracles.largest(array, 0.05), 0.0),
            (DGC(ratio=0.002), oracles.largest(array, 0.002), 0.0),
        ]
    for codec, expected, tolerance in cases:
        decoded = expand(codec, compress(codec, values, codec.new_state(count, CPU)), count)
        np.testing.assert_allclose(decoded.numpy(), expected, rtol=0, atol=tolerance)


def test_about_as_many_elements_of_a_large_gradient_are_sent_as_asked_for() -> None:
    values = gradient(1_000_000)
    codec = GradDrop(ratio=0.01)
    decoded = expand(codec, compress(codec, values, codec.new_state(1_000_000, CPU)), 1_000_000)
    sent = decoded.nonzero().view(-1)
    assert 7_000 < sent.numel() <= 10_000
    assert torch.equal(decoded[sent], values[sent])
    # The elements that are sent are larger than nearly all others.
    assert (values.abs() > values[sent].abs().min()).sum() < 14_000


def test_terngrad_sends_signs_of_one_magnitude_and_clips() -> None:
    values = gradient(10_000)
    decoded = expand(TernGrad(), compress(TernGrad(), values, {}, seed=5), 10_000)
    limit = 2.5 * values.std(correction=0)
    assert torch.allclose(decoded.abs().unique(), torch.tensor([0.0, float(limit)]))
    assert (decoded[values >= limit] == decoded.max()).all()
    assert (decoded * values >= 0).all()


def test_dgc_corrects_momentum_and_masks_it() -> None:
    codec = DGC(ratio=0.25, momentum=0.5)
    state = codec.new_state(4, CPU)
    first = expand(codec, compress(codec, torch.tensor([4.0, 1.0, 1.0, 1.0]), state), 4)
    assert first.tolist() == [4.0, 0.0, 0.0, 0.0]
    # The sent element starts again without momentum; the others have accumulated it.
    second = expand(codec, compress(codec, torch.tensor([1.0, 2.0, 1.0, 1.0]), state), 4)
    assert second.tolist() == [0.0, 1.0 + (0.5 + 2.0), 0.0, 0.0]
    assert state[RESIDUAL].tolist() == [1.0, 0.0, 2.5, 2.5]
    assert state["momentum"].tolist() == [1.0, 0.0, 1.5, 1.5]
    assert RESIDUAL in codec.new_state(4, CPU, is_aggregator=True)
    assert "momentum" not in codec.new_state(4, CPU, is_aggregator=True)


def test_dgc_clips_the_norm_of_a_rank_alone() -> None:
    codec, values = DGC(ratio=1.0, clip=1.0), torch.tensor([3.0, 4.0])
    state, total = codec.new_state(2, CPU), codec.new_state(2, CPU, is_aggregator=True)
    torch.testing.assert_close(
        expand(codec, compress(codec, values, state), 2), torch.tensor([0.6, 0.8])
    )
    assert torch.equal(expand(codec, compress(codec, values, total), 2), values)


def test_dgc_warms_up() -> None:
    codec = DGC(ratio=0.001, warmup_steps=50)
    ratios = [codec.at_step(step).payload_bytes(100_000) / 8e5 for step in (0, 15, 25, 45, 50, 99)]
    np.testing.assert_allclose(ratios, [0.25, 0.0625, 0.015625, 0.0039, 0.001, 0.001], rtol=0.01)
    assert OneBit().at_step(3).payload_bytes(10) == OneBit().payload_bytes(10)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("onebit", 1),
        ("tbq", 2),
        ("terngrad", 2),
        ("qsgd", 4),
        ("int8", 8),
        ("fp8", 8),
        ("fp16", 16),
    ],
)
def test_payloads_are_as_small_as_their_codes(name: str, bits: int) -> None:
    codec = codecs.codec(name)
    assert isinstance(codec, GradientCodec)
    assert 1_000_000 * bits / 8 <= codec.payload_bytes(1_000_000) <= 1.02 * 1_000_000 * bits / 8 + 8


@pytest.mark.parametrize(
    "name", ["onebit", "tbq", "terngrad", "qsgd", "int8", "fp8", "fp16", "bf16", "graddrop", "dgc"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_registry_encodes_tensors_of_any_shape(name: str, dtype: torch.dtype) -> None:
    tensor = gradient(60).view(3, 20).t().to(dtype)
    encoded = codecs.codec(name).encode(tensor)
    assert (encoded.codec, encoded.shape, encoded.dtype) == (name, tensor.shape, dtype)
    decoded = decode(encoded)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, dtype)
    assert (decoded * tensor >= 0).all()
    out = torch.empty_like(decoded)
    assert decode(encoded, out) is out
    assert torch.equal(out, decoded)


def test_bad_payloads_and_tensors_are_refused() -> None:
    encoded = OneBit().encode(torch.randn(100))
    short = Encoded(**{**vars(encoded), "used": 4})
    with pytest.raises(ProtocolError, match="data of codec 'onebit' must have 24 bytes for 100"):
        decode(short)
    for codec in (OneBit(), Float16()):
        with pytest.raises(ConfigError, match=r"tensor must have values .* got one on the meta"):
            codec.encode(torch.empty(4, device="meta"))
    with pytest.raises(ConfigError, match="tensor must have a floating-point dtype"):
        OneBit().encode(torch.arange(4))
    with pytest.raises(ConfigError, match="tensor must be strided and not quantized"):
        OneBit().encode(torch.eye(4).to_sparse())
    with pytest.raises(ConfigError, match="out must have at least 24 bytes, got 3"):
        OneBit().encode(torch.randn(100), torch.empty(3, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ThresholdQuantisation(threshold=0.0), "threshold must be a finite number above 0"),
        (lambda: QSGD(bits=3), r"bits must be 2, 4 or 8, got 3\. Use bits=4"),
        (lambda: TernGrad(clip=-1.0), "clip must be a finite number above 0"),
        (lambda: GradDrop(ratio=0.0), r"ratio must be in \(0, 1\], got 0\.0"),
        (lambda: DGC(momentum=1.0), r"momentum must be in \[0, 1\), got 1\.0"),
        (lambda: DGC(warmup_steps=-1), "warmup_steps must be"),
        (lambda: Float8(format="e3m4"), "format must be one of"),  # type: ignore[arg-type]
    ],
)
def test_bad_options_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
