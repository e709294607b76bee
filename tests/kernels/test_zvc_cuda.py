"""Tests of the CUDA kernels of zero-value compression: simulated, compiled, and on a GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dlres import codecs
from lightning_dlres.codecs import ZeroValue
from lightning_dlres.core.host.lightweight_process import lightweight_command
from lightning_dlres.kernels import zvc

FEW_CASES = ["1,400,0.4", "2,129,1", "4,64,0"]
MORE_CASES = ["1,1,1", "4,300,0.4", "2,31,0.5"]


@pytest.mark.parametrize(
    "cases", [FEW_CASES, pytest.param(MORE_CASES, marks=pytest.mark.exhaustive)], ids=str
)
def test_simulated_kernels_write_the_bytes_of_the_cpu(cases: list[str]) -> None:
    done = subprocess.run(
        lightweight_command("tests.support.simulated_zvc:main", *cases),
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.strip() == "kernels agree", done.stderr


# By default each width and each capability occurs.
CAPABILITIES = {1: (7, 5), 2: (9, 0), 4: (7, 5)}


@pytest.mark.parametrize(
    ("width", "capability"),
    [
        pytest.param(
            width,
            capability,
            marks=[] if capability == CAPABILITIES[width] else pytest.mark.exhaustive,
        )
        for width in zvc.WIDTHS
        for capability in [(7, 5), (9, 0)]
    ],
)
def test_kernels_compile(width: int, capability: tuple[int, int]) -> None:
    pytest.importorskip("numba_cuda")
    from numba import cuda, types

    from lightning_dlres.kernels import zvc_cuda

    kind = {1: types.uint8, 2: types.uint16, 4: types.uint32}[width]
    data, mask, numbers = (types.Array(t, 1, "C") for t in (kind, types.uint32, types.int64))
    encode, decode = zvc_cuda.kernel_functions(width)
    ptx, _ = cuda.compile_ptx(encode, (data, mask, data, numbers, numbers), cc=capability)
    assert "vote.sync.ballot" in ptx
    ptx, _ = cuda.compile_ptx(decode, (mask, data, data, numbers), cc=capability)
    assert "popc" in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 63, 2048, 1_000_003])
def test_a_gpu_writes_the_bytes_of_the_cpu(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    tensor = torch.relu(torch.randn(count, generator=generator) - 0.3).to(dtype)
    on_cpu = ZeroValue().encode(tensor)
    on_gpu = ZeroValue().encode(tensor.cuda(), density=0.0 if on_cpu.codec == "zvc" else None)
    assert on_gpu.codec == on_cpu.codec
    assert torch.equal(on_gpu.payload.cpu(), on_cpu.payload)
    assert torch.equal(codecs.decode(on_gpu).cpu(), tensor)


def test_a_kernel_starts_in_the_context_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba_cuda")
    from lightning_dlres.kernels import cuda_launch, zvc_cuda

    seen: list[str] = []

    @contextmanager
    def entered(name: str) -> Iterator[None]:
        seen.append(f"enter {name}")
        yield
        seen.append(f"leave {name}")

    class Gpus:
        def __getitem__(self, index: int) -> AbstractContextManager[None]:
            return entered(f"numba {index}")

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arrays: seen.append("kernel")

    numba = SimpleNamespace(
        gpus=Gpus(),
        external_stream=lambda pointer: f"stream {pointer}",
    )
    monkeypatch.setattr(cuda_launch, "cuda", numba)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **kwargs: torch.empty(0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered(f"torch {device.index}"))
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(cuda_launch, "_array", lambda tensor: tensor)
    zvc_cuda._launch(Kernel(), 5, tensor)
    assert seen == ["enter torch 1", "enter numba 1", "kernel", "leave numba 1", "leave torch 1"]


@pytest.mark.gpu
def test_a_gpu_omits_elements_that_do_not_fit() -> None:
    tensor = torch.relu(torch.randn(100_000))
    whole = ZeroValue().encode(tensor)
    room = whole.nbytes // 2 // 8 * 8
    memory = torch.full((room + 512,), 0xA5, dtype=torch.uint8, device="cuda")
    encoded = ZeroValue().encode_within(tensor.cuda(), memory[:room])
    assert encoded.nbytes == whole.nbytes
    assert torch.equal(memory[:room].cpu(), whole.payload[:room])
    assert bool((memory[room:] == 0xA5).all())


@pytest.mark.gpu
def test_kernels_run_on_every_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    # Numba creates its context for the first device, and must switch it for the second.
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        tensor = torch.relu(torch.randn(10_000, device=device))
        assert torch.equal(codecs.decode(ZeroValue().encode(tensor, density=0.0)), tensor)
