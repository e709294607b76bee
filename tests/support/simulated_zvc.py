"""Runs the CUDA kernels of zero-value compression in Numba's simulator, in a process of its own, as
that is chosen by a variable before the first import; compares with the bytes of the CPU."""

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
    kept = zvc_cpu.encode(elements.view(np.uint8), width, mask, values)
    encode, decode = zvc_cuda.kernels(width)
    grid = zvc_cuda.tiles(count), zvc_cuda.THREADS

    found_mask = np.full(mask.size // 4, 0xA5A5A5A5, np.uint32)
    found = np.zeros(count, WORD[width])
    used = np.array([mask.size])
    state = np.zeros(1 + grid[0], np.int64)
    encode[grid](elements, found_mask, found, used, state)
    assert used[0] == mask.size + kept * width, (width, count, used, kept)
    assert found_mask.tobytes() == mask.tobytes(), (width, count)
    assert found[:kept].tobytes() == values[: kept * width].tobytes(), (width, count)

    few, state = np.full(kept // 2 + 1, 88, WORD[width]), np.zeros(1 + grid[0], np.int64)
    used = np.array([mask.size])
    encode[grid](elements, found_mask, few[:-1], used, state)
    assert used[0] == mask.size + kept * width, (width, count, used, kept)
    assert few[:-1].tobytes() == found[: kept // 2].tobytes(), (width, count)
    assert few[-1] == 88

    out = np.full(count, 77, WORD[width])
    state = np.zeros(1 + grid[0], np.int64)
    decode[grid](found_mask, found[:kept], out, state)
    assert out.tobytes() == elements.tobytes(), (width, count)


def make_tiles_small() -> None:
    """Let few elements need many tiles: the simulator has a system thread for each of its own."""
    zvc_cuda.WARPS, zvc_cuda.WORDS = 2, 2
    zvc_cuda.THREADS = zvc_cuda.WARPS * zvc_cuda.LANES
    zvc_cuda.TILE = zvc_cuda.WARPS * zvc_cuda.WORDS * zvc_cuda.LANES


def main() -> None:
    assert zvc_cuda.SIMULATED
    # Simulated threads spin while they wait for each other: let another one run soon.
    sys.setswitchinterval(SWITCH_SECONDS)
    check(2, zvc_cuda.TILE + 100, 0.4)
    make_tiles_small()
    for argument in sys.argv[1:]:
        width, count, density = argument.split(",")
        check(int(width), int(count), float(density))
    print("alike")
