"""Measurement of the links between the device and the tiers, with memory of the kind in use."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path

import torch

from lightning_dlres.core.device.copiers import Copier
from lightning_dlres.core.device.gpu import Gpu
from lightning_dlres.core.host.slab import aligned
from lightning_dlres.memory.execute.transfer.tiers import SlabTier
from lightning_dlres.memory.profile.step_profile import TierLink

# Bounds of the size of a measured copy in bytes. Within them a copy has the typical size, since the
# rate depends on it: new memory of more than about 32 MiB comes from the operating system every
# time, which takes longer than the copy itself.
_MIN_BYTES, _MAX_BYTES = 1 << 20, 256 << 20
# Size in bytes of the copies that measure the latency.
_SMALL_BYTES = 64 << 10
# Bytes of all measured copies together: more than the processor's cache holds.
_UNCACHED_BYTES = 96 << 20
# Bytes of a GPU's memory that a measurement may take. They are more than the GPU's cache holds.
_MAX_GPU_BYTES = 64 << 20
# Number of copies whose median duration is the result.
_TRIALS = 7


def measure_link(
    name: str,
    copier: Copier,
    device: torch.device,
    *,
    directory: Path | None,
    pinned: bool,
    nbytes: int,
    gpu: Gpu | None = None,
) -> TierLink:
    """Return the measured link to a tier.

    Args:
        name: Name of the tier.
        copier: Copier to measure.
        device: Device of the saved storages.
        directory: Directory of the tier's file; None: the host's memory.
        pinned: Whether the tier is pinned; see `SlabTier`.
        nbytes: Size of a typical copy in bytes.
        gpu: GPU of the device; None: the device is the CPU.

    Raises:
        ConfigError: If the directory is full, or cannot be written to.
    """
    # A GPU has little memory to spare, and its copies bypass the processor's cache.
    max_bytes, uncached = (_MAX_BYTES, _UNCACHED_BYTES) if gpu is None else (_MAX_GPU_BYTES // 4, 0)
    if directory is not None:
        # The measurement must not fill a disk that has room for the run.
        free = shutil.disk_usage(directory).free // 2
        max_bytes, uncached = min(max_bytes, free // 2), min(uncached, free)
    size = max(min(nbytes, max_bytes), _MIN_BYTES)
    # Enough buffers that none is in the processor's cache when it is used again.
    count = max(2, -(-uncached // size))
    tier = SlabTier(count * aligned(size), directory, pinned)
    allocations = [
        allocation for _ in range(count) if (allocation := tier.allocate(size)) is not None
    ]
    sources = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in allocations]
    pieces = cycle(zip(sources, allocations, strict=True))

    def to_tier(nbytes: int) -> Callable[[], None]:
        def copy() -> None:
            source, allocation = next(pieces)
            copier.to_tier(source[:nbytes], allocation.data[:nbytes]).wait()

        return copy

    def to_device(nbytes: int) -> Callable[[], None]:
        return lambda: copier.to_device(next(pieces)[1].data[:nbytes], device)[1].wait()

    for source, allocation in zip(sources, allocations, strict=True):
        copier.to_tier(source, allocation.data).wait()
    times = {
        (direction, nbytes): _seconds(direction(nbytes), gpu)
        for direction in (to_tier, to_device)
        for nbytes in (_SMALL_BYTES, size)
    }
    copier.synchronize()
    latency = min(times[to_tier, _SMALL_BYTES], times[to_device, _SMALL_BYTES])
    return TierLink(
        tier=name,
        out_rate=size / max(times[to_tier, size] - latency, 1e-9),
        in_rate=size / max(times[to_device, size] - latency, 1e-9),
        overlaps=copier.overlaps,
        latency=latency,
    )


def measure_copy_rate(device: torch.device, gpu: Gpu | None = None) -> float:
    """Return the bytes per second that the device copies within its own memory."""
    count = (_UNCACHED_BYTES if gpu is None else _MAX_GPU_BYTES) // _MIN_BYTES
    pieces = [torch.zeros(_MIN_BYTES, dtype=torch.uint8, device=device) for _ in range(count)]
    pairs = cycle(pairwise(pieces))

    def copy() -> None:
        source, target = next(pairs)
        target.copy_(source)

    return _MIN_BYTES / max(_seconds(copy, gpu), 1e-9)


def _seconds(copy: Callable[[], None], gpu: Gpu | None) -> float:
    """Return the median duration of a copy in seconds, without the first one."""
    durations = []
    for _ in range(_TRIALS + 1):
        start = time.perf_counter()
        copy()
        if gpu is not None:
            gpu.synchronize()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations[1:])
