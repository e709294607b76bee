"""Time of torch's own all-reduce, the alternative to our synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_dlres.core.comm.collectives import wait_for_collective
from lightning_dlres.gradsync.plan.costs import LinearCost
from lightning_dlres.gradsync.profile.linear_fit import linear_cost
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages

# Bytes of the small all-reduce, and of the first large one.
_SMALL_BYTES, _FIRST_BYTES = 4 << 10, 256 << 10
# An all-reduce of this many seconds is large enough to measure the bandwidth.
_ENOUGH_SECONDS = 0.05
# Least and most measurements of each size.
_LEAST_REPEATS, _MOST_REPEATS = 2, 6


def measure_all_reduce(
    messages: ProbeMessages, device: torch.device, *, most_bytes: int, seconds: float
) -> LinearCost:
    """Return the cost of an all-reduce of the default process group; called by all ranks.

    Args:
        messages: Messages to the other ranks.
        device: Device of the gradients.
        most_bytes: Bytes of all gradients; there is no larger all-reduce.
        seconds: Time for each size. At least two all-reduces of each size are done.

    Raises:
        PeerError: If a rank is late or lost.
    """
    small = _seconds(messages, device, _SMALL_BYTES, seconds)
    nbytes = _FIRST_BYTES
    large = _seconds(messages, device, nbytes, seconds)
    while large < _ENOUGH_SECONDS and 4 * nbytes <= most_bytes:
        nbytes *= 4
        large = _seconds(messages, device, nbytes, seconds)
    return linear_cost((_SMALL_BYTES, small), (nbytes, large))


def _seconds(messages: ProbeMessages, device: torch.device, nbytes: int, budget: float) -> float:
    """Return the shortest time of an all-reduce, each timed by its slowest rank.

    A mean would include pauses by other processes, and make our synchronisation look faster.
    """
    buffer = torch.zeros(nbytes // 4, device=device)
    seconds: list[float] = []
    while len(seconds) < _LEAST_REPEATS or (len(seconds) < _MOST_REPEATS and sum(seconds) < budget):
        seconds.append(_once(messages, buffer))
    return min(seconds)


def _once(messages: ProbeMessages, buffer: torch.Tensor) -> float:
    return messages.time(lambda: all_reduce(messages, [buffer]), buffer.device)


def all_reduce(messages: ProbeMessages, buffers: Sequence[torch.Tensor]) -> None:
    """Add buffers over all ranks, and wait.

    Raises:
        PeerError: If a rank is late or lost.
    """
    for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
        wait_for_collective(work, "an all-reduce of the ranks", messages.timeout, messages.check)
