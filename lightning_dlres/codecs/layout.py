"""Elements of a tensor as bytes, in the order in which they lie in memory.

A permuted tensor without gaps is therefore encoded without a copy, and decoded with its strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dlres.core.errors import ConfigError


def require_dense(tensor: Tensor) -> None:
    """Raise an error unless a tensor has an element for each of its positions.

    Raises:
        ConfigError: If the tensor is sparse or quantized.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ConfigError(
            f"tensor must be strided and not quantized, got layout {tensor.layout}"
            f"{', quantized' if tensor.is_quantized else ''}. Use its to_dense() or dequantize()."
        )


def dense_bytes(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the elements as uint8[count * width] in memory order, and the strides of their layout.

    The bytes are a view if the tensor fills its memory, else a contiguous copy.

    Raises:
        ConfigError: If the tensor is sparse or quantized.
    """
    require_dense(tensor)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not fills_its_memory(tensor):
        tensor = tensor.contiguous()
    count = tensor.numel()
    if not count:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device), tensor.stride()
    return tensor.as_strided((count,), (1,)).view(torch.uint8), tensor.stride()


def fills_its_memory(tensor: Tensor) -> bool:
    """Return True if a tensor's elements lie in memory without gaps or overlaps."""
    return tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride())


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if a tensor of this shape and these strides has no gaps and no overlaps."""
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
