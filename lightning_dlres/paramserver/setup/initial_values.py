"""Values of rank 0 on all ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def broadcast_from_rank_0(tensor: Tensor) -> None:
    """Replace a tensor by that of rank 0."""
    # A copy: the tensor's memory may have any strides, and the process group keeps what it sends.
    data = tensor.contiguous().clone()
    dist.broadcast(data, 0)
    tensor.copy_(data)
