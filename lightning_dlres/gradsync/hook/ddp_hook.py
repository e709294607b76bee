"""Communication hook of torch's DistributedDataParallel.

DDP compares the hook's annotations with classes. This module therefore must not turn annotations
into strings with `from __future__ import annotations`.
"""

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState


def compressed_hook(state: GradientSyncState, bucket: GradBucket) -> Future[Tensor]:
    """Communication hook for `DistributedDataParallel.register_comm_hook`.

    Args:
        state: State of the hook.
        bucket: Bucket of gradients, which become their means over all ranks.

    Returns:
        Future of the bucket's buffer.

    Raises:
        PeerError: If a rank was lost or late, now or in an earlier call.
        ConfigError: If the state was closed, or the algorithm cannot handle the bucket.
    """
    return state.reduce(bucket)
