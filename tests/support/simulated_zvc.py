"""Program that runs the CUDA kernels of zero-value compression in Numba's simulator.

It compares their output with the output of the CPU kernels. NUMBA_ENABLE_CUDASIM must be set before
the first import of Numba, so the simulator needs a separate process.

Each argument is one case: "bytes of an element,number of elements,share of nonzero elements".
"""

from __future__ import annotations

import sys

import numpy as np

from lightning_dlres.kernels import cuda_launch, zvc, zvc_cpu, zvc_cuda

# Switch interval of the interpreter, in seconds; the default is 5e-3.
SWITCH_SECONDS = 1e-4
# dtype of an element, by its width in bytes.
DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def check(width: int, count: int, density: float) -> None:
    """Check that the GPU kernels encode and decode an array as the CPU kernels do.

    Args:
        width: Bytes of an element.
        count: Number of elements.
        density: Probability that an element is not zero.
    """
    random = np.random.default_rng(count)
    elements = random.integers(1, 255, count).astype(DTYPES[width])
    elements[random.random(count) >= density] = 0
    expected = np.zeros(zvc.bound(count, width), np.uint8)
    mask, values = np.split(expected, [zvc.mask_bytes(count)])
    num_nonzero = zvc_cpu.encode(elements.view(np.uint8), width, mask, values)
    encode, decode = zvc_cuda.kernels(width)
    grid = zvc_cuda.tiles(count), zvc_cuda.THREADS

    # Encode into buffers with other contents: the kernel must write every word of the mask.
    gpu_mask = np.full(mask.size // 4, 0xA5A5A5A5, np.uint32)
    gpu_values = np.zeros(count, DTYPES[width])
    used = np.array([mask.size])
    state = np.zeros(1 + grid[0], np.int64)
    encode[grid](elements, gpu_mask, gpu_values, used, state)
    assert used[0] == mask.size + num_nonzero * width, (width, count, used, num_nonzero)
    assert gpu_mask.tobytes() == mask.tobytes(), (width, count)
    assert gpu_values[:num_nonzero].tobytes() == values[: num_nonzero * width].tobytes(), (
        width,
        count,
    )

    # Encode into too few values: the kernel counts all, and writes only those that fit. The last
    # element is a guard behind the buffer.
    short_values = np.full(num_nonzero // 2 + 1, 88, DTYPES[width])
    state = np.zeros(1 + grid[0], np.int64)
    used = np.array([mask.size])
    encode[grid](elements, gpu_mask, short_values[:-1], used, state)
    assert used[0] == mask.size + num_nonzero * width, (width, count, used, num_nonzero)
    assert short_values[:-1].tobytes() == gpu_values[: num_nonzero // 2].tobytes(), (width, count)
    assert short_values[-1] == 88

    decoded = np.full(count, 77, DTYPES[width])
    state = np.zeros(1 + grid[0], np.int64)
    decode[grid](gpu_mask, gpu_values[:num_nonzero], decoded, state)
    assert decoded.tobytes() == elements.tobytes(), (width, count)


def make_tiles_small() -> None:
    """Make tiles small, so that a few hundred elements need many tiles.

    The simulator runs each GPU thread as a system thread, so large tiles would be slow.
    """
    zvc_cuda.WARPS, zvc_cuda.WORDS = 2, 2
    zvc_cuda.THREADS = zvc_cuda.WARPS * zvc_cuda.LANES
    zvc_cuda.TILE = zvc_cuda.WARPS * zvc_cuda.WORDS * zvc_cuda.LANES


def main() -> None:
    assert cuda_launch.SIMULATED
    # Simulated threads spin while they wait. A short interval soon lets the awaited thread run.
    sys.setswitchinterval(SWITCH_SECONDS)
    # One tile: several are the matter of small ones.
    check(2, zvc_cuda.TILE - 100, 0.4)
    make_tiles_small()
    for argument in sys.argv[1:]:
        width, count, density = argument.split(",")
        check(int(width), int(count), float(density))
    print("kernels agree")
