"""Tests of the CUDA kernels of gradient codecs: simulated, compiled, and on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dlres.codecs.gradient import (
    DGC,
    QSGD,
    BFloat16,
    BlockwiseInt8,
    Float8,
    Float16,
    GradDrop,
    GradientCodec,
    OneBit,
    TernGrad,
    ThresholdQuantisation,
)
from lightning_dlres.core.host.lightweight_process import lightweight_command
from lightning_dlres.kernels import zvc

NAMES = ("onebit", "tbq", "tbq0.5", "int8", "qsgd2", "qsgd4", "qsgd8", "terngrad", "dgc")
FEW_CASES = [
    *(f"{name},0,0," for name in NAMES),
    "onebit,70,0,large",
    "tbq,300,1,zero",
    "tbq0.5,1,-2,inf",
    "int8,1,2,",
    "int8,33,0,tiny+inf",
    "int8,33,0,largest",
    "qsgd8,100,3,tiny",
    "qsgd8,40,0,largest",
    "dgc,50,1,nan",
]
SIZES = (0, 1, 31, 32, 33, 255, 256, 257, 4095, 4096, 4097, 8193)
OPTIONS = ("nan", "inf", "tiny", "large", "largest", "zero", "tiny+zero", "large+nan")
ALL_CASES = {
    name: [f"{name},{n},1," for n in SIZES]
    + [f"{name},700,{0 if o == 'largest' else -2},{o}" for o in OPTIONS]
    for name in NAMES
}


def run_simulator(cases: list[str]) -> None:
    done = subprocess.run(
        lightweight_command("tests.support.simulated_gradients:main", *cases),
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stdout.strip() == "kernels agree", done.stderr


def test_simulated_kernels_write_the_bits_of_the_cpu() -> None:
    pytest.importorskip("numba_cuda")
    run_simulator(FEW_CASES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_simulated_kernels_write_the_bits_of_the_cpu_for_all_sizes(name: str) -> None:
    pytest.importorskip("numba_cuda")
    run_simulator(ALL_CASES[name])


def kernel_signatures() -> Iterator[tuple[str, Callable[..., None], tuple[Any, ...]]]:
    """Yield the name, the body and the argument types of each kernel."""
    from numba import types

    from lightning_dlres.kernels.gradients import (
        levels_cuda,
        sign_cuda,
        sums_cuda,
        threshold_cuda,
    )

    floats, words = types.Array(types.float32, 1, "C"), types.Array(types.uint32, 1, "C")
    sums, table = types.Array(types.float64, 1, "C"), types.Array(types.float64, 2, "C")
    scale, accumulate = types.float32, types.boolean
    yield "sign encode", sign_cuda.sign_encode, (floats, floats, floats, words, scale)
    yield "sign decode", sign_cuda.sign_decode, (floats, floats, words, scale, accumulate)
    arguments: tuple[Any, ...] = (floats, floats, sums, words, floats, floats, words, scale)
    yield "threshold encode", threshold_cuda.threshold_encode, arguments
    yield (
        "threshold decode",
        threshold_cuda.threshold_decode,
        (floats, floats, words, scale, accumulate),
    )
    yield "magnitudes", threshold_cuda.threshold_magnitudes, (floats, sums, floats, scale)
    yield "adapt", threshold_cuda.threshold_adapt, (table, floats, types.float64, types.boolean)
    yield "moments", sums_cuda.moments_of_blocks, (floats, floats, table, floats)
    yield "totals", sums_cuda.totals_of_columns, (table, sums)
    for bits in (2, 4, 8):
        nearest, stochastic, with_step, decode = levels_cuda.kernel_functions(bits)
        yield f"nearest {bits}", nearest, (floats, floats, floats, words, scale)
        yield f"stochastic {bits}", stochastic, (floats, floats, words, scale, types.uint32)
        yield (
            f"stochastic with step {bits}",
            with_step,
            (floats, floats, words, scale, types.uint32),
        )
        yield f"level decode {bits}", decode, (floats, floats, words, scale, accumulate)


def assert_rounds_as_a_cpu(name: str, ptx: str) -> None:
    """Assert that no floating-point operation can be fused, flushes to zero or is approximate."""
    assert not re.search(r"\bfma\.", ptx), name
    # The assembler may contract operations without a rounding mode.
    assert not re.search(r"\b(add|sub|mul|div|mad)\.(ftz\.)?f(32|64)", ptx), name
    assert not re.search(r"\.(ftz|approx|full)\b", ptx), name
    # Elements are kept in registers, not in local memory: there is one pass over memory.
    assert ".local" not in ptx, name


def compile_kernels(names: set[str] | None, capability: tuple[int, int]) -> None:
    pytest.importorskip("numba_cuda")
    from numba import cuda

    compiled = 0
    for name, body, arguments in kernel_signatures():
        if names is None or name in names:
            ptx, _ = cuda.compile_ptx(body, arguments, cc=capability)
            assert_rounds_as_a_cpu(name, ptx)
            compiled += 1
    assert compiled == (len(names) if names is not None else 20)


def test_kernels_compile_without_fused_operations() -> None:
    names = {"sign encode", "threshold encode", "threshold decode", "nearest 8", "stochastic 4"}
    compile_kernels(names, (7, 5))


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_all_kernels_compile_without_fused_operations(capability: tuple[int, int]) -> None:
    compile_kernels(None, capability)


def test_the_compiler_fuses_plain_arithmetic() -> None:
    """This is why the kernels use functions with a rounding mode."""
    pytest.importorskip("numba_cuda")
    from numba import cuda, types

    def kernel(values: Any) -> None:
        values[0] = values[1] * values[2] + values[3]

    ptx, _ = cuda.compile_ptx(kernel, (types.Array(types.float32, 1, "C"),), cc=(7, 5))
    assert re.search(r"\bfma\.", ptx)
    with pytest.raises(AssertionError, match="plain"):
        assert_rounds_as_a_cpu("plain", ptx)


def test_codecs_with_kernels_need_their_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zvc, "runs_on_gpus", lambda: False)
    with_kernels = [OneBit(), ThresholdQuantisation(), BlockwiseInt8(), QSGD(), TernGrad(), DGC()]
    others = [Float8(), Float16(), BFloat16(), GradDrop()]
    assert not any(codec.runs_on_gpus() for codec in with_kernels)
    assert all(codec.runs_on_gpus() for codec in others)
    monkeypatch.setattr(zvc, "runs_on_gpus", lambda: True)
    assert all(codec.runs_on_gpus() for codec in [*with_kernels, *others])


# The largest elements of small gradients are the same on all devices, but their order differs.
SAME_BYTES: dict[str, GradientCodec] = {
    "onebit": OneBit(),
    "tbq": ThresholdQuantisation(),
    "tbq 0.5": ThresholdQuantisation(threshold=0.5),
    "int8": BlockwiseInt8(),
    "qsgd 2": QSGD(bits=2),
    "qsgd 4": QSGD(),
    "qsgd 8": QSGD(bits=8),
    "terngrad": TernGrad(),
    "fp8": Float8(),
    "fp8 e5m2": Float8(format="e5m2"),
    "fp16": Float16(),
    "bf16": BFloat16(),
}
SPARSE: dict[str, GradientCodec] = {
    "graddrop": GradDrop(ratio=0.1),
    "dgc": DGC(ratio=0.1, momentum=0.5, clip=2.0),
}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def gradient(count: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    exponents = torch.randint(-12, 3, (count,), generator=generator)
    return torch.randn(count, generator=generator) * torch.exp2(exponents)


def assert_same_bits(on_gpu: Tensor, on_cpu: Tensor) -> None:
    """Assert that all bits are equal, except those of NaN."""
    actual = on_gpu.cpu()
    assert torch.equal(actual.isnan(), on_cpu.isnan())
    numbers = ~on_cpu.isnan()
    assert torch.equal(actual[numbers].view(torch.int32), on_cpu[numbers].view(torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAME_BYTES)
@pytest.mark.parametrize("count", [0, 1, 33, 4095, 4096, 4097, 1_000_003])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_gpu_writes_the_bytes_of_the_cpu(name: str, count: int, value: float) -> None:
    codec = SAME_BYTES[name]
    states = [codec.new_state(count, device) for device in (CPU, GPU)]
    totals = [gradient(count, 99), gradient(count, 99).to(GPU)]
    for step in range(3):
        values = gradient(count, step)
        if step == 2:
            values[count // 2 :][:1] = value
        payloads = []
        for device, state, total in zip((CPU, GPU), states, totals, strict=True):
            payload = torch.full((codec.payload_bytes(count),), 0, dtype=torch.uint8, device=device)
            codec.compress(values.to(device), state, payload, scale=2.0**-step, seed=7 + step)
            codec.expand(payload, total, scale=1 / 3, accumulate=step > 0)
            payloads.append(payload.cpu())
        if step < 2 or value == 0 or codec.uses_kernels:
            # The bits of NaN differ in codecs that leave their arithmetic to torch.
            assert torch.equal(*payloads)
        assert_same_bits(totals[1], totals[0])
        for key in states[0]:
            assert_same_bits(states[1][key], states[0][key])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("count", [0, 1, 33, 5000])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_gpu_sends_the_largest_elements(name: str, count: int, value: float) -> None:
    codec = SPARSE[name]
    states = [codec.new_state(count, device) for device in (CPU, GPU)]
    totals = [gradient(count, 99), gradient(count, 99).to(GPU)]
    for step in range(3):
        values = gradient(count, step)
        if step == 2:
            values[count // 2 :][:1] = value
        for device, state, total in zip((CPU, GPU), states, totals, strict=True):
            payload = torch.empty(codec.payload_bytes(count), dtype=torch.uint8, device=device)
            codec.compress(values.to(device), state, payload, scale=2.0**-step)
            codec.expand(payload, total, scale=0.5, accumulate=step > 0)
        assert_same_bits(totals[1], totals[0])
        for key in states[0]:
            assert_same_bits(states[1][key], states[0][key])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAME_BYTES | SPARSE)
def test_codecs_run_on_the_current_stream_without_waiting(name: str) -> None:
    codec, count = (SAME_BYTES | SPARSE)[name], 100_000
    values, other = gradient(count, 1).to(GPU), gradient(count, 2).to(GPU)

    def steps(late: Tensor) -> list[Tensor]:
        payload = torch.zeros(codec.payload_bytes(count), dtype=torch.uint8, device=GPU)
        state, out = codec.new_state(count, GPU), torch.zeros(count, device=GPU)
        codec.compress(late, state, payload, seed=3)
        codec.expand(payload, out, accumulate=True)
        return [payload, out, *state.values()]

    # The first run compiles, which waits.
    expected = steps(values)
    torch.cuda.synchronize()
    late, stream = other.clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # The kernels must wait in the stream for the values, and the host must not. A GPU sleeps
        # about a second.
        torch.cuda._sleep(2_000_000_000)
        late.copy_(values)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual = steps(late)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        has_ended = stream.query()
    assert not has_ended
    stream.synchronize()
    assert all(map(torch.equal, actual, expected))
