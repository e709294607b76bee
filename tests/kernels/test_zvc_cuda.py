"""The CUDA kernels of zero-value compression: in the simulator, compiled, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lightning_dlres import codecs
from lightning_dlres.codecs import ZeroValue
from lightning_dlres.kernels import zvc

CASES = ["1,1,1", "1,1000,0.4", "2,129,1", "4,700,0.4", "4,64,0", "2,31,0.5"]


def test_simulated_bytes_equal_those_of_the_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.simulated_zvc", *CASES],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.strip() == "alike", done.stderr


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
@pytest.mark.parametrize("width", zvc.WIDTHS)
def test_kernels_compile(width: int, capability: tuple[int, int]) -> None:
    pytest.importorskip("numba_cuda")
    from numba import cuda, types

    from lightning_dlres.kernels import zvc_cuda

    kind = {1: types.uint8, 2: types.uint16, 4: types.uint32}[width]
    data, mask, numbers = (types.Array(t, 1, "C") for t in (kind, types.uint32, types.int64))
    encode, decode = zvc_cuda.bodies(width)
    ptx, _ = cuda.compile_ptx(encode, (data, mask, data, numbers, numbers), cc=capability)
    assert "vote.sync.ballot" in ptx
    ptx, _ = cuda.compile_ptx(decode, (mask, data, data, numbers), cc=capability)
    assert "popc" in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 63, 2048, 1_000_003])
def test_a_gpu_makes_the_bytes_of_the_cpu(dtype: torch.dtype, count: int) -> None:
    tensor = torch.relu(torch.randn(count) - 0.3).to(dtype)
    on_cpu = ZeroValue().encode(tensor)
    on_gpu = ZeroValue().encode(tensor.cuda(), density=0.0 if on_cpu.codec == "zvc" else None)
    assert on_gpu.codec == on_cpu.codec
    assert torch.equal(on_gpu.payload.cpu(), on_cpu.payload)
    assert torch.equal(codecs.decode(on_gpu).cpu(), tensor)
