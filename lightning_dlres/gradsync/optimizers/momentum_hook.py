"""Communication hook of torch's DistributedDataParallel for `OneBitAdam`.

DDP compares the hook's annotations with classes. This module therefore must not turn annotations
into strings with `from __future__ import annotations`.
"""

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from lightning_dlres.gradsync.optimizers.momentum_sync import MomentumSync


def momentum_hook(state: MomentumSync, bucket: GradBucket) -> Future[Tensor]:
    """Communication hook for `DistributedDataParallel.register_comm_hook`.

    In the warm-up, gradients become their means over all ranks, as without a hook. Afterwards, each
    rank keeps its own gradients, and the optimizer synchronises its momentum.

    Args:
        state: `OneBitAdam.sync` of the module's optimizer.
        bucket: Bucket of gradients.

    Returns:
        Future of the bucket's buffer.

    Raises:
        ConfigError: If the gradients are sparse.
    """
    return state.reduce(bucket)
