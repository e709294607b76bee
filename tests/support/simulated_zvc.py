"""Program that runs the CUDA kernels of zero-value compression in Numba's simulator.

It compares their bytes with the CPU's. An environment variable selects the simulator before the
first import of Numba, so that this needs a process of its own.
"""

from __future__ import annotations

import sys

import numpy as np

from lightning_dlres.kernels import zvc, zvc_cpu, zvc_cuda

SWITCH_SECONDS = 1e-4
WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def check(width: int, count: int, density: float) -> None:
    random = np.random.default_rng(count)
    elements = random.integers(1, 255, count).astype(WORD[width])
    elements[random.random(count) >= density] = 0
    expected = np.zeros(zvc.bound(count, width), np.uint8)
    mask, values = np.split(expected, [zvc.mask_bytes(count)])
    nonzero = zvc_cpu.encode(elements.view(np.uint8), width, mask, values)
    encode, decode = zvc_cuda.kernels(width)
    grid = zvc_cuda.tiles(count), zvc_cuda.THREADS

    gpu_mask = np.full(mask.size // 4, 0xA5A5A5A5, np.uint32)
    gpu_values = np.zeros(count, WORD[width])
    used = np.array([mask.size])
    state = np.zeros(1 + grid[0], np.int64)
    encode[grid](elements, gpu_mask, gpu_values, used, state)
    assert used[0] == mask.size + nonzero * width, (width, count, used, nonzero)
    assert gpu_mask.tobytes() == mask.tobytes(), (width, count)
    assert gpu_values[:nonzero].tobytes() == values[: nonzero * width].tobytes(), (width, count)

    fitting, state = np.full(nonzero // 2 + 1, 88, WORD[width]), np.zeros(1 + grid[0], np.int64)
    used = np.array([mask.size])
    encode[grid](elements, gpu_mask, fitting[:-1], used, state)
    assert used[0] == mask.size + nonzero * width, (width, count, used, nonzero)
    assert fitting[:-1].tobytes() == gpu_values[: nonzero // 2].tobytes(), (width, count)
    assert fitting[-1] == 88

    out = np.full(count, 77, WORD[width])
    state = np.zeros(1 + grid[0], np.int64)
    decode[grid](gpu_mask, gpu_values[:nonzero], out, state)
    assert out.tobytes() == elements.tobytes(), (width, count)


def make_tiles_small() -> None:
    """Make tiles small, so that fitting elements need many of them.

    The simulator runs each GPU thread as a system thread, so that large tiles would be slow.
    """
    zvc_cuda.WARPS, zvc_cuda.WORDS = 2, 2
    zvc_cuda.THREADS = zvc_cuda.WARPS * zvc_cuda.LANES
    zvc_cuda.TILE = zvc_cuda.WARPS * zvc_cuda.WORDS * zvc_cuda.LANES


def main() -> None:
    assert zvc_cuda.SIMULATED
    # Simulated threads spin while they wait. A short interval lets the awaited thread run soon.
    sys.setswitchinterval(SWITCH_SECONDS)
    check(2, zvc_cuda.TILE + 100, 0.4)
    make_tiles_small()
    for argument in sys.argv[1:]:
        width, count, density = argument.split(",")
        check(int(width), int(count), float(density))
    print("alike")
