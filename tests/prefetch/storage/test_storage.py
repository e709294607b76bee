"""Sources of samples: folders, listings, stores and URLs give the same samples.

Errors name damaged and missing samples.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError, PeerTimeoutError, StorageError
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.loading.direct import DirectClient
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.loading.ranks import Ranks
from lightning_dlres.prefetch.storage import file_storage, listings
from lightning_dlres.prefetch.storage.file_storage import FileStorage
from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.manifest import MANIFEST, SampleTable
from lightning_dlres.prefetch.storage.readers import Reader
from lightning_dlres.prefetch.storage.registry import open_storage
from lightning_dlres.prefetch.storage.writer import find_damage, put
from tests.support.examples import examples
from tests.support.sample_files import SAMPLES, bytes_of, pack_of
from tests.support.waiting import wait_until

ALL_IDS = np.arange(SAMPLES, dtype=np.uint32)


def test_a_folder_a_listing_a_store_and_urls_give_the_same_samples(
    folder: Path, tmp_path: Path
) -> None:
    listing = tmp_path / "listing.tsv"
    names = [f"part{n // 50}/sample {n:03d}.bin" for n in range(SAMPLES)]
    listing.write_text("".join(f"{n}\t{folder}/{name}\n" for n, name in enumerate(names)))
    put(folder, tmp_path / "store", packs=3)
    sources = [
        folder,
        listing,
        tmp_path / "store",
        folder.as_uri(),
        (tmp_path / "store").as_uri(),
    ]
    for source in sources:
        reader = open_reader(source)
        assert [bytes(data) for data in reader.read(ALL_IDS)] == [*map(bytes_of, range(SAMPLES))]
        some = np.array([50, 3, 96], np.uint32)
        assert [bytes(data) for data in reader.read(some)] == [*map(bytes_of, some)]
        keys = [reader.table.key(sample_id) for sample_id in range(SAMPLES)]
        assert keys == ([*map(str, range(SAMPLES))] if source == listing else names)


def test_put_writes_any_map_style_data_set(tmp_path: Path) -> None:
    table = put([b"one", b"", b"three"], tmp_path)
    assert [table.key(n) for n in range(3)] == ["0", "1", "2"]
    samples = open_reader(tmp_path).read(np.arange(3, dtype=np.uint32))
    assert [bytes(data) for data in samples] == [b"one", b"", b"three"]
    with pytest.raises(ConfigError, match="must have no store unless overwrite is True"):
        put([b"x"], tmp_path)
    put([b"x"], tmp_path, overwrite=True)
    assert len(open_reader(tmp_path).table) == 1
    with pytest.raises(ConfigError, match=r"item 1 .*must be bytes, got 'int'"):
        put([b"x", 3], tmp_path / "other")
    # An unfinished store has no manifest.
    assert not (tmp_path / "other" / MANIFEST).exists()
    for wrong in (iter([b"x"]), 3):
        with pytest.raises(ConfigError, match="map-style"):
            put(wrong, tmp_path / "third")


def test_a_file_system_of_fsspec_gives_the_same_samples(folder: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    put(folder, tmp_path / "store", packs=3)
    for name, source in (("plain", folder), ("packed", tmp_path / "store")):
        memory.put(str(source), f"/{tmp_path.name}/{name}", recursive=True)
        reader = open_reader(f"memory://{tmp_path.name}/{name}")
        assert [bytes(data) for data in reader.read(ALL_IDS)] == [*map(bytes_of, range(SAMPLES))]
        assert reader.table.key(3) == "part0/sample 003.bin"
    memory.rm(f"/{tmp_path.name}", recursive=True)


def test_a_server_without_sizes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = MemoryFileSystem.find

    def unsized(*args: Any, **options: Any) -> Any:
        return {name: {**info, "size": None} for name, info in find(*args, **options).items()}

    fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/a", b"x")
    monkeypatch.setattr(MemoryFileSystem, "find", unsized)
    # The server gives them when they are asked for one by one.
    assert open_reader(f"memory://{tmp_path.name}").table.total_bytes == 1
    monkeypatch.setattr(MemoryFileSystem, "sizes", lambda _, paths: [None] * len(paths))
    with pytest.raises(ConfigError, match=r"without the size of 'a'.*into a store"):
        open_reader(f"memory://{tmp_path.name}")


@contextmanager
def web_server(directory: Path) -> Iterator[tuple[str, threading.Event]]:
    """Context manager that serves a directory. It yields the server's address, and an event for
    which the server waits before it answers."""
    answers = threading.Event()
    answers.set()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, directory=str(directory), **options)

        def send_head(self) -> Any:
            answers.wait()
            return super().send_head()

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        # The test requests all files at once.
        request_queue_size = SAMPLES

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", answers
        finally:
            answers.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def web(folder: Path) -> Iterator[tuple[str, threading.Event]]:
    """Address of a folder on a web server, and the event for which the server waits."""
    with web_server(folder) as (address, answers):
        yield f"{address}/part1", answers


def test_a_folder_of_a_web_server_is_read(web: tuple[str, threading.Event]) -> None:
    reader = open_reader(web[0])
    samples = reader.read(np.arange(len(reader.table), dtype=np.uint32))
    assert [bytes(data) for data in samples] == [*map(bytes_of, range(50, SAMPLES))]
    assert keys_of(reader) == [f"sample {sample_id:03d}.bin" for sample_id in range(50, SAMPLES)]


def test_a_file_that_a_web_server_no_longer_has_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.bin").write_bytes(b"x")
    words = r"No such file or directory \(.*Check that the file is"
    with web_server(tmp_path) as (address, _):
        reader = open_reader(f"{address}/")
        (tmp_path / "1.bin").unlink()
        with pytest.raises(StorageError, match=words):
            reader.read(np.array([0]))


def test_a_web_server_that_ignores_byte_ranges_is_named_as_the_reason(
    folder: Path, tmp_path: Path
) -> None:
    put(folder, tmp_path)
    with web_server(tmp_path) as (address, _):
        reader = open_reader(address)
        with pytest.raises(StorageError, match=r"more than the \d+ bytes .*ignore byte ranges"):
            reader.read(np.array([1], dtype=np.uint32))


def test_names_on_web_pages_stay_quoted_if_they_are_not_utf8_or_contain_a_slash() -> None:
    names = ["%C3%BC%2520.bin", "%FF.bin", "a%2Fb.bin"]
    assert [*map(listings._web_key, names)] == ["\u00fc%20.bin", *names[1:]]


def test_a_slow_listing_reports_progress_and_ends_at_its_limit(
    web: tuple[str, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listings, "_REPORT_SECONDS", 0.01)
    web[1].clear()
    reports: list[str] = []

    def report_progress(text: str) -> None:
        reports.append(text)
        if len(reports) == 3:
            web[1].set()

    assert len(open_reader(web[0], report_progress).table) == SAMPLES - 50
    assert reports[0].startswith(f"listing {web[0]} for")
    web[1].clear()
    monkeypatch.setattr(listings, "MAX_LISTING_SECONDS", 0.1)
    with pytest.raises(PeerTimeoutError, match=f"{web[0]}: no answer in"):
        open_reader(web[0])


def keys_of(reader: Reader) -> list[str]:
    return [reader.table.key(sample_id) for sample_id in range(len(reader.table))]


def linked(tmp_path: Path) -> Path:
    """Make a folder with links to files in it, folders above and files outside; return its path."""
    data, other, beside = tmp_path / "data", tmp_path / "other", tmp_path / "data-2"
    for path in (data / "cat", other, beside):
        path.mkdir(parents=True)
        (path / "1").write_bytes(b"x")
    (data / "dog").symlink_to(other)
    (data / "cat" / "up").symlink_to(data)
    (data / "cat" / "2").symlink_to("1")
    (data / "cow").symlink_to(data / "cat")
    (data / "file").symlink_to(beside / "1")
    (other / "2").symlink_to(data / "cat" / "1")
    (other / "over").symlink_to(data / "cat")
    return data


INSIDE = ["cat/1", "cat/2", "cow/1", "cow/2"]
OUTSIDE = ["dog/1", "dog/2", "dog/over/1", "dog/over/2", "file"]


def test_links_within_a_folder_are_followed_once(tmp_path: Path) -> None:
    data = linked(tmp_path)
    # The folder itself may be a link.
    (tmp_path / "link").symlink_to(data)
    for source in (data, tmp_path / "link", f"file://{data}"):
        reader = open_reader(source)
        assert keys_of(reader) == INSIDE
        assert "2 links lead out of the folder and are left out, such as 'dog'" in reader.note
        assert "follow_links=True" in reader.note
        assert "\n" not in reader.note
        reader = open_reader(source, follow_links=True)
        assert keys_of(reader) == sorted(INSIDE + OUTSIDE)
        assert reader.note == ""


def test_a_link_to_itself_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"loop: Too many levels .* Remove the link"):
        open_reader(tmp_path)


def test_a_web_server_that_cannot_be_reached_is_no_empty_folder() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/samples"
        with pytest.raises(ConfigError, match=r"can open, .* Cannot connect to host"):
            open_reader(url)


def test_broken_links_that_lead_out_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gone").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"1 link leads out .* is left out, such as 'gone'"):
        open_reader(tmp_path / "data")
    (tmp_path / "data" / "1").write_bytes(b"x")
    assert keys_of(open_reader(tmp_path / "data")) == ["1"]
    with pytest.raises(ConfigError, match="No such file"):
        open_reader(tmp_path / "data", follow_links=True)


@pytest.mark.parametrize("storage", ["direct", "embedded", "files"])
@pytest.mark.parametrize("follow", [False, True])
def test_every_storage_obeys_follow_links(storage: str, follow: bool, tmp_path: Path) -> None:
    config = host_config(linked(tmp_path), storage=storage, follow_links=follow)
    if storage == "direct":
        with closing(DirectClient(config)) as client:
            samples, note = client.joined.samples, client.joined.note
    else:
        with closing(open_storage(config.source, tmp_path)) as opened:
            samples, note = len(opened.table), opened.note
    assert samples == (len(INSIDE + OUTSIDE) if follow else len(INSIDE))
    assert bool(note) != follow


def test_a_loader_warns_of_links_that_are_left_out(tmp_path: Path) -> None:
    config = host_config(linked(tmp_path))
    with closing(PrefetchLoader("links", config)) as loader:
        with pytest.warns(UserWarning, match="2 links lead out of the folder"):
            assert loader.data_set.samples == len(INSIDE)
    # Only rank 0 warns.
    with closing(PrefetchLoader("links", config, ranks=Ranks(1, 2, (1,)))) as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert loader.data_set.samples == len(INSIDE)


def test_a_folder_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "below").mkdir()
    scan = os.scandir

    def refusing(path: Path) -> Any:
        if Path(path).name == "below":
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refusing)
        with pytest.raises(ConfigError, match=f"{tmp_path}/below: Permission denied"):
            open_reader(tmp_path)


def test_a_store_stays_until_the_next_one_is_whole(tmp_path: Path) -> None:
    put([b"one", b"two", b"three"], tmp_path, packs=3)
    with pytest.raises(ConfigError, match="item 1"):
        put([b"x", 3], tmp_path, overwrite=True)
    reader = open_reader(tmp_path)
    assert reader.read(np.arange(3, dtype=np.uint32)) == [b"one", b"two", b"three"]
    assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(ConfigError, match="outside of the source"):
        put(tmp_path, tmp_path, overwrite=True)
    put([b"x"], tmp_path, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 2
    # Packs without a manifest are no samples.
    (tmp_path / MANIFEST).unlink()
    for source in (tmp_path, f"file://{tmp_path}"):
        with pytest.raises(ConfigError, match="no manifest"):
            open_reader(source)


def test_damaged_samples_are_found_and_named(folder: Path, tmp_path: Path) -> None:
    put(folder, tmp_path, packs=2)
    assert list(find_damage(open_reader(tmp_path))) == []
    pack = pack_of(tmp_path, 1)
    data = bytearray(pack.read_bytes())
    # Sample 1 is the first of this pack.
    data[5] ^= 1
    pack.write_bytes(data[:-10])
    lines = list(find_damage(open_reader(tmp_path)))
    assert "'part0/sample 001.bin' (sample_id 1) is damaged" in lines[0]
    assert "got CRC-32" in lines[0]
    assert "'part1/sample 095.bin'" in lines[1]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "nothing", "Nothing is there"),
        (lambda d: (d / "a.jpg").write_bytes(b"x") and d / "a.jpg", "ending is none"),
        (lambda d: (d / "empty").mkdir() or d / "empty", "must be a folder with files"),
        (lambda d: "nosuch://bucket/x", "fsspec"),
        (lambda d: f"file://{d}/missing", "Nothing is there"),
        (lambda d: (d / "l.txt").write_text("gone.bin\n") and d / "l.txt", "gone.bin"),
        (lambda d: (d / "b.txt").write_bytes(b"\xe4.jpg\n") and d / "b.txt", "in UTF-8"),
        (lambda d: os.mkfifo(d / "pipe") or d, "must be a regular file"),
        (lambda d: (d / os.fsdecode(b"\xe4.jpg")).write_bytes(b"x") and d, "in UTF-8"),
        (lambda d: (d / "gone").symlink_to(d / "x") or d, "No such file"),
        (lambda d: (d / "e.txt").write_text("\n") and d / "e.txt", "A data set must have"),
        (
            lambda d: (d / MANIFEST).write_bytes(b"x" * 600) and d,
            "must be a manifest",
        ),
    ],
)
def test_a_path_that_is_no_source_is_refused(make: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        open_reader(make(tmp_path))  # type: ignore[operator]


def test_files_that_change_or_vanish_are_errors_with_their_names(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"12345")
    reader = open_reader(tmp_path)
    (tmp_path / "b").write_bytes(b"1234567")
    with pytest.raises(StorageError, match=r"sample 'b'.*got more than the 5 bytes"):
        reader.read(np.arange(3, dtype=np.uint32))
    (tmp_path / "a").unlink()
    with pytest.raises(StorageError, match=r"sample 'a' \(sample_id 0\): No such file"):
        reader.read(np.arange(3, dtype=np.uint32))


def test_a_storage_of_files_replies_to_every_fetch(folder: Path) -> None:
    storage = FileStorage(open_reader(folder), nodes=3, read_threads=2, timeout=0.3)
    has_reply = threading.Event()
    storage.on_reply = has_reply.set
    for fetch_id in range(9):
        storage.submit(fetch_id, fetch_id % 3, np.arange(fetch_id, SAMPLES, 9, dtype=np.uint32))
    data_of: dict[int, bytes] = {}
    while len(data_of) < 9:
        assert has_reply.wait(20)
        has_reply.clear()
        for reply in storage.replies():
            assert not isinstance(reply.data, StorageError)
            data_of[reply.fetch_id] = reply.data.tobytes()
    for fetch_id, data in data_of.items():
        assert data == b"".join(bytes_of(n) for n in range(fetch_id, SAMPLES, 9))
    storage.close()


def test_reads_of_a_damaged_store_are_repeated_and_then_an_error(
    folder: Path, tmp_path: Path
) -> None:
    put(folder, tmp_path)
    pack = pack_of(tmp_path)
    data = bytearray(pack.read_bytes())
    data[0] ^= 1
    pack.write_bytes(data)
    storage = FileStorage(open_reader(tmp_path), timeout=0.3)
    storage.submit(7, 0, np.array([1, 2], np.uint32))
    replies = []
    wait_until(lambda: replies.extend(storage.replies()) or replies, "there is a reply")
    assert isinstance(replies[0].data, StorageError)
    assert "'part0/sample 001.bin' (sample_id 1) is damaged" in str(replies[0].data)
    storage.close()


def test_a_read_that_hangs_is_an_error_and_delays_no_close(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_continue = threading.Event()
    reader = open_reader(folder)
    monkeypatch.setattr(reader, "read_at_once", lambda sample_ids: may_continue.wait(60))
    monkeypatch.setattr(file_storage, "GRACE_SECONDS", 0.05)
    storage = FileStorage(reader, read_threads=1, timeout=0.2)
    for fetch_id in range(2):
        # No thread starts to read the second one.
        storage.submit(fetch_id, 0, np.array([1 + fetch_id, 5], np.uint32))
    replies = []
    wait_until(
        lambda: replies.extend(storage.replies()) or len(replies) == 2, "there are two replies"
    )
    for reply in replies:
        assert isinstance(reply.data, StorageError)
        assert f"sample 'part0/sample 00{1 + reply.fetch_id}.bin'" in str(reply.data)
        assert "has hung for more than 200 ms" in str(reply.data)
    storage.close()
    assert storage.replies() == []
    may_continue.set()


@given(st.lists(st.tuples(st.text(), st.integers(0, 2**40)), min_size=1), st.booleans(), st.data())
@settings(max_examples=examples(50))
def test_a_table_is_the_same_after_a_round_trip_in_parts(
    rows: list[tuple[str, int]], has_checksums: bool, data: st.DataObject
) -> None:
    rows = [(key.encode(errors="ignore").decode(), size) for key, size in rows]
    checksums = [size % 2**32 for _, size in rows] if has_checksums else None
    table = SampleTable.build([k for k, _ in rows], [s for _, s in rows], checksums, packs=2)
    cut = data.draw(st.integers(1, len(rows)))
    parts = [table.rows(0, cut)] + ([table.rows(cut, len(rows) - cut)] if cut < len(rows) else [])
    whole = SampleTable.join(
        [
            SampleTable.from_bytes(np.frombuffer(b"".join(p.to_bytes()), np.uint8), "x")
            for p in parts
        ]
    )
    for result in (table, whole):
        assert [result.key(n) for n in range(len(rows))] == [key for key, _ in rows]
        assert result.sizes.tolist() == [size for _, size in rows]
        assert (result.checksums is None) != has_checksums
        assert result.digest == table.digest


def test_different_tables_have_different_digests() -> None:
    base = SampleTable.build(["a", "b"], [1, 2])
    others = [
        SampleTable.build(["a", "c"], [1, 2]),
        SampleTable.build(["a", "b"], [1, 3]),
        SampleTable.build(["ab", ""], [1, 2]),
        SampleTable.build(["a", "b"], [1, 2], [0, 0]),
        SampleTable.build(["a", "b"], [1, 2], encoding="tensors"),
    ]
    assert len({table.digest for table in [base, *others]}) == 6


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    reader = open_reader(tmp_path)
    (tmp_path / "a").chmod(0)
    with pytest.raises(StorageError, match="Permission"):
        reader.read(np.zeros(1, np.uint32))
