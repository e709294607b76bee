"""Launch of Numba's GPU kernels on torch's current stream."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import torch
from numba import cuda
from torch import Tensor

# True in Numba's simulator, which runs GPU threads as threads of this process.
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

# Numba's arrays and streams of recent launches. Numba takes 10 microseconds to make an array, and
# several times that to find the type of a new one. Gradients, residuals and payloads lie in the
# same memory in every step.
_MOST_ARRAYS = 4096
_arrays: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
_streams: dict[int, Any] = {}


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
        stream = _stream(torch.cuda.current_stream(device).cuda_stream)
        kernel[blocks, threads, stream](
            *(
                _array(argument) if isinstance(argument, Tensor) else argument
                for argument in arguments
            )
        )


def _stream(address: int) -> Any:
    """Return Numba's stream at an address."""
    stream = _streams.get(address)
    if stream is None:
        stream = _streams[address] = cuda.external_stream(address)
    return stream


def _array(tensor: Tensor) -> Any:
    """Return Numba's array over a tensor's memory. It does not keep the memory alive."""
    key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device.index)
    array = _arrays.get(key)
    if array is None:
        interface = tensor.__cuda_array_interface__
        array = _arrays[key] = cuda.from_cuda_array_interface(interface, owner=None, sync=False)
        # Another thread may have removed the oldest one.
        while len(_arrays) > _MOST_ARRAYS:
            _arrays.popitem(last=False)
    return array
