"""Direct reads of local files, without a cache: the same samples in the same order."""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dlres.core.errors import ConfigError, StorageError
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.cache.samples import Sample
from lightning_dlres.prefetch.loading.direct import DirectClient
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.loading.local_samples import WorkerReader
from lightning_dlres.prefetch.loading.ranks import Ranks
from lightning_dlres.prefetch.order.sequence import shuffled, splitmix64
from lightning_dlres.prefetch.storage import file_storage, local_reads
from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.writer import put
from tests.support.sample_files import SAMPLES, bytes_of, pack_of


def facts(sample: Sample) -> tuple[str, int, bytes, int]:
    """Return key, sample_id, bytes and seed of a sample."""
    return sample.key, sample.sample_id, bytes(sample.data), sample.seed


def open_direct(
    stack: ExitStack,
    source: Path,
    ranks: Ranks | None = None,
    host_options: dict[str, Any] | None = None,
    **options: Any,
) -> PrefetchLoader:
    """Open a loader without a cache; `stack` closes it. `options` are those of the loader."""
    config = host_config(source, **(host_options or {}))
    assert config.source.storage == "direct"
    defaults = {"batch_size": 7, "decode": facts, "collate": list, "tail": "uneven"}
    loader = PrefetchLoader("none", config, ranks=ranks, **{**defaults, **options})
    return stack.enter_context(closing(loader))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "direct"),
        ({"lookahead": "1MiB", "capacity": "2MiB", "read_threads": 2}, "direct"),
        ({"nodes": 2}, "embedded"),
        ({"nodes": 2, "replicas": 2}, "embedded"),
        ({"pinned": "1MiB"}, "embedded"),
        ({"lookahead": 0}, "embedded"),
        ({"storage": "files"}, "files"),
    ],
)
def test_local_files_are_read_without_a_cache_unless_an_option_needs_one(
    options: dict[str, Any], kind: str
) -> None:
    for source in ("data", "file:///data"):
        assert host_config(source, **options).source.storage == kind
    assert host_config("s3://bucket/data").source.storage == "files"


@pytest.mark.parametrize("wrong", [{"nodes": 2}, {"pinned": 1}, {"lookahead": 0}])
def test_options_that_need_a_cache_are_refused_with_direct_reads(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="storage"):
        host_config("data", storage="direct", **wrong)


@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "process"}],
    ids=["none", "threads", "processes"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "store"])
def test_samples_come_in_order_with_key_bytes_and_seed(
    stack: ExitStack, folder: Path, tmp_path: Path, packed: bool, workers: dict[str, Any]
) -> None:
    if packed:
        put(folder, tmp_path / "store", packs=3)
    batches = open_direct(stack, tmp_path / "store" if packed else folder, seed=5, **workers)
    for epoch in range(2):
        delivered = [sample_facts for batch in batches for sample_facts in batch]
        seed = splitmix64(splitmix64(5) + epoch)
        assert delivered == [
            (f"part{n // 50}/sample {n:03d}.bin", n, bytes_of(n), splitmix64(seed + n))
            for n in shuffled(SAMPLES, 5, epoch).tolist()
        ]
    assert batches.metrics().samples == 2 * SAMPLES


def test_ranks_get_their_samples_and_another_loader_resumes(stack: ExitStack, folder: Path) -> None:
    order = shuffled(SAMPLES, 0, 0).tolist()
    for rank in range(2):
        batches = open_direct(stack, folder, Ranks(rank, 2, (0, 1)), batch_size=4)
        iterator = iter(batches)
        first = [number for _ in range(3) for _, number, _, _ in next(iterator)]
        assert first == order[rank:24:2]
        other = open_direct(stack, folder)
        other.load_state_dict(batches.state_dict())
        assert [number for batch in other for _, number, _, _ in batch] == order[24:]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_state_amid_an_epoch_of_another_order_is_refused(
    stack: ExitStack, folder: Path, shuffle: bool
) -> None:
    batches, other = (open_direct(stack, folder, shuffle=value) for value in (shuffle, not shuffle))
    iterator = iter(batches)
    next(iterator)
    with pytest.raises(ConfigError, match=f"shuffle must be {shuffle}.* got {not shuffle}"):
        other.load_state_dict(batches.state_dict())
    assert sum(len(batch) for batch in iterator) == SAMPLES - 7
    other.load_state_dict(batches.state_dict())
    seen = [number for batch in other for _, number, _, _ in batch]
    assert seen == (list(range(SAMPLES)) if shuffle else shuffled(SAMPLES, 0, 1).tolist())


def test_held_samples_keep_their_bytes_while_others_are_read(
    stack: ExitStack, folder: Path
) -> None:
    batches = open_direct(stack, folder, decode=lambda sample: (sample, sample.tensor()))
    held = [pair for batch in batches for pair in batch]
    for sample, tensor in held:
        assert bytes(sample.data) == tensor.numpy().tobytes() == bytes_of(sample.sample_id)
    sent = pickle.loads(pickle.dumps(held[0][0]))
    assert facts(sent) == facts(held[0][0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(b"longer"), "more than the 5 bytes"),
        (lambda path: path.write_bytes(b"1"), "got 1 bytes of the 5 bytes"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_error_names_a_file_that_has_changed(
    stack: ExitStack, tmp_path: Path, change: Any, words: str, kind: str
) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"12345")
    workers = 1 if kind == "process" else 0
    batches = open_direct(stack, tmp_path, num_workers=workers, worker_type=kind)
    assert len(batches) == 1
    change(tmp_path / "b")
    with pytest.raises(StorageError, match=rf"sample 'b' \(sample_id 1\): .*{words}"):
        list(batches)


def test_the_error_names_a_damaged_sample(stack: ExitStack, folder: Path, tmp_path: Path) -> None:
    put(folder, tmp_path)
    pack = pack_of(tmp_path)
    data = bytearray(pack.read_bytes())
    data[0] ^= 1
    pack.write_bytes(data)
    batches = open_direct(stack, tmp_path, host_options={"timeout": 0.1})
    with pytest.raises(StorageError, match=r"'part0/sample 001.bin' \(sample_id 1\) is damaged"):
        list(batches)


def test_a_worker_process_reads_all_batches_in_one_thread(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode())
    reads = WorkerReader(open_reader(tmp_path), 0.1)
    # Threads of earlier tests may still be ending.
    before = set(threading.enumerate())
    for number in range(3):
        assert bytes(reads.read(np.array([number], dtype=np.uint32))) == b"abc"[number : number + 1]
        assert len(set(threading.enumerate()) - before) == 1
    (tmp_path / "b").unlink()
    with pytest.raises(StorageError, match="sample 'b'"):
        reads.read(np.array([1], dtype=np.uint32))
    assert bytes(reads.read(np.array([2], dtype=np.uint32))) == b"c"


def test_a_read_that_hangs_is_an_error(
    stack: ExitStack, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    stack.callback(released.set)
    batches = open_direct(stack, folder, host_options={"timeout": 0.1})
    client = batches.client
    assert isinstance(client, DirectClient)
    monkeypatch.setattr(client.reader, "read_at_once", lambda numbers: released.wait(60))
    monkeypatch.setattr(file_storage, "GRACE_SECONDS", 0.05)
    with pytest.raises(StorageError, match="reading has hung"):
        next(iter(batches))


def test_a_read_that_hangs_in_a_worker_process_is_an_error(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"12345")
    # Only forked workers inherit this. Workers that are started anew wait for the default.
    monkeypatch.setattr(file_storage, "GRACE_SECONDS", 0.05)
    batches = open_direct(
        stack, tmp_path, num_workers=1, worker_type="process", host_options={"timeout": 0.1}
    )
    assert len(batches) == 1
    (tmp_path / "b").unlink()
    # Opening a pipe waits for a writer.
    os.mkfifo(tmp_path / "b")
    with pytest.raises(StorageError, match="reading has hung"):
        next(iter(batches))


def test_batches_are_read_ahead_only_within_the_budget(stack: ExitStack, folder: Path) -> None:
    batches = open_direct(stack, folder, host_options={"lookahead": 1}, num_workers=3)
    next(iter(batches))
    client = batches.client
    # A batch that is larger than the budget is read, but none beside it.
    assert not client.may_request(1, 8)
    assert client.may_request(0, 8)


def test_buffers_are_reused_once_nothing_looks_at_them() -> None:
    buffers = local_reads.BufferPool(max_free=2)
    first = buffers.get(100)
    first[:] = 1
    view, tensor = memoryview(first[10:20]), torch.from_numpy(first[20:30])
    address = first.ctypes.data
    del first
    for _ in range(3):
        other = buffers.get(100)
        assert other.ctypes.data != address
        other[:] = 2
    assert bytes(view) == b"\1" * 10
    del view
    assert tensor.eq(1).all()
    assert buffers.get(90).ctypes.data != address
    del tensor
    addresses = {buffer.ctypes.data for buffer in [buffers.get(90), buffers.get(90)]}
    assert address in addresses
    # A small request does not take a much larger free buffer.
    assert len(buffers.get(3)) == 3


def test_forked_processes_do_not_share_buffers() -> None:
    buffers = local_reads.BufferPool()
    buffers.get(10)[:] = 1
    own = buffers.get(10)
    child = os.fork()
    if not child:
        own[:] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert own.tolist() == [1] * 10


def test_a_read_of_many_files_returns_the_bytes_of_each(tmp_path: Path) -> None:
    contents = [b"", b"abc", b"", b"x" * 5000, b"yz"]
    paths = [tmp_path / str(number) for number in range(5)]
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(data)
    sizes = np.array([len(data) for data in contents], np.int64)
    names = [*map(str, paths)]
    data, counts = local_reads.read_whole(names, sizes)
    assert data.tobytes() == b"".join(contents)
    assert counts.tolist() == sizes.tolist()
    paths[0].write_bytes(b"grown")
    paths[1].write_bytes(b"a")
    paths[3].unlink()
    paths[4].write_bytes(b"yz and more")
    _, counts = local_reads.read_whole(names, sizes)
    assert counts.tolist() == [1, 1, 0, -1, 3]


def sample_id_of(sample: Sample) -> int:
    return sample.sample_id


def ends_in_a_sample(sample: Sample) -> int:
    if sample.sample_id == 20:
        next(iter([]))
    return sample.sample_id


def ends_in_a_batch(samples: list[int]) -> list[int]:
    return next(iter([])) if 20 in samples else samples


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "process"}]
)
@pytest.mark.parametrize(
    "user_code",
    [{"decode": ends_in_a_sample}, {"decode": sample_id_of, "collate": ends_in_a_batch}],
    ids=["decode", "collate"],
)
def test_user_code_cannot_end_an_epoch(
    stack: ExitStack, folder: Path, workers: dict[str, Any], user_code: dict[str, Any]
) -> None:
    batches = open_direct(stack, folder, shuffle=False, **workers, **user_code)
    iterator = iter(batches)
    assert [next(iterator), next(iterator)] == [[*range(7)], [*range(7, 14)]]
    with pytest.raises(RuntimeError, match="must not raise StopIteration"):
        next(iterator)
