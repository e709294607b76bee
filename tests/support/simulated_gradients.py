"""Program that runs the CUDA kernels of gradient codecs in Numba's simulator.

It runs a codec for two steps with both kinds of kernels, and compares payloads, states and decoded
values bit by bit. NUMBA_ENABLE_CUDASIM must be set before the first import of Numba, so the
simulator needs a separate process.

Each argument is one case: "codec,number of elements,power of two of the scale,options". The options
are any of "nan" and "inf" (put such a value into the last block in the second step), "tiny" (values
near the smallest float32), "zero" (zeros in the first step), "large" (values near the largest
float32) and "largest" (the first value is the largest float32), joined by "+".
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.codecs.gradient import (
    DGC,
    QSGD,
    BlockwiseInt8,
    GradientCodec,
    OneBit,
    TernGrad,
    ThresholdQuantisation,
)
from lightning_dlres.kernels import cuda_launch
from lightning_dlres.kernels.gradients import levels_cuda, sign_cuda, sums_cuda, threshold_cuda

# Switch interval of the interpreter, in seconds; the default is 5e-3. The simulator's main thread
# spins until all others wait at a barrier. A short interval soon lets them run.
SWITCH_SECONDS = 1e-3
CODECS: dict[str, GradientCodec] = {
    "onebit": OneBit(),
    "tbq": ThresholdQuantisation(),
    "tbq0.5": ThresholdQuantisation(threshold=0.5),
    "int8": BlockwiseInt8(),
    "qsgd2": QSGD(bits=2),
    "qsgd4": QSGD(bits=4),
    "qsgd8": QSGD(bits=8),
    "terngrad": TernGrad(),
    "dgc": DGC(ratio=0.1, clip=1.0),
}


class SimulatedTensor(Tensor):
    """Tensor on the CPU that says that it is on a GPU."""

    is_cuda = True


def simulated(tensor: Tensor) -> Tensor:
    """Return a copy that is encoded and decoded by GPU kernels."""
    return tensor.clone().as_subclass(SimulatedTensor)


def launch(kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
    """Run a kernel in the simulator; see `cuda_launch.launch`."""
    arrays = [
        argument.as_subclass(Tensor).numpy() if isinstance(argument, Tensor) else argument
        for argument in arguments
    ]
    kernel[blocks, threads](*arrays)


def gradient(count: int, step: int, options: set[str]) -> Tensor:
    """Return a gradient with magnitudes of many orders."""
    random = np.random.default_rng([count, step])
    values = random.standard_normal(count) * np.exp2(random.integers(-12, 3, count))
    if "tiny" in options:
        values *= 1e-38
    if "large" in options:
        values *= 1e37
    if "zero" in options and step == 0:
        values *= 0
    if "largest" in options:
        values[0] = np.finfo(np.float32).max
    for name in ("nan", "inf"):
        if name in options and step == 1 and count:
            values[-1] = float(name)
    return torch.from_numpy(values.astype(np.float32))


def assert_same_bits(on_gpu: Tensor, on_cpu: Tensor, case: str) -> None:
    """Assert that all bits are equal, except those of NaN."""
    actual, expected = on_gpu.as_subclass(Tensor), on_cpu
    if expected.dtype.is_floating_point:
        assert torch.equal(actual.isnan(), expected.isnan()), case
        actual, expected = (
            actual.nan_to_num(7, math.inf, -math.inf),
            expected.nan_to_num(7, math.inf, -math.inf),
        )
    assert actual.numpy().tobytes() == expected.numpy().tobytes(), case


def check(case: str) -> None:
    """Compare the kernels in one case; for its form see the top of this file."""
    name, elements, exponent, names = case.split(",")
    codec, count, scale, options = (
        CODECS[name],
        int(elements),
        2.0 ** int(exponent),
        set(names.split("+")),
    )
    device = torch.device("cpu")
    state = codec.new_state(count, device)
    gpu_state = {key: simulated(tensor) for key, tensor in state.items()}
    total = torch.from_numpy(np.random.default_rng(count).standard_normal(count)).float()
    gpu_total = simulated(total)
    for step in range(2):
        values = gradient(count, step, options)
        # Not zeros: a kernel must not rely on them.
        payload = torch.full((codec.payload_bytes(count),), 0xA5, dtype=torch.uint8)
        gpu_payload = simulated(payload)
        codec.compress(values, state, payload, scale=scale, seed=2**31 + step)
        codec.compress(simulated(values), gpu_state, gpu_payload, scale=scale, seed=2**31 + step)
        assert gpu_payload.as_subclass(Tensor).tolist() == payload.tolist(), (case, step)
        for key, tensor in state.items():
            assert_same_bits(gpu_state[key], tensor, f"{case}: {key} in step {step}")
        # The first step adds to the total, and the second one replaces it.
        accumulate = step == 0
        codec.expand(payload, total, scale=1 / 3, accumulate=accumulate)
        codec.expand(gpu_payload, gpu_total, scale=1 / 3, accumulate=accumulate)
        assert_same_bits(gpu_total, total, f"{case}: decoded in step {step}")


def main() -> None:
    assert cuda_launch.SIMULATED
    # Products of 32-bit numbers overflow on purpose, and NaN is part of the test.
    warnings.simplefilter("ignore", RuntimeWarning)
    sys.setswitchinterval(SWITCH_SECONDS)
    for module in (levels_cuda, sign_cuda, sums_cuda, threshold_cuda):
        module.launch = launch  # type: ignore[attr-defined]
    for case in sys.argv[1:]:
        check(case)
    print("kernels agree")
