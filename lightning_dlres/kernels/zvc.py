"""Zero-value compression (Method D, D5): a bit for every element, and the elements that are not
zero, side by side.

The bytes are the same whichever device made them: a mask of `mask_bytes(count)` bytes, in which bit
i % 8 of byte i // 8 says whether element i has a bit that is set (so -0.0 is kept), and then these
elements in order. The mask is as long as whole 64-bit words, which keeps the elements aligned.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.core.arrays import array_of, require_memory
from lightning_dlres.core.errors import ConfigError, ProtocolError

WIDTHS = (1, 2, 4)
_SAMPLES, _SAMPLE_ELEMENTS = 32, 64


def runs_on_gpus() -> bool:
    """Return whether what compiles the kernels for GPUs is installed."""
    return find_spec("numba_cuda") is not None


def mask_bytes(count: int) -> int:
    """Return the bytes of the mask of so many elements."""
    return -(-count // 64) * 8


def bound(count: int, width: int) -> int:
    """Return the most bytes that so many elements can take, and that `encode` needs room for."""
    return mask_bytes(count) + count * width


def encode(source: Tensor, width: int, out: Tensor) -> Tensor | int:
    """Compress the elements of `source` into the first bytes of `out`.

    Args:
        source: uint8[count * width], contiguous.
        width: bytes of an element: 1, 2 or 4.
        out: uint8[at least `mask_bytes(count)`] on the same device, aligned to 8 bytes; what lies
            behind the bytes that count is undefined. `bound(count, width)` bytes are always enough.

    Returns:
        How many bytes count; more than `out` has where the elements do not fit. From a GPU int64[],
        which is there once the current stream has come so far: nothing is waited for.

    Raises:
        ConfigError: there is too little room for the mask.
    """
    count = source.numel() // width
    if out.numel() < mask_bytes(count):
        raise ConfigError(
            f"zvc.encode: out must have room for the mask of {mask_bytes(count)} bytes, got "
            f"{out.numel()}. `bound` says how much is enough."
        )
    if source.is_cuda:
        from lightning_dlres.kernels import zvc_cuda

        return zvc_cuda.encode(source, width, out)
    if out.numel() < bound(count, width):
        whole = torch.empty(bound(count, width), dtype=torch.uint8)
        used = encode(source, width, whole)
        out.copy_(whole[: out.numel()])
        return used
    from lightning_dlres.kernels import zvc_cpu

    head, values = out[: mask_bytes(count)], out[mask_bytes(count) : bound(count, width)]
    kept = zvc_cpu.encode(array_of(source), width, array_of(head), array_of(values))
    return mask_bytes(count) + kept * width


def encode_tightly(source: Tensor, width: int) -> Tensor | None:
    """Return the compressed elements in memory of just their size, on the CPU: they are counted
    first. None where they would take no less than `source`.

    Args:
        source: uint8[count * width], contiguous.
        width: bytes of an element: 1, 2 or 4.
    """
    from lightning_dlres.kernels import zvc_cpu

    elements, head = array_of(source), mask_bytes(source.numel() // width)
    used = head + zvc_cpu.count_nonzero(elements, width) * width
    if used >= source.numel():
        return None
    room = torch.empty(-(-used // 8) * 8 + zvc_cpu.OVERRUN, dtype=torch.uint8)
    zvc_cpu.encode_on_one_core(elements, width, array_of(room[:head]), array_of(room[head:]))
    return room[:used]


def decode(data: Tensor, width: int, out: Tensor) -> None:
    """Write the elements that `encode` has compressed.

    Args:
        data: uint8[at least the bytes that count], aligned to 8 bytes. On a GPU more may follow.
        width: bytes of an element.
        out: uint8[count * width], contiguous, on the same device.

    Raises:
        ProtocolError: on the CPU, where the mask and the number of elements disagree.
    """
    count = out.numel() // width
    head, values = data[: mask_bytes(count)], data[mask_bytes(count) :]
    if head.numel() < mask_bytes(count):
        raise ProtocolError(
            f"compressed data: got {data.numel()} bytes, expected a mask of {mask_bytes(count)} "
            f"bytes for {count} elements. Check that both sides mean the same tensor."
        )
    if data.is_cuda:
        from lightning_dlres.kernels import zvc_cuda

        zvc_cuda.decode(head, values, width, out)
        return
    from lightning_dlres.kernels import zvc_cpu

    if count % 64 and int(array_of(head[-8:]).view(np.uint64)[0]) >> count % 64:
        raise ProtocolError(
            f"compressed data: got a mask with bits behind element {count - 1}, expected none. "
            "Check that both sides mean the same tensor."
        )
    kept = zvc_cpu.kept(array_of(head))
    if kept * width != values.numel():
        raise ProtocolError(
            f"compressed data: got {values.numel()} bytes behind the mask, expected {kept} "
            f"elements of {width} bytes. Check that both sides mean the same tensor."
        )
    zvc_cpu.decode(array_of(head), array_of(values), width, array_of(out))


def density(source: Tensor, width: int) -> float:
    """Return about which part of the elements is not zero: of 32 runs of 64 elements at most. On a
    GPU the stream is waited for.

    Args:
        source: uint8[count * width], contiguous.
        width: bytes of an element: 1, 2, 4 or 8.
    """
    if not source.is_cuda:
        from lightning_dlres.kernels import zvc_cpu

        count = source.numel() // width
        if not count:
            return 0.0
        require_memory(source)
        return zvc_cpu.density(source.data_ptr(), count, width, _SAMPLES, _SAMPLE_ELEMENTS)
    elements = source.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])
    count = elements.numel()
    if count > _SAMPLES * _SAMPLE_ELEMENTS:
        step = count // _SAMPLES
        elements = elements[: step * _SAMPLES].view(_SAMPLES, step)[:, :_SAMPLE_ELEMENTS]
    return float(torch.count_nonzero(elements)) / max(elements.numel(), 1)
