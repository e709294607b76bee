"""How fast bytes leave the device and come back: measured, on memory of the kind that is used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path

import torch

from lightning_dlres.core.host.slab import aligned
from lightning_dlres.memory.execute.copies import Copies
from lightning_dlres.memory.execute.gpu import Gpu
from lightning_dlres.memory.execute.tiers import SlabTier
from lightning_dlres.memory.profile.step_profile import TierLink

# A copy of this size at most, and at least: new memory of more than some 32 MiB is asked of the
# system every time, which takes longer than the copy.
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 256 << 20
_SMALL_BYTES = 64 << 10
_UNCACHED_BYTES = 96 << 20
# What measuring takes of a GPU's memory, and of the host's beside it; more than its cache holds.
_MOST_ON_GPU = 64 << 20
_TRIALS = 7


def measure_link(
    name: str,
    copies: Copies,
    device: torch.device,
    directory: Path | None,
    pinned: bool,
    nbytes: int,
    gpu: Gpu | None = None,
) -> TierLink:
    """Return the link to a tier.

    Args:
        name: of the tier.
        copies: how bytes get there and back.
        device: where they come from.
        directory, pinned: see `SlabTier`.
        nbytes: size of a usual copy.
        gpu: the device, if it is a GPU.

    Raises:
        ConfigError: the directory cannot be written to, or is full.
    """
    # A GPU has little memory to spare, and its copies do not go through the processor's cache.
    most, uncached = (_MOST_BYTES, _UNCACHED_BYTES) if gpu is None else (_MOST_ON_GPU // 4, 0)
    size = min(max(nbytes, _LEAST_BYTES), most)
    # Enough of them that none is in the processor's cache when its turn comes again.
    count = max(2, -(-uncached // size))
    tier = SlabTier(count * aligned(size), directory, pinned)
    parcels = [parcel for _ in range(count) if (parcel := tier.take(size)) is not None]
    sources = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in parcels]
    pieces = cycle(zip(sources, parcels, strict=True))

    def out(nbytes: int) -> Callable[[], None]:
        def copy() -> None:
            source, parcel = next(pieces)
            copies.out(source[:nbytes], parcel.data[:nbytes]).wait()

        return copy

    def back(nbytes: int) -> Callable[[], None]:
        return lambda: copies.back(next(pieces)[1].data[:nbytes], device)[1].wait()

    for source, parcel in zip(sources, parcels, strict=True):
        copies.out(source, parcel.data).wait()
    times = {
        (way, nbytes): _seconds(way(nbytes), gpu)
        for way in (out, back)
        for nbytes in (_SMALL_BYTES, size)
    }
    copies.finish()
    latency = min(times[out, _SMALL_BYTES], times[back, _SMALL_BYTES])
    return TierLink(
        tier=name,
        out_rate=size / max(times[out, size] - latency, 1e-9),
        in_rate=size / max(times[back, size] - latency, 1e-9),
        overlaps=copies.overlaps,
        latency=latency,
    )


def measure_copies(device: torch.device, gpu: Gpu | None = None) -> float:
    """Return how many bytes a second the device copies from its memory to its memory."""
    count = (_UNCACHED_BYTES if gpu is None else _MOST_ON_GPU) // _LEAST_BYTES
    pieces = [torch.zeros(_LEAST_BYTES, dtype=torch.uint8, device=device) for _ in range(count)]
    pairs = cycle(pairwise(pieces))

    def copy() -> None:
        source, target = next(pairs)
        target.copy_(source)

    return _LEAST_BYTES / max(_seconds(copy, gpu), 1e-9)


def _seconds(copy: Callable[[], None], gpu: Gpu | None) -> float:
    """Return how long a copy takes: the median, without the first."""
    found = []
    for _ in range(_TRIALS + 1):
        began = time.perf_counter()
        copy()
        if gpu is not None:
            gpu.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])
