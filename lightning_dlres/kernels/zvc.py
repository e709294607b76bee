"""Zero-value compression: a mask with a bit for each element, followed by the non-zero elements.

CPU and GPU write the same bytes. The mask has `mask_bytes(count)` bytes. Bit i % 8 of its byte
i // 8 is set if any bit of element i is set, so that -0.0 is stored. The non-zero elements follow
in order. The mask fills whole 64-bit words, which keeps the elements aligned.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.core.arrays import address_of, array_of
from lightning_dlres.core.errors import ConfigError, ProtocolError

# Sizes in bytes of the elements that can be compressed.
WIDTHS = (1, 2, 4)
# Number of runs of adjacent elements in a density sample, and of elements in each run.
_SAMPLE_RUNS, _SAMPLE_ELEMENTS = 32, 64


def runs_on_gpus() -> bool:
    """Return True if the compiler of GPU kernels (numba-cuda) is installed."""
    return find_spec("numba_cuda") is not None


def mask_bytes(count: int) -> int:
    """Return the size in bytes of the mask of `count` elements."""
    return -(-count // 64) * 8


def bound(count: int, width: int) -> int:
    """Return the largest size in bytes of `count` encoded elements."""
    return mask_bytes(count) + count * width


def encode(source: Tensor, width: int, out: Tensor) -> Tensor | int:
    """Compress the elements of `source` into the first bytes of `out`.

    Args:
        source: uint8[count * width], contiguous.
        width: Bytes of an element: 1, 2 or 4.
        out: uint8[at least `mask_bytes(count)`] on the same device, aligned to 8 bytes. Bytes after
            the result are undefined. `bound(count, width)` bytes are always enough.

    Returns:
        Size of the result in bytes; larger than `out` if the elements do not fit. On a GPU it is
        a scalar int64 tensor, valid once the stream has run the kernel. The call does not wait.

    Raises:
        ConfigError: If `out` is too small for the mask.
    """
    count = source.numel() // width
    if out.numel() < mask_bytes(count):
        raise ConfigError(
            f"out must have at least the {mask_bytes(count)} bytes of the mask, got {out.numel()}. "
            "Use `bound` bytes."
        )
    if source.is_cuda:
        from lightning_dlres.kernels import zvc_cuda

        return zvc_cuda.encode(source, width, out)
    if out.numel() < bound(count, width):
        # The threads of the CPU need room for all elements: each writes from its own offset on.
        whole = torch.empty(bound(count, width), dtype=torch.uint8)
        used = encode(source, width, whole)
        out.copy_(whole[: out.numel()])
        return used
    from lightning_dlres.kernels import zvc_cpu

    mask, values = out[: mask_bytes(count)], out[mask_bytes(count) : bound(count, width)]
    nonzero = zvc_cpu.encode(array_of(source), width, array_of(mask), array_of(values))
    return mask_bytes(count) + nonzero * width


def encode_tightly(source: Tensor, width: int) -> Tensor | None:
    """Return the compressed elements on the CPU, or None if compression would not shrink them.

    The non-zero elements are counted first, so that the result takes no more memory than it needs.

    Args:
        source: uint8[count * width], contiguous.
        width: Bytes of an element: 1, 2 or 4.
    """
    from lightning_dlres.kernels import zvc_cpu

    elements, mask_size = array_of(source), mask_bytes(source.numel() // width)
    used = mask_size + zvc_cpu.count_nonzero(elements, width) * width
    if used >= source.numel():
        return None
    memory = torch.empty(-(-used // 8) * 8 + zvc_cpu.OVERRUN, dtype=torch.uint8)
    mask, values = memory[:mask_size], memory[mask_size:]
    zvc_cpu.encode_on_one_core(elements, width, array_of(mask), array_of(values))
    return memory[:used]


def decode(data: Tensor, width: int, out: Tensor) -> None:
    """Write the elements that `encode` compressed.

    Args:
        data: uint8[size of the result], aligned to 8 bytes. On a GPU more bytes may follow.
        width: Bytes of an element.
        out: uint8[count * width], contiguous, on the same device.

    Raises:
        ProtocolError: If the mask and the number of elements disagree; only checked on the CPU.
    """
    count = out.numel() // width
    mask, values = data[: mask_bytes(count)], data[mask_bytes(count) :]
    if mask.numel() < mask_bytes(count):
        raise ProtocolError(
            f"compressed data must have at least a mask of {mask_bytes(count)} bytes for {count} "
            f"elements, got {data.numel()} bytes. Check that both sides use the same tensor."
        )
    if data.is_cuda:
        from lightning_dlres.kernels import zvc_cuda

        zvc_cuda.decode(mask, values, width, out)
        return
    from lightning_dlres.kernels import zvc_cpu

    if count % 64 and int(array_of(mask[-8:]).view(np.uint64)[0]) >> count % 64:
        raise ProtocolError(
            f"compressed data must have a mask of {count} elements, got one with "
            f"bits after element {count - 1}. Check that both sides use the same tensor."
        )
    nonzero = zvc_cpu.count_set_bits(array_of(mask))
    if nonzero * width != values.numel():
        raise ProtocolError(
            f"compressed data must have {nonzero} elements of {width} bytes after the mask, got "
            f"{values.numel()} bytes. Check that both sides use the same tensor."
        )
    zvc_cpu.decode(array_of(mask), array_of(values), width, array_of(out))


def density(source: Tensor, width: int) -> float:
    """Return the estimated share of non-zero elements, from at most 32 runs of 64 elements.

    On a GPU this synchronizes the stream.

    Args:
        source: uint8[count * width], contiguous.
        width: Bytes of an element: 1, 2, 4 or 8.
    """
    if not source.is_cuda:
        from lightning_dlres.kernels import zvc_cpu

        count = source.numel() // width
        if not count:
            return 0.0
        return zvc_cpu.density(address_of(source), count, width, _SAMPLE_RUNS, _SAMPLE_ELEMENTS)
    elements = source.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])
    count = elements.numel()
    if count > _SAMPLE_RUNS * _SAMPLE_ELEMENTS:
        step = count // _SAMPLE_RUNS
        elements = elements[: step * _SAMPLE_RUNS].view(_SAMPLE_RUNS, step)[:, :_SAMPLE_ELEMENTS]
    return float(torch.count_nonzero(elements)) / max(elements.numel(), 1)
