"""Loaders that benchmarks.prefetch measures on the trainer's host: this package's loader, a plain
DataLoader, and torchdata's ParallelMapper, all over the same storage nodes.

Prints one line of JSON. For a loader, it has the samples, bytes and seconds of the measured part.
The measurement "index" has no loader. It measures the time and memory of an index of ten million
samples.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.nodes import Batcher, Loader, ParallelMapper, SamplerWrapper

from benchmarks.support.unbatched_client import UnbatchedClient
from lightning_dlres.prefetch.cache.engine import PrefetchEngine
from lightning_dlres.prefetch.cache.index import CacheIndex
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.cache.samples import Sample
from lightning_dlres.prefetch.cache.space.cache_space import CacheSpace
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.order.sequence import shuffled

# Number of samples of the large index, and of storage nodes that hold them.
_INDEX_SAMPLES = 10_000_000
_INDEX_NODES = 4
# Number of batches in which the cache fills. Stalls before their end do not count.
_WARMUP_BATCHES = 100


class RemoteFiles(Dataset[bytes]):
    """Dataset over remote files that sends one request for each sample."""

    def __init__(self, endpoints: str, samples: int) -> None:
        self.samples, self._client = samples, UnbatchedClient(endpoints)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> bytes:
        return self._client.fetch(number)


def size_of(sample: Sample) -> int:
    """Copy a sample's bytes, as a decoder would read them, and return its size in bytes."""
    return len(bytes(sample.data))


def count(batches: Iterator[Any], seconds: float, sizes: Any) -> dict[str, float]:
    """Return samples, bytes and seconds of the batches after the first one.

    All workers have started when the first batch arrives.

    Args:
        batches: Batches of one epoch.
        seconds: Time limit.
        sizes: Function that returns the size of each sample in a batch, in bytes.
    """
    next(batches)
    start = time.monotonic()
    samples = total = 0
    for batch in batches:
        batch_sizes = sizes(batch)
        samples, total = samples + len(batch_sizes), total + sum(batch_sizes)
        if time.monotonic() - start > seconds:
            break
    return {"samples": samples, "bytes": total, "seconds": time.monotonic() - start}


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Iterate this package's loader for `options.seconds`.

    With `options.pace`, it takes at most this many bytes per second, like a training with this
    demand.

    Returns:
        Figures of the whole run. Only "stalled", a share of the time, is of the part after the
        warm-up.
    """
    config = host_config(
        options.endpoints,
        capacity=options.capacity,
        prefetch=options.prefetch,
        max_inflight_requests=options.max_inflight_requests,
    )
    loader = PrefetchLoader(
        "bench",
        config,
        batch_size=options.batch,
        decode=size_of,
        collate=list,
        tail="drop",
        num_workers=options.workers,
    )
    # The cache's process runs already, so the clock can start at the first request. Start-up does
    # not count for the peers either. The clock of LitData and Mosaic starts at the first request
    # for a shard, and that of the others at the first batch (see `count`).
    before, stalled, start = loader.metrics(), loader.stalled_seconds, time.monotonic()
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    samples = total = 0
    warm_start, warm_bytes = start, 0
    for number, batch in enumerate(endless):
        samples, total = samples + len(batch), total + sum(batch)
        now = time.monotonic()
        if number == _WARMUP_BATCHES:
            # Count stalls from here on. Before, the cache is still filling: the demand leaves only
            # a part of the link rate for that.
            stalled, warm_start, warm_bytes = loader.stalled_seconds, now, total
        if options.pace:
            # Sleep until a training with this demand would request the next batch.
            time.sleep(max(0.0, warm_start + (total - warm_bytes) / options.pace - now))
        if now - start > options.seconds:
            break
    seconds = time.monotonic() - start
    after = loader.metrics()
    requested = after.requested_samples - before.requested_samples
    figures = {
        "samples": samples,
        "bytes": total,
        "seconds": seconds,
        "stalled": (loader.stalled_seconds - stalled) / (time.monotonic() - warm_start),
        "requests_per_sample": (after.requests - before.requests) / max(requested, 1),
        "moved_bytes": after.moved_bytes - before.moved_bytes,
        "peak_bytes": after.peak_bytes,
    }
    loader.close()
    return figures


def plain(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a DataLoader that sends one request for each sample."""
    data = RemoteFiles(options.endpoints, options.samples)
    loader: Iterable[Any] = DataLoader(
        data,
        batch_size=options.batch,
        shuffle=True,
        num_workers=options.workers,
        collate_fn=list,
    )
    return count(iter(loader), options.seconds, lambda batch: [len(data) for data in batch])


def mapper(options: argparse.Namespace) -> dict[str, Any]:
    """Measure torchdata's ParallelMapper, which sends one request for each sample."""
    data = RemoteFiles(options.endpoints, options.samples)
    order = shuffled(options.samples, 0, 0).tolist()
    node = ParallelMapper(
        SamplerWrapper(order), data.__getitem__, num_workers=options.workers, method=options.method
    )
    loader = Loader(Batcher(node, options.batch))
    return count(iter(loader), options.seconds, lambda batch: [len(data) for data in batch])


def index(options: argparse.Namespace) -> dict[str, Any]:
    """Measure time, bytes and Python objects of the index of ten million samples.

    The samples have synthetic sizes. The engine holds the indexes of two epochs, and delivers some
    batches, before its bytes are counted.
    """
    sizes = np.random.default_rng(0).integers(1_000, 100_000, _INDEX_SAMPLES)
    # Numba compiles `shuffled` and `build` in this call, before the clock starts.
    CacheIndex.build(shuffled(8, 0, 0), _INDEX_NODES)
    gc.collect()
    objects = len(gc.get_objects())
    start = time.monotonic()
    first = CacheIndex.build(shuffled(_INDEX_SAMPLES, 0, 0), _INDEX_NODES)
    seconds = time.monotonic() - start
    space = CacheSpace(np.zeros(64 << 20, dtype=np.uint8), _INDEX_SAMPLES)
    pinned = PinnedSamples(np.zeros(0, dtype=np.uint8), sizes)
    engine = PrefetchEngine(sizes, _INDEX_NODES, space, pinned)
    engine.begin_epoch(0, first, lambda _: None)
    second = CacheIndex.build(shuffled(_INDEX_SAMPLES, 0, 1), _INDEX_NODES)
    engine.begin_epoch(1, second, lambda _: None)
    for request_id in range(100):
        engine.request_batch(
            "rank 0",
            request_id,
            0,
            np.arange(64 * request_id, 64 * request_id + 64, dtype=np.uint32),
        )
        while not engine.pop_replies():
            for fetch in engine.pop_fetches():
                data = np.zeros(int(sizes[fetch.sample_ids].sum()), dtype=np.uint8)
                engine.arrive(fetch.fetch_id, data)
        engine.release("rank 0", request_id)
    per_sample = engine.management_bytes() / _INDEX_SAMPLES
    gc.collect()
    new_objects = len(gc.get_objects()) - objects
    return {"index_seconds": seconds, "bytes_per_sample": per_sample, "objects": new_objects}


def main() -> None:
    """Measure one loader, or the index, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurement", choices=("ours", "plain", "mapper", "index"))
    parser.add_argument("--endpoints")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--method", default="thread")
    parser.add_argument("--capacity", default="64MiB")
    parser.add_argument("--prefetch", type=int, default=32)
    parser.add_argument("--max-inflight-requests", type=int, default=4)
    parser.add_argument("--pace", type=float, default=0.0, help="demand, in bytes per second")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measurements = {"ours": ours, "plain": plain, "mapper": mapper, "index": index}
    print(json.dumps(measurements[options.measurement](options)), flush=True)


if __name__ == "__main__":
    main()
