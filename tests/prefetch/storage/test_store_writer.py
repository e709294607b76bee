"""Writer of stores: a whole store is there at any time, and damaged, old or hostile manifests are
refused."""

from __future__ import annotations

import errno
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lightning_dlres.core.errors import ConfigError, ProtocolError, StorageError
from lightning_dlres.core.host.locks import locked
from lightning_dlres.prefetch.loading.items import encode_item
from lightning_dlres.prefetch.storage import file_storage, readers, store_writer
from lightning_dlres.prefetch.storage.file_storage import read_in_time
from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.manifest import MANIFEST, SampleTable
from lightning_dlres.prefetch.storage.nodes.node_storage import NodeStorage
from lightning_dlres.prefetch.storage.nodes.server import StoreNode
from lightning_dlres.prefetch.storage.readers import LocalFiles, Piece, PieceArrays
from lightning_dlres.prefetch.storage.store_writer import StoreWriter
from lightning_dlres.prefetch.storage.writer import put
from tests.support.sample_files import pack_of

OLD, NEW = [b"one", b"two", b"three"], [b"4", b"five"]
# Calls of fsync of one put: two packs, their directory, the manifest, and the directory again.
SYNCS = 5


def content(store: Path) -> list[bytes]:
    reader = open_reader(store)
    return [bytes(data) for data in reader.read(np.arange(len(reader.table), dtype=np.uint32))]


def names(store: Path) -> set[str]:
    return {path.name for path in store.iterdir()}


def fail_fsync(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
    """Let the call of fsync with this index raise an error."""
    calls, sync = iter(range(SYNCS)), os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == at:
            raise error
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("at", range(SYNCS))
@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_a_whole_store(
    at: int, error_number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(OLD, tmp_path, packs=3)
    before = names(tmp_path)
    with monkeypatch.context() as patched:
        fail_fsync(patched, at, OSError(error_number, os.strerror(error_number)))
        with pytest.raises(ConfigError, match=r"cannot be written: .*Free some space there"):
            put(NEW, tmp_path, packs=2, overwrite=True)
    if at == SYNCS - 1:
        # The new manifest was in place before the error.
        assert content(tmp_path) == NEW
        assert len(names(tmp_path)) == 3
    else:
        assert content(tmp_path) == OLD
        assert names(tmp_path) == before
    put(NEW, tmp_path, packs=2, overwrite=True)
    assert content(tmp_path) == NEW
    assert len(names(tmp_path)) == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is full")
@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_disk_without_space_for_samples_leaves_no_file(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    files, real_open = [], Path.open

    def open_full_device(path: Path, mode: str) -> BinaryIO:
        real_open(path, mode).close()
        files.append(real_open(Path("/dev/full"), "wb"))
        return files[-1]  # type: ignore[return-value]

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", open_full_device)
        with pytest.raises(ConfigError, match="No space left on device"):
            put([b"x" * size] * 3, store)
    assert files[0].closed
    assert names(store) == set()


@pytest.mark.parametrize("at", range(SYNCS))
def test_the_next_put_removes_the_files_of_a_killed_one(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(OLD, tmp_path)
    with monkeypatch.context() as patched:
        fail_fsync(patched, at, KeyboardInterrupt())
        # A killed process cleans nothing up.
        patched.setattr(StoreWriter, "_clean", lambda _: None)
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            put(NEW, tmp_path, packs=2, overwrite=True)
    assert content(tmp_path) == (NEW if at == SYNCS - 1 else OLD)
    put(OLD, tmp_path, overwrite=True)
    assert content(tmp_path) == OLD
    assert names(tmp_path) == {MANIFEST, pack_of(tmp_path).name}


def test_an_unfinished_first_store_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    (tmp_path / MANIFEST).unlink()
    (tmp_path / "samples-of-mine.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="with an unfinished store"):
        put(NEW, tmp_path)
    assert len(names(tmp_path)) == 2
    put(NEW, tmp_path, overwrite=True)
    assert content(tmp_path) == NEW
    assert names(tmp_path) == {MANIFEST, pack_of(tmp_path).name, "samples-of-mine.bin"}


def test_a_second_writer_of_a_directory_is_refused(tmp_path: Path) -> None:
    class WritesDuringRead:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, number: int) -> bytes:
            with pytest.raises(ConfigError, match="no other process"):
                put(OLD, tmp_path, overwrite=True)
            return b"x"

    put(WritesDuringRead(), tmp_path)
    assert content(tmp_path) == [b"x"]


def test_a_store_can_be_written_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    put(OLD, tmp_path)
    assert content(tmp_path) == OLD
    assert len(names(tmp_path)) == 2


def test_a_reader_never_mixes_a_replaced_store_with_the_new_one(tmp_path: Path) -> None:
    put(OLD, tmp_path)
    early, late = open_reader(tmp_path), open_reader(tmp_path)
    all_ids = np.arange(3, dtype=np.uint32)
    early.read(all_ids)
    put([b"ONE", b"TWO", b"THREE"], tmp_path, overwrite=True)
    # An open file can be read until it is closed.
    assert early.read(all_ids) == OLD
    with pytest.raises(StorageError, match="Check that the file is there"):
        late.read(all_ids)


@pytest.mark.parametrize(
    ("packs", "target", "words"),
    [
        (0, "store", "packs must be .*got 0"),
        (1 << 17, "store", "packs must be"),
        (1, "file", "can write to"),
        (1, "file/store", "can write to"),
    ],
)
def test_bad_packs_and_directories_are_refused(
    packs: int, target: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ConfigError, match=words):
        put(OLD, tmp_path / target, packs=packs)


@pytest.mark.parametrize("target", ["source", "source/store", "link/below/store"])
@pytest.mark.parametrize("scheme", ["", "file://", "local://"])
def test_a_directory_inside_the_source_is_refused(scheme: str, target: str, tmp_path: Path) -> None:
    """Its packs would be samples when the store is written again."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "sample").write_bytes(b"x")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(ConfigError, match="directory must be outside of the source"):
        put(f"{scheme}{source}", tmp_path / target)
    assert names(source) == {"sample"}
    assert len(put(source, tmp_path / "source store")) == 1


@pytest.mark.parametrize("argument", [{"overwite": True}, {"extensions": (".png",)}])
def test_put_of_a_data_set_takes_no_argument_of_a_reader(
    argument: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{[*argument]} with a data set")):
        put(OLD, tmp_path, **argument)
    assert not names(tmp_path)


def test_put_with_more_packs_than_files_may_be_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, calls = Path.open, itertools.count()

    def fail_fourth_open(path: Path, mode: str) -> Any:
        if next(calls) == 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real_open(path, mode)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fail_fourth_open)
        with pytest.raises(ConfigError, match="Pass fewer packs"):
            put(OLD, tmp_path, packs=5)
    assert names(tmp_path) == set()


def test_a_store_of_more_packs_than_files_may_be_open_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [bytes([number]) * number for number in range(120)]
    put(samples, tmp_path, packs=40)
    monkeypatch.setattr(readers, "_MAX_OPEN", 5)
    reader = open_reader(tmp_path)
    open_files, real_open, real_close = set(), os.open, os.close

    def limited_open(path: Any, *arguments: Any, **options: Any) -> int:
        if not str(path).startswith(str(tmp_path)):
            return real_open(path, *arguments, **options)
        if len(open_files) == 5 + readers._MAX_TEMPORARY:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        descriptor = real_open(path, *arguments, **options)
        open_files.add(descriptor)
        return descriptor

    def counted_close(descriptor: int) -> None:
        # Once it is closed, another thread may open a file of the same number.
        open_files.discard(descriptor)
        real_close(descriptor)

    monkeypatch.setattr(os, "open", limited_open)
    monkeypatch.setattr(os, "close", counted_close)
    all_ids = np.arange(len(samples), dtype=np.uint32)
    for first in range(0, len(samples), 7):
        sample_ids = all_ids[first : first + 7]
        assert reader.read_joined(sample_ids).tobytes() == b"".join(samples[first : first + 7])
    assert reader.read_joined(all_ids).tobytes() == b"".join(samples)
    assert reader.read(all_ids) == samples
    assert len(open_files) == 5
    # At the limit of open files, a read fails at once, and the error names the limit.
    open_files.update(range(-readers._MAX_TEMPORARY, 0))
    with pytest.raises(StorageError, match=r"sample '039'.*ulimit -n"):
        read_in_time(reader, all_ids[39:40], 1e6, threading.Event())
    monkeypatch.undo()


class RefusesSome(LocalFiles):
    """Files of a busy storage, which refuses or damages every fourth read."""

    def __init__(self, damages: bool) -> None:
        super().__init__(keep_open=True)
        self._damages, self.reads = damages, 0

    def read_joined(self, pieces: PieceArrays) -> NDArray[np.uint8] | None:
        return None

    def read(self, pieces: Sequence[Piece]) -> list[bytes | OSError]:
        return [self._refused_or(data) for data in super().read(pieces)]

    def _refused_or(self, data: bytes | OSError) -> bytes | OSError:
        self.reads += 1
        if self.reads % 4 or isinstance(data, OSError):
            return data
        return bytes(b ^ 1 for b in data) if self._damages else OSError("busy")


@pytest.mark.parametrize("damages", [False, True])
def test_only_reads_that_fail_are_repeated(
    damages: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_storage, "_FIRST_PAUSE", 0.0)
    put([bytes([i]) * i for i in range(1, 41)], tmp_path, packs=2)
    reader = open_reader(tmp_path)
    all_ids = np.arange(len(reader.table), dtype=np.uint32)
    expected = reader.read_joined(all_ids)
    files = reader._files = RefusesSome(damages)
    data = read_in_time(reader, all_ids, 1e6, threading.Event())
    assert data.tobytes() == expected.tobytes()
    # A fourth is read again, and a fourth of these.
    assert len(all_ids) < files.reads < 1.5 * len(all_ids)


def test_a_flip_of_any_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    put(OLD, tmp_path, packs=2)
    data = np.fromfile(tmp_path / MANIFEST, dtype=np.uint8)
    SampleTable.from_bytes(data, "the manifest")
    accepted = []
    for bit in range(8 * len(data)):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            SampleTable.from_bytes(flipped, "the manifest")
        except ConfigError:
            continue
        accepted.append(bit)
    assert not accepted


def test_a_manifest_of_any_other_length_is_refused(tmp_path: Path) -> None:
    data = b"".join(put(OLD, tmp_path).to_bytes())
    for size in range(len(data)):
        with pytest.raises(ConfigError, match="must be a manifest"):
            SampleTable.from_bytes(np.frombuffer(data[:size], np.uint8), "the manifest")
    with pytest.raises(ConfigError, match="must be a manifest"):
        SampleTable.from_bytes(np.frombuffer(data + b"\0", np.uint8), "the manifest")


def test_a_store_of_an_earlier_version_is_refused_and_can_be_replaced(tmp_path: Path) -> None:
    header = {
        "format": "dlres-store",
        "version": 1,
        "samples": 1,
        "key_bytes": 1,
        "packs": 1,
        "encoding": "raw",
        "checksums": False,
    }
    line = msgspec.json.encode(header).ljust(511) + b"\n"
    rows = np.array([3], "<i8").tobytes() + bytes(4) + np.array([1], "<i8").tobytes()
    (tmp_path / MANIFEST).write_bytes(line + rows + b"a")
    pack = tmp_path / "samples-00000-of-00001.bin"
    pack.write_bytes(b"abc")
    with pytest.raises(ConfigError, match=r"version 2, got dlres-store 1.*put"):
        open_reader(tmp_path)
    with pytest.raises(ConfigError, match="item 1"):
        put([b"x", 3], tmp_path, overwrite=True)
    assert names(tmp_path) == {MANIFEST, pack.name}
    put(NEW, tmp_path, overwrite=True)
    assert content(tmp_path) == NEW
    assert len(names(tmp_path)) == 2


def table_of(keys: bytes, ends: list[int], sizes: list[int], **more: Any) -> SampleTable:
    blob, stops = np.frombuffer(keys, np.uint8), np.array(ends, np.int64)
    return SampleTable(np.array(sizes, np.int64), None, blob, stops, **more)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (table_of(b"a\xffb", [1, 3], [1, 1]), "not UTF-8"),
        (table_of("é".encode(), [1, 2], [1, 1]), "not UTF-8"),
        (table_of("aé".encode()[:2], [1, 2], [1, 1]), "not UTF-8"),
        (table_of(b"\xed\xa0\x80", [3], [1]), "not UTF-8"),
        (table_of(b"ab", [3, 2], [1, 1]), "out of range"),
        (table_of(b"ab", [-(1 << 63), 2], [1, 1]), "out of range"),
        (table_of(b"ab", [1, 2], [1, -1]), "out of range"),
        (table_of(b"ab", [1, 2], [1 << 62, 1 << 62]), "out of range"),
        (table_of(b"ab", [1, 2], [1, 1], packs=1 << 40), "no header"),
        (table_of(b"ab", [1, 2], [1, 1], packs=-1), "no header"),
        (table_of(b"ab", [1, 2], [1, 1], packs=1, packs_id="../../../etc"), "no header"),
        (table_of(b"ab", [1, 2], [1, 1], packs=1, packs_id="0123456789ab\n"), "no header"),
    ],
)
def test_a_hostile_manifest_is_refused(table: SampleTable, words: str) -> None:
    data = np.frombuffer(b"".join(table.to_bytes()), np.uint8)
    with pytest.raises(ConfigError, match=words):
        SampleTable.from_bytes(data, "a store")


def test_keys_may_cross_the_blocks_in_which_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = ["", "é", "", "a€", "𝄞", ""]
    for size in range(1, 12):
        monkeypatch.setattr("lightning_dlres.prefetch.storage.manifest._DECODED_BYTES", size)
        table = SampleTable.build(keys, [1] * len(keys))
        loaded = SampleTable.from_bytes(np.frombuffer(b"".join(table.to_bytes()), np.uint8), "x")
        assert [loaded.key(sample_id) for sample_id in range(len(keys))] == keys


def test_a_hostile_table_of_a_storage_node_is_a_protocol_error(folder: Path) -> None:
    class Hostile:
        table, content_digest = table_of(b"a\xff", [1, 2], [1, 1]), ""
        read: Callable[[Any], list[bytes]]

    with (
        StoreNode(Hostile()) as node,  # type: ignore[arg-type]
        pytest.raises(ProtocolError, match=r"storage node 0 .*not UTF-8"),
    ):
        NodeStorage([node.address], timeout=20)


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / store_writer._LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be written"):
        put(OLD, tmp_path / "store")
    assert not (tmp_path / "elsewhere").exists()
    with locked(tmp_path / "own") as lock:
        assert lock is not None


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({1}, "builtins.set"),
        (np.array([None]), "dtype object"),
        ("\udcff", "The string"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "A quantized tensor"),
        (torch.empty(2, device="meta"), "meta device"),
    ],
    ids=["set", "object array", "surrogate", "sparse", "quantized", "meta"],
)
def test_items_that_cannot_be_written_are_errors_with_their_index(
    tmp_path: Path, bad: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"Item 1 of the data set: .*{words}") as caught:
        put({0: 0, 1: (0, bad)}, tmp_path / "store", encode=encode_item)
    assert "rank" not in str(caught.value)
    assert not list((tmp_path / "store").iterdir())


def test_an_error_of_the_data_set_has_a_note_with_the_index(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as caught:
        put({0: b"0", 2: b"2"}, tmp_path / "store")
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__[0].startswith("Item 1 of the data set was read")
    assert not list((tmp_path / "store").iterdir())
