"""Tests of the cache process of a host, and of the loaders that use it.

They check bytes, order and counts, and that every process cleans up, even if another is killed.
"""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dlres.core.errors import (
    ConfigError,
    PeerLostError,
    PeerTimeoutError,
    StorageError,
)
from lightning_dlres.core.host.locks import LOCK
from lightning_dlres.prefetch.cache import client
from lightning_dlres.prefetch.cache.client import CacheClient
from lightning_dlres.prefetch.cache.launch import HostProcess
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.cache.samples import Sample
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.loading.node import PrefetchCacheNode
from lightning_dlres.prefetch.loading.ranks import Ranks
from lightning_dlres.prefetch.order.sequence import shuffled
from lightning_dlres.prefetch.storage.writer import put
from tests.support.prefetch_model import predict
from tests.support.sample_files import SAMPLES, bytes_of
from tests.support.storage_nodes import Nodes
from tests.support.waiting import wait_until

SIZES = np.array([len(bytes_of(number)) for number in range(SAMPLES)], np.int64)


def checked_id(sample: Sample) -> int:
    assert bytes(sample.data) == bytes_of(sample.sample_id)
    assert sample.key == f"part{sample.sample_id // 50}/sample {sample.sample_id:03d}.bin"
    return sample.sample_id


def open_loader(
    stack: ExitStack, source: Any, name: str = "t", ranks: Ranks | None = None, **options: Any
) -> PrefetchLoader:
    """Open a loader that `stack` closes, with a small cache.

    Args:
        stack: Stack of the test.
        source: Source of the samples.
        name: Name of the cache.
        ranks: Rank of the loader; None: the only rank.
        options: Further arguments of `host_config` or `PrefetchLoader`.
    """
    loader_options = (
        "batch_size",
        "epochs",
        "shuffle",
        "seed",
        "tail",
        "decode",
        "collate",
        "num_workers",
        "worker_type",
    )
    cache = {key: value for key, value in options.items() if key not in loader_options}
    # Without `storage`, a loader would read a folder directly and start no cache.
    storage = "embedded" if isinstance(source, Path) else "auto"
    config = host_config(
        source, **{"capacity": "16KiB", "prefetch": 8, "storage": storage, **cache}
    )
    rest = {"batch_size": 7, "decode": checked_id, "tail": "uneven"}
    rest.update({key: value for key, value in options.items() if key in loader_options})
    return stack.enter_context(closing(PrefetchLoader(name, config, ranks=ranks, **rest)))


def cache_processes(directory: Path = Path("/")) -> list[int]:
    """Return the pids of the processes that hold locks of caches in a directory.

    The directory keeps out the caches of other tests that run at the same time.
    """
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                links = [os.readlink(file) for file in (entry / "fd").iterdir()]
                files = [Path(link.removesuffix(" (deleted)")) for link in links]
                if any(f.suffix == LOCK and f.is_relative_to(directory) for f in files):
                    pids.append(int(entry.name))
    return pids


@pytest.mark.parametrize(
    "options",
    [
        {"storage": "embedded"},
        {"storage": "files", "num_workers": 2},
        {"storage": "embedded", "num_workers": 2, "worker_type": "process"},
        {"storage": "files", "lookahead": 0},
        {"storage": "embedded", "capacity": 400, "num_workers": 1},
        {"storage": "files", "pinned": "4KiB"},
        {"storage": "direct"},
        {"storage": "direct", "num_workers": 2, "lookahead": 1, "read_threads": 3},
        {"storage": "direct", "num_workers": 2, "worker_type": "process"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_every_sample_comes_once_in_the_order_of_the_epoch(
    stack: ExitStack, folder: Path, options: dict[str, Any]
) -> None:
    batches = open_loader(stack, folder, seed=5, **options)
    for epoch in range(3):
        epoch_batches = list(batches)
        assert len(epoch_batches) == len(batches) == 14
        assert torch.cat(epoch_batches).tolist() == shuffled(SAMPLES, 5, epoch).tolist()
    metrics = batches.metrics()
    assert metrics.peak_bytes <= metrics.capacity
    assert metrics.samples == 3 * SAMPLES


def test_counts_without_lookahead_equal_the_predicted_ones(stack: ExitStack, folder: Path) -> None:
    for capacity in (400, 1500, 4000, 40_000):
        batches = open_loader(
            stack, folder, f"m{capacity}", storage="embedded", lookahead=0, capacity=capacity
        )
        for _ in batches:
            pass
        metrics = batches.metrics()
        expected = predict(
            shuffled(SAMPLES, 0, 0), SIZES, nodes=4, prefetch=8, capacity=capacity, batch=7
        )
        assert (metrics.hits, metrics.requests) == (expected.hits, expected.requests)
        assert metrics.requested_bytes == expected.requested_bytes == int(SIZES.sum())
        assert metrics.samples - metrics.hits == metrics.requests
    assert metrics.requests == sum(-(-len(range(node, SAMPLES, 4)) // 8) for node in range(4))


def test_ranks_share_a_cache_and_each_gets_its_samples(stack: ExitStack, folder: Path) -> None:
    ranks = [
        open_loader(stack, folder, "r", Ranks(rank, 3, (0, 2)), batch_size=4, storage="files")
        for rank in (0, 2)
    ]
    iterators = [iter(batches) for batches in ranks]
    delivered: list[list[int]] = [[], []]
    for _ in range(max(map(len, ranks))):
        for rank_ids, iterator in zip(delivered, iterators, strict=True):
            rank_ids.extend(next(iterator, torch.empty(0)).tolist())
    order = shuffled(SAMPLES, 0, 0).tolist()
    assert delivered == [order[0::3], order[2::3]]
    assert ranks[0].client.joined.pid == ranks[1].client.joined.pid
    # The samples of the third rank are fetched on another host.
    assert ranks[0].metrics().requested_samples >= len(order[0::3]) + len(order[2::3])


def test_a_resume_repeats_and_skips_no_sample(stack: ExitStack, folder: Path) -> None:
    first = open_loader(stack, folder, "a", seed=9)
    list(first)
    seen, iterator = [], iter(first)
    for _ in range(4):
        seen.extend(next(iterator).tolist())
    state = first.state_dict()
    assert state == {**state, "epoch": 1, "consumed": 28, "batches": 4, "seed": 9}
    # Resume with two ranks and another batch size: they share the rest of the epoch.
    rest: list[list[int]] = []
    for rank in range(2):
        second = open_loader(stack, folder, f"b{rank}", Ranks(rank, 2, (rank,)), batch_size=5)
        second.load_state_dict(state)
        assert len(second) == 4 + 7
        rest.append([number for batch in second for number in batch.tolist()])
        # The next epoch has all samples again.
        assert len(second) == 10
        end = second.state_dict()
        assert (end["epoch"], end["consumed"], end["batches"]) == (2, 0, 0)
    order = shuffled(SAMPLES, 9, 1).tolist()
    assert seen == order[:28]
    assert rest == [order[28::2], order[29::2]]


def test_a_state_of_another_data_set_is_refused(
    stack: ExitStack, folder: Path, tmp_path: Path
) -> None:
    state = open_loader(stack, folder).state_dict()
    put([b"x"] * SAMPLES, tmp_path)
    other = open_loader(stack, tmp_path, "other")
    with pytest.raises(ConfigError, match="must be of this data set"):
        other.load_state_dict(state)
    with pytest.raises(ConfigError, match="version"):
        other.load_state_dict({})


def test_the_next_epoch_follows_one_that_was_not_read_to_its_end(
    stack: ExitStack, folder: Path
) -> None:
    batches = open_loader(stack, folder)
    next(iter(batches))
    iter(batches)  # Reads no batch, so it does not count as an epoch.
    assert torch.cat(list(batches)).tolist() == shuffled(SAMPLES, 0, 1).tolist()


def test_the_seed_of_a_sample_depends_on_the_epoch_and_not_on_ranks_or_workers(
    stack: ExitStack, folder: Path
) -> None:
    def seeds(sample: Sample) -> Any:
        return sample.sample_id, sample.seed

    alone = open_loader(stack, folder, "a", decode=seeds, collate=dict)
    seeds_of_epoch = [{}, {}]
    for epoch in range(2):
        for batch in alone:
            seeds_of_epoch[epoch].update(batch)
    assert seeds_of_epoch[0].keys() == seeds_of_epoch[1].keys()
    assert not set(seeds_of_epoch[0].values()) & set(seeds_of_epoch[1].values())
    second = open_loader(
        stack, folder, "b", Ranks(1, 2, (1,)), decode=seeds, collate=dict, num_workers=2
    )
    for batch in second:
        assert batch.items() <= seeds_of_epoch[0].items()


def test_a_sample_stays_while_a_view_of_it_is_alive(stack: ExitStack, folder: Path) -> None:
    batches = open_loader(
        stack, folder, decode=lambda s: s, collate=lambda s: s, capacity="8KiB", batch_size=1
    )
    views: dict[int, Any] = {}
    for epoch in range(4):
        for index, (sample,) in enumerate(batches):
            if epoch == 0 and index in (3, 7, 20):
                views[sample.sample_id] = (sample.data, sample.tensor(), sample.array[1:])[
                    index % 3
                ]
            del sample
    for sample_id, view in views.items():
        expected = bytes_of(sample_id)
        assert (
            bytes(view) == expected
            or bytes(view) == expected[1:]
            or (isinstance(view, torch.Tensor) and view.numpy().tobytes() == expected)
        )
    del view
    views.clear()
    gc.collect()


def test_more_samples_may_be_held_than_fit_into_the_cache(stack: ExitStack, folder: Path) -> None:
    batches = open_loader(
        stack, folder, decode=lambda s: s, collate=lambda s: s, capacity=500, batch_size=3
    )
    # Hold all samples of an epoch at once. The cache has space for two or three.
    held = [sample for batch in batches for sample in batch]
    assert [bytes(sample.data) for sample in held] == [
        bytes_of(number) for number in shuffled(SAMPLES, 0, 0).tolist()
    ]
    metrics = batches.metrics()
    assert metrics.peak_bytes <= 500
    assert metrics.direct_samples > SAMPLES // 2


def test_an_absent_rank_does_not_block_the_others(stack: ExitStack, folder: Path) -> None:
    # The other rank reads nothing, so its samples fill the budget after a few batches.
    batches = open_loader(stack, folder, ranks=Ranks(0, 2, (0, 1)), capacity=2000, batch_size=2)
    assert torch.cat(list(batches)).tolist() == shuffled(SAMPLES, 0, 0)[::2].tolist()
    assert batches.metrics().direct_samples > 20


def test_held_samples_stay_after_their_loader_has_left(stack: ExitStack, folder: Path) -> None:
    options = {"decode": lambda s: s, "collate": lambda s: s, "capacity": "8KiB"}
    first, second = (open_loader(stack, folder, "left", **options) for _ in range(2))
    held = [sample for _, batch in zip(range(3), first, strict=False) for sample in batch]
    first.close()
    assert first.state_dict()["consumed"] == 21
    assert first._client is None
    # The other loader still uses the memory of this cache.
    for _ in range(4):
        for batch in second:
            del batch
    assert [bytes(sample.data) for sample in held] == [bytes_of(s.sample_id) for s in held]
    assert second.client.joined.cache_path == first.data_set.cache_path


def test_a_loader_that_is_garbage_collected_leaves_the_cache(
    folder: Path, own_runtime_directory: Path
) -> None:
    config = host_config(folder, storage="embedded", capacity="16KiB", prefetch=8)
    batches = PrefetchLoader("f", config, batch_size=7, decode=checked_id)
    iterator = iter(batches)
    next(iterator)
    pid = batches.client.joined.pid
    # A reference cycle: only the garbage collector frees the iterator, possibly in another thread.
    iterator.circle = iterator
    del batches, iterator
    collector_thread = threading.Thread(target=gc.collect)
    collector_thread.start()
    collector_thread.join(30)
    wait_until(lambda: pid not in cache_processes(), "the cache's process has ended")


@pytest.mark.parametrize(
    "method", [pytest.param("fork", marks=pytest.mark.exhaustive), "forkserver"]
)
def test_workers_end_after_their_parent_was_killed(
    folder: Path, own_runtime_directory: Path, method: str
) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            multiprocessing.set_start_method(method, force=True)
            # The fork server imports this module once. Otherwise each worker would import torch.
            multiprocessing.set_forkserver_preload([__name__])
            config = host_config(folder, storage="embedded", capacity="16KiB", prefetch=8)
            batches = PrefetchLoader(
                "w", config, batch_size=7, decode=checked_id, num_workers=2, worker_type="process"
            )
            assert torch.cat(list(batches)).tolist() == shuffled(SAMPLES, 0, 0).tolist()
            workers = [process.pid for process in multiprocessing.active_children()]
            os.write(writer, json.dumps([batches.client.joined.pid, *workers]).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    pids = json.loads(os.read(reader, 1000))
    os.close(reader)
    assert len(pids) == 3
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # A process that has ended holds no files, even while it is still a zombie.
    wait_until(
        lambda: not any(Path(f"/proc/{pid}/fd/0").exists() for pid in pids),
        "the cache and the workers have ended",
    )


def test_a_replaced_iterator_raises_an_error(stack: ExitStack, folder: Path) -> None:
    batches = open_loader(stack, folder)
    first = iter(batches)
    assert next(first).tolist() == shuffled(SAMPLES, 0, 0)[:7].tolist()
    second = iter(batches)
    with pytest.raises(ConfigError, match="one iterator at a time"):
        next(first)
    assert next(second).tolist() == shuffled(SAMPLES, 0, 1)[:7].tolist()


def test_a_failed_batch_is_not_skipped(stack: ExitStack, folder: Path) -> None:
    def decode(sample: Sample) -> int:
        if sample.sample_id == shuffled(SAMPLES, 0, 0)[9] and broken:
            raise ValueError("no picture")
        return checked_id(sample)

    broken = True
    batches = open_loader(stack, folder, decode=decode)
    iterator = iter(batches)
    next(iterator)
    for _ in range(2):
        with pytest.raises(ValueError, match="no picture") as caught:
            next(iterator)
        if sys.version_info >= (3, 11):
            assert "while decoding Sample('part" in caught.value.__notes__[0]
    state, broken = batches.state_dict(), False
    batches.load_state_dict(state)
    assert torch.cat(list(batches)).tolist() == shuffled(SAMPLES, 0, 0)[7:].tolist()


def test_a_batch_counts_as_consumed_after_it_was_yielded(stack: ExitStack, tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02d}").write_bytes(bytes([number] * 10))
    order = shuffled(40, 0, 0).tolist()
    batches = open_loader(stack, tmp_path, batch_size=4, decode=None, prefetch=4, timeout="1s")
    assert batches.data_set.samples == 40
    (tmp_path / f"{order[13]:02d}").unlink()
    delivered: list[int] = []
    iterator = (delivered.extend(sample.sample_id for sample in batch) for batch in batches)
    with pytest.raises(StorageError, match="No such file"):
        list(iterator)
    assert delivered == order[: len(delivered)]
    assert batches.state_dict()["consumed"] == len(delivered)


def test_an_interrupted_iterator_raises_an_error(stack: ExitStack, folder: Path) -> None:
    def decode(sample: Sample) -> int:
        raise KeyboardInterrupt

    iterator = iter(open_loader(stack, folder, decode=decode))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(ConfigError, match="after an interruption"):
        next(iterator)


def test_a_client_joins_again_if_the_cache_ends_before_it_answers(
    folder: Path, own_runtime_directory: Path
) -> None:
    config = host_config(folder, storage="embedded", capacity="16KiB", prefetch=8)
    process = HostProcess("j", config)
    process.ensure(60)
    pids = cache_processes(own_runtime_directory)
    assert len(pids) == 1
    # A stopped process answers nothing, but the system still accepts connections to it.
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    clients: list[CacheClient] = []
    join_thread = threading.Thread(target=lambda: clients.append(CacheClient("j", config)))
    join_thread.start()
    join_thread.join(1.0)
    assert not clients
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    join_thread.join(60)
    assert clients[0].joined.pid not in pids
    clients[0].close()


def test_the_bytes_of_samples_are_read_only(stack: ExitStack, folder: Path) -> None:
    batches = open_loader(
        stack, folder, decode=lambda s: s, collate=lambda s: s, pinned="1MiB", storage="files"
    )
    for _ in range(2):
        for batch in batches:
            for sample in batch:
                if len(sample):
                    with pytest.raises(TypeError):
                        sample.data[0] = 1
                    # A tensor may change: it is a copy if other objects share its bytes.
                    sample.tensor().add_(1)
                del sample
            del batch
    for batch in batches:
        for sample in batch:
            assert bytes(sample.data) == bytes_of(sample.sample_id)
            del sample


def test_a_copied_loader_keeps_its_own_position(stack: ExitStack, folder: Path) -> None:
    batches = open_loader(stack, folder)
    other = copy.deepcopy(batches)
    pairs = [(one.tolist(), two.tolist()) for one, two in zip(batches, other, strict=True)]
    assert all(one == two for one, two in pairs)
    other.close()


def test_the_process_and_its_files_are_removed_after_the_last_client(
    stack: ExitStack, folder: Path, own_runtime_directory: Path
) -> None:
    batches = open_loader(stack, folder)
    list(batches)
    pid = batches.client.joined.pid
    assert pid in cache_processes()
    batches.close()
    wait_until(lambda: pid not in cache_processes(), "the cache's process has ended")
    wait_until(
        lambda: not list((own_runtime_directory / f"dlres-{os.getuid()}").iterdir()),
        "the files of the cache are gone",
    )
    # The loader can be used again.
    assert torch.cat(list(batches)).tolist() == shuffled(SAMPLES, 0, 1).tolist()


def test_a_killed_cache_is_an_error_and_the_next_cache_removes_its_files(
    stack: ExitStack, folder: Path, own_runtime_directory: Path
) -> None:
    batches = open_loader(stack, folder, "k")
    iterator = iter(batches)
    next(iterator)
    os.kill(batches.client.joined.pid, signal.SIGKILL)
    with pytest.raises(PeerLostError, match="has ended"):
        list(iterator)
    batches.close()
    second = open_loader(stack, folder, "k")
    assert len(list(second)) == 14
    os.kill(second.client.joined.pid, signal.SIGKILL)
    second.close()
    process = HostProcess("k", host_config(folder, storage="embedded"))
    wait_until(lambda: not process.runs(), "the system has ended the killed process")
    list(open_loader(stack, folder, "other"))
    assert not (own_runtime_directory / f"dlres-{os.getuid()}" / "k").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 300}, "capacity must be at least the largest sample, .* got 300 B"),
        ({"capacity": "1PiB"}, "which this host has free"),
        (
            {"pinned": 100, "pinned_directory": "/nowhere"},
            "must be writable, got /nowhere",
        ),
    ],
)
def test_memory_that_a_cache_cannot_have_is_refused(
    stack: ExitStack, folder: Path, options: dict[str, Any], message: str
) -> None:
    batches = open_loader(stack, folder, storage="files", **options)
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            len(batches)


@pytest.mark.parametrize(("ending", "is_folder"), [(".lock", True), ("", False), (".log", True)])
def test_files_of_others_at_the_paths_of_a_cache_are_an_error_and_stay(
    stack: ExitStack, folder: Path, own_runtime_directory: Path, ending: str, is_folder: bool
) -> None:
    base = own_runtime_directory / f"dlres-{os.getuid()}"
    base.mkdir(mode=0o700)
    other = base / f"occupied{ending}"
    other.mkdir() if is_folder else other.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"must be writable, got: .*Remove these files"):
        len(open_loader(stack, folder, "occupied"))
    assert other.exists()


def test_paths_that_are_not_utf8_are_refused(stack: ExitStack, tmp_path: Path) -> None:
    not_utf8 = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff"))
    not_utf8.mkdir()
    (not_utf8 / "sample").write_bytes(b"x")
    for options in ({"storage": "files"}, {"storage": "embedded"}):
        with pytest.raises(ConfigError, match="source must be a path in UTF-8"):
            open_loader(stack, not_utf8, **options)
    # The cache process finds this path only when it lists the folder.
    valid = tmp_path / "valid"
    valid.mkdir()
    os.symlink(b"nowhere", os.fsencode(valid) + b"/odd\xff")
    with pytest.raises(ConfigError, match="A sample must be a file that can be read"):
        len(open_loader(stack, valid, storage="files", follow_links=True))


def test_a_missing_data_set_is_an_error(stack: ExitStack, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Nothing is there"):
        len(open_loader(stack, tmp_path / "nothing"))


def test_processes_with_other_arguments_are_refused(stack: ExitStack, folder: Path) -> None:
    list(open_loader(stack, folder, "same"))
    with pytest.raises(ConfigError, match="must be the same in all processes"):
        len(open_loader(stack, folder, "same", capacity="20KiB"))


def test_pinned_samples_are_fetched_once(stack: ExitStack, folder: Path, tmp_path: Path) -> None:
    for directory in (None, tmp_path):
        batches = open_loader(
            stack,
            folder,
            f"p{directory is None}",
            storage="files",
            pinned=10_000,
            pinned_directory=directory,
            seed=3,
            epochs=3,
        )
        for _ in range(3):
            for batch in batches:
                del batch
        order = shuffled(SAMPLES, 3, 0)
        pinned = order[: int((np.cumsum(SIZES[order]) <= 10_000).sum())]
        expected = 3 * SIZES.sum() - 2 * SIZES[pinned].sum()
        metrics = batches.metrics()
        assert metrics.requested_bytes == expected
        assert metrics.pinned_hits == 2 * len(pinned)


def test_an_epoch_continues_while_storage_nodes_fail_and_restart(
    stack: ExitStack, folder: Path, tmp_path: Path
) -> None:
    put(folder, tmp_path)
    nodes = Nodes(tmp_path, 3)
    stack.callback(lambda: [nodes.kill(node) for node in range(3)])
    source = ",".join(nodes.addresses)
    replicated = open_loader(
        stack, source, "two", replicas=2, timeout="20s", capacity=2000, prefetch=4
    )
    delivered = []
    for index, batch in enumerate(replicated):
        delivered.append(batch)
        if index == 2:
            nodes.kill(1)
        if index == 6:
            nodes.restart(1)
            nodes.readers[2].alter = lambda samples: [b"?" * len(data) for data in samples]
        if index == 10:
            nodes.readers[2].alter = lambda samples: samples[:-1]
    assert torch.cat(delivered).tolist() == shuffled(SAMPLES, 0, 0).tolist()
    nodes.readers[2].alter = None
    unreplicated = open_loader(stack, source, "one", timeout="1s", capacity=2000, prefetch=4)
    iterator = iter(unreplicated)
    next(iterator)
    nodes.kill(1)
    with pytest.raises(
        StorageError, match=rf"sample 'part.*storage node 1 \({nodes.addresses[1]}\) within 1 s"
    ):
        list(iterator)


def test_a_torchdata_node_yields_the_samples_and_resumes(stack: ExitStack, folder: Path) -> None:
    from torchdata.nodes import Batcher, Loader, Mapper

    node = stack.enter_context(closing(PrefetchCacheNode(folder, capacity="16KiB", seed=2)))
    batches = Loader(Batcher(Mapper(node, checked_id), 10, drop_last=False))
    for epoch in range(2):
        sample_ids = [number for batch in batches for number in batch]
        assert sample_ids == shuffled(SAMPLES, 2, epoch).tolist()
    iterator = iter(batches)
    seen = [*next(iterator), *next(iterator)]
    state = batches.state_dict()
    other = stack.enter_context(closing(PrefetchCacheNode(folder, capacity="16KiB", seed=7)))
    resumed = Loader(Batcher(Mapper(other, checked_id), 10, drop_last=False))
    resumed.load_state_dict(state)
    seen += [number for batch in resumed for number in batch]
    assert seen == shuffled(SAMPLES, 2, 2).tolist()


def test_twenty_epochs_leak_no_threads_files_or_memory(stack: ExitStack, folder: Path) -> None:
    batches = open_loader(stack, folder, num_workers=2, read_threads=1, pinned="1KiB")

    def count_resources() -> tuple[int, int, int, int, int]:
        pid = batches.client.joined.pid
        own = Path("/proc/self")
        mapped = (own / "maps", Path(f"/proc/{pid}/maps"))
        return (
            threading.active_count(),
            len(list((own / "fd").iterdir())),
            len(list(Path(f"/proc/{pid}/fd").iterdir())),
            len(list(Path(f"/proc/{pid}/task").iterdir())),
            # Count maps and not files: processes of other tests have files in /dev/shm.
            sum(maps.read_text().count("/dev/shm/") for maps in mapped),
        )

    def resident_kib(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0])

    for _ in range(3):
        list(batches)
    gc.collect()
    pids = (batches.client.joined.pid, os.getpid())
    before, memory = count_resources(), [resident_kib(pid) for pid in pids]
    for _ in range(20):
        list(batches)
    gc.collect()
    # A leak grows with the epochs. A difference of a few is none: threads and files of earlier
    # tests may end during this test, and a pool of threads may start another one.
    after = count_resources()
    grown = [now - earlier for now, earlier in zip(after, before, strict=True)]
    assert max(grown) < 5, (before, after)
    for pid, kib_before in zip(pids, memory, strict=True):
        assert resident_kib(pid) - kib_before < 2048, "a process has grown by more than 2 MiB"
    assert batches.client._pending == {}
    assert not batches.client._answers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "nosuch"}, "storage"),
        ({"storage": "nodes"}, "addresses"),
        ({"source": "tcp://a:1", "storage": "files"}, "one folder"),
        ({"source": "tcp://a:1", "nodes": 2}, "nodes"),
        ({"nodes": 0}, "nodes"),
        ({"prefetch": 0}, "prefetch"),
        ({"replicas": 9}, "replicas"),
        ({"capacity": "much"}, "capacity"),
        ({"capacity": 10, "lookahead": 11}, "lookahead"),
        ({"threshold": 2.0}, "threshold"),
        ({"timeout": 0}, "timeout"),
        ({"key": "x"}, "server_key"),
        ({"source": ""}, "source"),
        ({"source": []}, "source"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        host_config(**{"source": ".", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch"),
        ({"tail": "cut"}, "tail"),
        ({"num_workers": -1}, "num_workers"),
        ({"worker_type": "goblin"}, "worker_type"),
    ],
)
def test_loader_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrefetchLoader("x", host_config("."), **options)
    with pytest.raises(ConfigError, match="ranks"):
        Ranks(3, 2, (3,))


def test_a_cache_that_does_not_answer_is_an_error_after_the_timeout(
    stack: ExitStack, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_MARGIN_SECONDS", 1.0)
    batches = open_loader(stack, folder, timeout=1)
    iterator = iter(batches)
    next(iterator)
    cache = batches.client.joined.pid
    os.kill(cache, signal.SIGSTOP)
    stack.callback(os.kill, cache, signal.SIGKILL)
    with pytest.raises(PeerTimeoutError, match="did not send samples within 2 s"):
        list(iterator)
    with pytest.raises(PeerTimeoutError, match="the answer to 'metrics' within 2 s"):
        batches.client.metrics()
