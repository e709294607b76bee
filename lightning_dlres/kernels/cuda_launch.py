"""Launch of Numba's GPU kernels on torch's current stream."""

from __future__ import annotations

import os
from typing import Any

import torch
from numba import cuda
from torch import Tensor

# True in Numba's simulator, which runs GPU threads as threads of this process.
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


def launch(kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
    """Start a kernel on the current stream of its tensors' device; do not wait for it.

    Args:
        kernel: Compiled kernel.
        blocks: Number of blocks, at least 1.
        threads: Number of threads of a block.
        arguments: Tensors, and NumPy scalars of the types that the kernel expects. The first one
            is a tensor. All tensors are on its device.
    """
    device = arguments[0].device
    # Numba has a current device of its own for each thread, so both must be set.
    with torch.cuda.device(device), cuda.gpus[device.index]:
        stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
        kernel[blocks, threads, stream](
            *(
                cuda.as_cuda_array(argument, sync=False)
                if isinstance(argument, Tensor)
                else argument
                for argument in arguments
            )
        )
