"""A tensor's elements in the order in which they lie in memory, where they fill it without gaps: a
permuted tensor is then encoded without a copy, and comes back permuted alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dlres.core.errors import ConfigError


def dense_bytes(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the elements as uint8[count * width], a view where that is possible, and the strides
    of a tensor that has them in this order.

    Raises:
        ConfigError: the tensor is sparse or quantized.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ConfigError(
            f"a tensor to encode: got layout {tensor.layout}"
            f"{', quantized' if tensor.is_quantized else ''}, expected a dense one of numbers. "
            "Try its to_dense() or dequantize()."
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not fills_its_memory(tensor):
        tensor = tensor.contiguous()
    count = tensor.numel()
    if not count:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device), tensor.stride()
    return tensor.as_strided((count,), (1,)).view(torch.uint8), tensor.stride()


def fills_its_memory(tensor: Tensor) -> bool:
    """Return whether every place between the first and the last element belongs to exactly one."""
    return tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride())


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor of this shape and these strides fills its memory: every place between
    the first and the last element belongs to exactly one."""
    if len(shape) != len(stride):
        return False
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
