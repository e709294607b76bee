"""Values of rank 0 on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

import msgspec
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dlres.core.comm.collectives import gather_bytes
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.decoding import from_msgpack


def share_model(module: nn.Module, timeout: float, check: Callable[[], None]) -> None:
    """Give all ranks the parameters and buffers of rank 0; called by all ranks.

    Args:
        module: Model of this rank.
        timeout: Deadline of each exchange with all ranks, in seconds.
        check: Called while waiting; raises if a rank is known to have failed.

    Raises:
        ConfigError: If the parameters or buffers of a rank have other names, shapes or dtypes. A
            broadcast would wait, or mix them up.
        PeerError: If a rank is late or lost.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    own = [f"{name} of {tuple(one.shape)} in {one.dtype}" for name, one in tensors]
    gathered = gather_bytes(msgspec.msgpack.encode(own), timeout, check)
    first, *others = (from_msgpack(data, list[str]) for data in gathered)
    for rank, other in enumerate(others, 1):
        for expected, got in zip_longest(first, other, fillvalue="nothing"):
            if got != expected:
                raise ConfigError(
                    "the model must have the same parameters and buffers on all ranks, got "
                    f"{expected} on rank 0 and {got} on rank {rank}. Build it from the same "
                    "options on all ranks."
                )
    for _, tensor in tensors:
        broadcast_from_rank_0(tensor.detach())


def broadcast_from_rank_0(tensor: Tensor) -> None:
    """Replace a tensor by that of rank 0."""
    # A copy: the tensor's memory may have any strides, and the process group keeps what it sends.
    data = tensor.contiguous().clone()
    dist.broadcast(data, 0)
    tensor.copy_(data)
