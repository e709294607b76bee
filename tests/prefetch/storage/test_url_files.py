"""Files behind URLs: concurrent reads return the right bytes, and listings are complete."""

from __future__ import annotations

import asyncio
import io
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lightning_dlres.core.errors import ConfigError, StorageError
from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.nodes.node_storage import NodeStorage
from lightning_dlres.prefetch.storage.nodes.server import StoreNode
from lightning_dlres.prefetch.storage.readers import Piece, Reader
from lightning_dlres.prefetch.storage.url_files import UrlFiles, is_concurrent
from tests.support.waiting import wait_until

COUNT = 400
READERS = 4


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(100 + number)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[tuple[MemoryFileSystem, str]]:
    """File system in memory, and a folder in it for this test only."""
    system, root = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    yield system, root
    if system.exists(root):
        system.rm(root, recursive=True)


@pytest.fixture
def switching() -> Iterator[None]:
    """Let threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archives")
    with (
        tarfile.open(folder / "a.tar", "w") as tar,
        zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for number in range(COUNT):
            info = tarfile.TarInfo(f"set/{number:03d}")
            info.size = len(content(number))
            tar.addfile(info, io.BytesIO(content(number)))
            archive.writestr(info.name, content(number))
    return folder


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize(
    "url",
    [
        "tar://set::file://{folder}/a.tar",
        "zip://set::file://{folder}/a.zip",
        "tar://set::simplecache::file://{folder}/a.tar",
        "dir://set::tar://::file://{folder}/a.tar",
        "tar://set::memory:/{memory}/a.tar",
    ],
)
def test_threads_that_read_one_archive_get_the_right_bytes(
    url: str, archives: Path, memory: tuple[MemoryFileSystem, str]
) -> None:
    memory[0].pipe(f"{memory[1]}/a.tar", (archives / "a.tar").read_bytes())
    source = url.format(folder=archives, memory=memory[1])
    # Two data sets may lie in one archive: their file systems share the file below.
    readers = [open_reader(source) for _ in range(2)]
    expected = [content(number) for number in range(COUNT)]

    def read(part: int) -> bool:
        order = np.random.default_rng(part).permutation(COUNT).astype(np.uint32)
        samples = readers[part % 2].read(order)
        return samples == [expected[number] for number in order]

    with ThreadPoolExecutor(READERS) as pool:
        assert all(pool.map(read, range(READERS)))


def test_a_storage_node_serves_many_requests_for_an_archive_at_once(archives: Path) -> None:
    reader = open_reader(f"tar://set::file://{archives}/a.tar")
    with StoreNode(reader, read_threads=READERS) as node:
        storage = NodeStorage([node.address], timeout=30)
        batches = np.array_split(np.random.default_rng(0).permutation(COUNT).astype(np.uint32), 16)
        for fetch_id, sample_ids in enumerate(batches):
            storage.submit(fetch_id, 0, sample_ids)
        replies: list[Any] = []
        wait_until(lambda: replies.extend(storage.replies()) or len(replies) == 16, "all replies")
        storage.close()
    for reply in replies:
        assert reply.data.tobytes() == b"".join(map(content, batches[reply.fetch_id].tolist()))


def test_only_file_systems_known_to_be_thread_safe_are_called_by_several_threads() -> None:
    memory, web = fsspec.filesystem("memory"), HTTPFileSystem()
    assert is_concurrent(web)
    assert is_concurrent(DirFileSystem("http://localhost", web))
    for system in (memory, DirFileSystem("/", memory), AsyncFileSystemWrapper(memory)):
        assert not is_concurrent(system)
    reference = fsspec.filesystem("reference", fo={"a": ["/x"]}, fs={"memory": memory})
    assert not is_concurrent(reference)


def test_calls_of_an_unsafe_file_system_are_serialized(
    memory: tuple[MemoryFileSystem, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    system, root = memory
    system.pipe(f"{root}/a", b"x")
    inside, most = 0, 0
    met = threading.Event()

    def cat_file(*args: Any, **options: Any) -> bytes:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside > 1:
            met.set()
        # Two threads that are inside at once meet here.
        met.wait(0.1)
        inside -= 1
        return b"x"

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    wrapped = [system, DirFileSystem(root, system), AsyncFileSystemWrapper(system)]
    with ThreadPoolExecutor(len(wrapped)) as pool:
        piece = Piece("a", 0, 1, True)
        assert list(pool.map(lambda s: UrlFiles(s).read([piece]), wrapped)) == [[b"x"]] * 3
    assert most == 1


class Counting(AsyncFileSystem):  # type: ignore[misc]
    """File system of a web server that records the largest number of requests at once."""

    protocol = "http"
    cachable = False
    most, now = 0, 0

    async def _cat_file(self, path: str, start: int = 0, end: int = 0, **_: Any) -> bytes:
        self.now += 1
        self.most = max(self.most, self.now)
        for _turn in range(3):
            await asyncio.sleep(0)
        self.now -= 1
        return path.encode()[start:end]

    async def _size(self, path: str) -> int:
        return len(await self._cat_file(path))


@pytest.mark.parametrize(("options", "most"), [({}, 4), ({"batch_size": 9}, 9)])
def test_a_web_server_gets_few_requests_at_once(options: dict[str, int], most: int) -> None:
    system = Counting(**options)
    files = UrlFiles(system)
    paths = [f"http://host/{number}" for number in range(40)]
    assert files.read([Piece(path, 0, len(path), True) for path in paths]) == [
        path.encode() for path in paths
    ]
    assert system.most == most
    system.most = 0
    files.sizes(paths)
    assert system.most == most


def keys(reader: Reader) -> list[str]:
    return [reader.table.key(number) for number in range(len(reader.table))]


def test_markers_of_folders_are_no_samples(
    memory: tuple[MemoryFileSystem, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    system, root = memory
    for name in ("cat/1", "dog/2", "empty", "?question"):
        system.pipe(f"{root}/{name}", b"" if name == "empty" else b"x")
    find = MemoryFileSystem.find

    def find_as_an_object_store(self: Any, path: str, **options: Any) -> Any:
        marker = {"type": "file", "size": 0}
        markers = {f"{root}/": marker, f"{root}/cat/": marker, f"{root}/dog": marker}
        return {**markers, **find(self, path, **options)}

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "find", find_as_an_object_store)
        reader = open_reader(f"memory:/{root}")
    assert keys(reader) == ["?question", "cat/1", "dog/2", "empty"]
    assert reader.read(np.arange(4, dtype=np.uint32)) == [b"x", b"x", b"x", b""]


@pytest.mark.parametrize(
    ("new_content", "words"),
    [
        (b"1234567", "got more than the 5 bytes"),
        (b"123", "got 3 bytes of the 5 bytes"),
        (None, "Check that the file is there"),
    ],
)
def test_an_object_that_changes_is_an_error_with_its_name(
    new_content: bytes | None, words: str, memory: tuple[MemoryFileSystem, str]
) -> None:
    system, root = memory
    for name in "abc":
        system.pipe(f"{root}/{name}", b"12345")
    reader = open_reader(f"memory:/{root}")
    if new_content is None:
        system.rm(f"{root}/b")
    else:
        system.pipe(f"{root}/b", new_content)
    with pytest.raises(StorageError, match=rf"sample 'b' \(sample_id 1\): .*{words}"):
        reader.read(np.arange(3, dtype=np.uint32))


def test_an_empty_object_that_grows_is_an_error_with_its_name(
    memory: tuple[MemoryFileSystem, str],
) -> None:
    system, root = memory
    system.pipe(f"{root}/a", b"")
    reader = open_reader(f"memory:/{root}")
    assert reader.read(np.zeros(1, np.uint32)) == [b""]
    system.pipe(f"{root}/a", b"1")
    with pytest.raises(StorageError, match=r"'a'.*more than the 0 bytes"):
        reader.read(np.zeros(1, np.uint32))


ODD_NAMES = [
    "a\u2028b",
    "form\x0cfeed",
    "\ufeffmark",
    "carriage\rreturn",
    "at the end\r",
    "x\x85y",
    "\x1cfs",
    " ",
    "tab\there",
]


def test_folders_and_listings_may_have_odd_names(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for name in ODD_NAMES:
        (files / name).write_bytes(name.encode())
    assert sorted(keys(open_reader(files))) == sorted(ODD_NAMES)
    listing = tmp_path / "list.tsv"
    for mark in ("", "\ufeff"):
        listing.write_bytes((mark + "".join(f"{n}\tfiles/{n}\n" for n in ODD_NAMES[:-1])).encode())
        reader = open_reader(listing)
        assert keys(reader) == ODD_NAMES[:-1]
        all_ids = np.arange(len(ODD_NAMES) - 1, dtype=np.uint32)
        assert reader.read(all_ids) == [name.encode() for name in ODD_NAMES[:-1]]


def test_a_listing_written_on_windows_is_read(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "list.txt").write_bytes(b"a\r\n\r\nb\r\n")
    assert keys(open_reader(tmp_path / "list.txt")) == ["a", "b"]


def test_a_listing_with_mixed_line_endings_is_refused_with_a_fix(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "list.txt").write_bytes(b"a\r\nb\n")
    with pytest.raises(ConfigError, match="only a file without the carriage return"):
        open_reader(tmp_path / "list.txt")


def test_a_listing_with_an_empty_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "list.txt").write_bytes(b"a\n\n\ta\n")
    with pytest.raises(
        ConfigError, match=r"Line 3 of a listing must have a key before its tab, got '\\ta'"
    ):
        open_reader(tmp_path / "list.txt")


def test_a_listing_with_a_nul_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"a\0b\n")
    with pytest.raises(ConfigError, match="NUL character"):
        open_reader(tmp_path / "list.txt")
