"""Time of torch's own all-reduce, the peer of our synchronisation."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from lightning_dlres.core.comm.collectives import wait_for_collective
from lightning_dlres.gradsync.plan.costs import LinearCost
from lightning_dlres.gradsync.profile.fit import line
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages

# Bytes of the small all-reduce, and of the first large one.
_SMALL_BYTES, _FIRST_BYTES = 4 << 10, 256 << 10
# Seconds of an all-reduce from which its time says enough about its speed.
_ENOUGH_SECONDS = 0.05
# Times of each size, if there is time.
_TIMES = 5


def measure_all_reduce(
    messages: ProbeMessages, device: torch.device, *, most_bytes: int, seconds: float
) -> LinearCost:
    """Return the cost of an all-reduce of the default process group; called by all ranks.

    Args:
        messages: Messages to the other ranks.
        device: Device of the gradients.
        most_bytes: Bytes of all gradients; there is no larger all-reduce.
        seconds: Time for each size. At least one all-reduce of each size is done.

    Raises:
        PeerError: If a rank is late or lost.
    """
    small = _seconds(messages, device, _SMALL_BYTES, seconds)
    nbytes = _FIRST_BYTES
    large = _seconds(messages, device, nbytes, seconds)
    while large < _ENOUGH_SECONDS and 4 * nbytes <= most_bytes:
        nbytes *= 4
        large = _seconds(messages, device, nbytes, seconds)
    return line((_SMALL_BYTES, small), (nbytes, large))


def _seconds(messages: ProbeMessages, device: torch.device, nbytes: int, budget: float) -> float:
    """Return the median seconds of the slowest rank."""
    buffer = torch.zeros(nbytes // 4, device=device)
    first = _once(messages, buffer)
    times = min(_TIMES, int(budget / max(first, 1e-9)))
    if not times:
        return first
    return statistics.median(_once(messages, buffer) for _ in range(times))


def _once(messages: ProbeMessages, buffer: torch.Tensor) -> float:
    # An error of the collective would not name a rank that is late; that of `gather` does.
    messages.gather([])
    start = time.perf_counter()
    work = dist.all_reduce(buffer, async_op=True)
    wait_for_collective(work, "an all-reduce of the ranks", messages.timeout, messages.check)
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)
    return messages.slowest([time.perf_counter() - start])[0]
