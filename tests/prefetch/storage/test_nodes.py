"""Storage nodes that are killed, restarted, slow, silent, or send what they should not: samples
come from a replica, or the error names node and sample within the deadline."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lightning_dlres.core.errors import ConfigError, PeerTimeoutError, StorageError
from lightning_dlres.core.wire.client import Client
from lightning_dlres.core.wire.keys import create_keys, load_keys, load_public_key
from lightning_dlres.prefetch.storage.base import Reply
from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.nodes import protocol
from lightning_dlres.prefetch.storage.nodes.node_storage import Identity, NodeStorage
from lightning_dlres.prefetch.storage.nodes.server import StoreNode
from lightning_dlres.prefetch.storage.readers import Reader
from lightning_dlres.prefetch.storage.writer import put
from tests.support.sample_files import SAMPLES, bytes_of
from tests.support.waiting import wait_until

Change = Callable[[list[bytes]], list[bytes]]


class Twisted:
    """A reader that can be told to change what it has read."""

    def __init__(self, reader: Reader) -> None:
        self.table, self.contents, self._reader = reader.table, reader.contents, reader
        self.change: Change | None = None
        self.asked = 0

    def read(self, numbers: np.ndarray) -> list[bytes]:
        self.asked += 1
        found = self._reader.read(numbers)
        return self.change(found) if self.change else found


class Nodes:
    """Some storage nodes in this process, which can be killed and started again."""

    def __init__(self, source: Path, count: int) -> None:
        self.readers = [Twisted(open_reader(source)) for _ in range(count)]
        self.running: list[StoreNode | None] = []
        for node in range(count):
            self.running.append(self._start(node, 0))
        self.endpoints = [node.endpoint for node in self.running if node]

    def _start(self, node: int, port: int) -> StoreNode:
        reader: Reader = self.readers[node]  # type: ignore[assignment]
        return StoreNode(reader, node=node, nodes=len(self.readers), port=port)

    def kill(self, node: int) -> None:
        running = self.running[node]
        if running:
            running.close()
        self.running[node] = None

    def restart(self, node: int) -> None:
        self.running[node] = self._start(node, int(self.endpoints[node].rpartition(":")[2]))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> Path:
    put(folder, tmp_path / "store")
    return tmp_path / "store"


def start(stack: ExitStack, source: Path, count: int = 3) -> Nodes:
    nodes = Nodes(source, count)
    stack.callback(lambda: [nodes.kill(node) for node in range(count)])
    return nodes


def connect(stack: ExitStack, endpoints: Sequence[str], **options: object) -> NodeStorage:
    storage = NodeStorage(endpoints, **options)  # type: ignore[arg-type]
    stack.callback(storage.close)
    return storage


def fetch(storage: NodeStorage, numbers: Sequence[int], seconds: float = 20.0) -> list[Reply]:
    """Ask for samples, one request a node, and return the replies in the order of the nodes."""
    came = threading.Event()
    storage.on_reply = came.set
    asked = sorted({number % storage.nodes for number in numbers})
    for node in asked:
        mine = [number for number in numbers if number % storage.nodes == node]
        storage.submit(node, node, np.array(mine, np.uint32))
    found: dict[int, Reply] = {}
    deadline = time.monotonic() + seconds
    while len(found) < len(asked):
        assert came.wait(max(0.0, deadline - time.monotonic())), f"only {len(found)} replies"
        came.clear()
        found.update({reply.fetch_id: reply for reply in storage.replies()})
    return [found[node] for node in asked]


def check(storage: NodeStorage, replies: list[Reply], numbers: Sequence[int]) -> None:
    for reply in replies:
        assert not isinstance(reply.data, StorageError), reply.data
        mine = [number for number in numbers if number % storage.nodes == reply.fetch_id]
        assert reply.data.tobytes() == b"".join(map(bytes_of, mine))


def test_the_table_and_samples_come_over(stack: ExitStack, store: Path) -> None:
    storage = connect(stack, start(stack, store).endpoints)
    assert storage.table.digest == open_reader(store).table.digest
    assert storage.table.key(3) == "part0/sample 003.bin"
    numbers = list(range(SAMPLES))
    check(storage, fetch(storage, numbers), numbers)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: [bytes(len(data)) for data in found], "is damaged"),
        (lambda found: found[:-1], "bytes for"),
        (lambda found: [*found, b"more"], "bytes for"),
    ],
)
def test_corrupt_and_short_replies(
    stack: ExitStack, store: Path, change: Change, words: str
) -> None:
    nodes = start(stack, store)
    nodes.readers[1].change = change
    alone = connect(stack, nodes.endpoints, timeout=1.0)
    replies = fetch(alone, [0, 1, 2, 4, 7])
    assert isinstance(replies[1].data, StorageError)
    text = str(replies[1].data)
    assert words in text
    assert f"storage node 1 ({nodes.endpoints[1]})" in text
    assert "'part0/sample 001.bin'" in text
    assert nodes.readers[1].asked > 1, "it was not tried again"
    check(alone, [replies[0], replies[2]], [0, 2])
    # With a replica nothing is lost.
    twice = connect(stack, nodes.endpoints, replicas=2, timeout=5.0)
    check(twice, fetch(twice, [0, 1, 2, 4, 7]), [0, 1, 2, 4, 7])


def test_a_fault_that_passes_is_got_over(stack: ExitStack, store: Path) -> None:
    nodes = start(stack, store)
    left = [2]

    def twice(found: list[bytes]) -> list[bytes]:
        left[0] -= 1
        return [b""] if left[0] >= 0 else found

    nodes.readers[1].change = twice
    storage = connect(stack, nodes.endpoints, timeout=20.0)
    check(storage, fetch(storage, [1, 4]), [1, 4])


def test_a_silent_node(stack: ExitStack, store: Path) -> None:
    nodes = start(stack, store)
    let_go = threading.Event()
    stack.callback(let_go.set)

    def wait(found: list[bytes]) -> list[bytes]:
        let_go.wait(30)
        return found

    nodes.readers[2].change = wait
    alone = connect(stack, nodes.endpoints, timeout=0.6)
    (reply,) = fetch(alone, [2, 5])
    assert isinstance(reply.data, StorageError)
    assert "within 600 ms" in str(reply.data)
    assert "no answer for" in str(reply.data)
    twice = connect(stack, nodes.endpoints, replicas=2, timeout=2.0)
    check(twice, fetch(twice, [2, 5]), [2, 5])
    # And from now on its replica is asked first.
    asked = nodes.readers[2].asked
    check(twice, fetch(twice, [2, 8]), [2, 8])
    assert nodes.readers[2].asked == asked


def test_a_node_that_is_down_from_the_start_is_not_waited_for(
    stack: ExitStack, store: Path
) -> None:
    nodes = start(stack, store)
    nodes.kill(0)
    storage = connect(stack, nodes.endpoints, replicas=2, timeout=80.0)
    # It alone would be waited for 20 s.
    check(storage, fetch(storage, [0, 3], 10.0), [0, 3])


def test_a_node_that_comes_back_as_another_is_refused(
    stack: ExitStack, store: Path, tmp_path: Path
) -> None:
    nodes = start(stack, store)
    storage = connect(stack, nodes.endpoints, replicas=2, timeout=20.0)
    alone = connect(stack, nodes.endpoints, timeout=1.0)
    nodes.kill(0)
    # As many bytes, and a folder has no checksums.
    for number in range(SAMPLES):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / f"{number:03d}").write_bytes(bytes(len(bytes_of(number))))
    nodes.readers[0] = Twisted(open_reader(tmp_path / "other"))
    nodes.restart(0)
    (reply,) = fetch(alone, [0, 3])
    assert isinstance(reply.data, StorageError)
    assert "must serve the same data set as before" in str(reply.data)
    check(storage, fetch(storage, [0, 3]), [0, 3])


def test_other_bytes_of_the_same_keys_and_sizes_are_another_data_set(
    stack: ExitStack, folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    nodes = start(stack, folder, 2)
    # The bytes are asked for again for longer than a test may take, unless that is of no use.
    alone = connect(stack, nodes.endpoints, timeout=1e6)
    check(alone, fetch(alone, [0, 2, 1]), [0, 2, 1])
    for path in other.rglob("*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    nodes.kill(1)
    nodes.readers[1] = Twisted(open_reader(other))
    nodes.restart(1)
    with pytest.raises(ConfigError, match="must serve the same data set,"):
        NodeStorage(nodes.endpoints)
    (reply,) = fetch(alone, [1])
    assert isinstance(reply.data, StorageError)
    assert str(reply.data).count("storage node 1") == 1
    assert "must serve the same data set as before" in str(reply.data)


@pytest.mark.parametrize("change", ["gone", "grown"])
def test_a_file_that_changes_behind_a_node_is_told_at_once(
    stack: ExitStack, folder: Path, tmp_path: Path, change: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    nodes = start(stack, copy, 2)
    # The second node has a copy that stays.
    nodes.kill(1)
    nodes.readers[1] = Twisted(open_reader(folder))
    nodes.restart(1)
    alone = connect(stack, nodes.endpoints, timeout=1e6)
    twice = connect(stack, nodes.endpoints, replicas=2, timeout=1e6)
    path = copy / "part0/sample 002.bin"
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes_of(2) + b"x")
    (reply,) = fetch(alone, [0, 2])
    assert isinstance(reply.data, StorageError)
    assert "'part0/sample 002.bin' (sample_id 2)" in str(reply.data)
    assert ("No such file" if change == "gone" else "more than the") in str(reply.data)
    check(twice, fetch(twice, [0, 2]), [0, 2])


def test_a_node_that_is_killed_and_comes_back(stack: ExitStack, store: Path) -> None:
    nodes = start(stack, store)
    alone = connect(stack, nodes.endpoints, timeout=1.0)
    twice = connect(stack, nodes.endpoints, replicas=2, timeout=20.0)
    check(alone, fetch(alone, [0, 3]), [0, 3])
    nodes.kill(0)
    (reply,) = fetch(alone, [0, 3])
    assert isinstance(reply.data, StorageError)
    assert "storage node 0" in str(reply.data)
    check(twice, fetch(twice, [0, 3]), [0, 3])
    # A request that is under way when the node comes back is answered by it.
    patient = NodeStorage(nodes.endpoints, replicas=2, timeout=20.0)
    stack.callback(patient.close)
    restarted = threading.Timer(0.3, nodes.restart, [0])
    restarted.start()
    nodes.kill(1)
    check(patient, fetch(patient, [0, 3]), [0, 3])
    restarted.join()
    check(alone, fetch(alone, [0, 3]), [0, 3])


def test_two_neighbours_gone_are_more_than_one_replica_can_bear(
    stack: ExitStack, store: Path
) -> None:
    nodes = start(stack, store)
    storage = connect(stack, nodes.endpoints, replicas=2, timeout=1.0)
    nodes.kill(0)
    nodes.kill(1)
    (reply,) = fetch(storage, [0])
    assert isinstance(reply.data, StorageError)
    with pytest.raises(PeerTimeoutError, match="storage node 0"):
        NodeStorage(nodes.endpoints, replicas=2, timeout=0.5)
    with pytest.raises(PeerTimeoutError, match="storage node 0"):
        NodeStorage(nodes.endpoints, timeout=0.5)


def test_nodes_that_do_not_belong_together(
    stack: ExitStack, store: Path, folder: Path, tmp_path: Path
) -> None:
    nodes = start(stack, store)
    with pytest.raises(ConfigError, match="must be node 0 of 3, got node 1 of 3"):
        NodeStorage([nodes.endpoints[1], nodes.endpoints[0], nodes.endpoints[2]])
    with pytest.raises(ConfigError, match="must be node 0 of 1, got node 0 of 3"):
        NodeStorage(nodes.endpoints[:1])
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x").write_bytes(b"x")
    other = start(stack, tmp_path / "other")
    with pytest.raises(ConfigError, match="must serve the same data set"):
        NodeStorage([*nodes.endpoints[:2], other.endpoints[2]])
    for replicas in (0, 4):
        with pytest.raises(ConfigError, match="replicas"):
            NodeStorage(nodes.endpoints, replicas=replicas)
    with pytest.raises(ConfigError, match="endpoints"):
        NodeStorage([])


def test_nonsense_is_refused_and_others_are_served_on(stack: ExitStack, store: Path) -> None:
    nodes = start(stack, store)
    client = Client("stranger", nodes.endpoints[0])
    stack.callback(client.close)
    rows = msgspec.msgpack.encode(protocol.TableRows(0, SAMPLES + 1))
    for kind, payload in [
        ("sing", b""),
        (protocol.GET, b"abc"),
        (protocol.GET, b""),
        (protocol.GET, np.array([SAMPLES], "<u4").tobytes()),
        (protocol.TABLE, b"\xc1"),
        (protocol.TABLE, rows),
    ]:
        number = client.send(kind, payload)
        message = client.expect(20, "a refusal")
        assert (message.kind, message.sequence) == (protocol.FAILED, number)
    storage = connect(stack, nodes.endpoints)
    check(storage, fetch(storage, [0, 1]), [0, 1])


def test_files_that_are_gone_from_a_folder_whose_name_is_not_utf8(
    stack: ExitStack, folder: Path, tmp_path: Path
) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff"))
    shutil.copytree(folder, odd)
    nodes = start(stack, odd, 1)
    storage = connect(stack, nodes.endpoints)
    for name in os.listdir(odd):
        shutil.rmtree(odd / name) if (odd / name).is_dir() else (odd / name).unlink()
    # One more than the node reads at once.
    for _ in range(5):
        (reply,) = fetch(storage, [0])
        assert isinstance(reply.data, StorageError)
        assert "Check that the file is there" in str(reply.data)


def test_what_a_client_has_asked_for_is_not_read_once_it_is_gone(
    stack: ExitStack, store: Path
) -> None:
    nodes = start(stack, store, 1)
    reader, node = nodes.readers[0], nodes.running[0]
    assert node is not None
    started, goes_on = threading.Event(), threading.Event()
    stack.callback(goes_on.set)

    def wait(found: list[bytes]) -> list[bytes]:
        started.set()
        assert goes_on.wait(20)
        return found

    reader.change = wait
    client = Client("gone", nodes.endpoints[0])
    stack.callback(client.close)
    for _ in range(100):
        client.send(protocol.GET, np.zeros(1, "<u4").tobytes())
    # Answered at once, and after those that wait.
    client.send(protocol.HELLO)
    assert client.expect(20, "a welcome").kind == protocol.WELCOME
    assert started.wait(20)
    client.close()
    wait_until(lambda: not len(node._server._connections), "the node has noticed it")
    goes_on.set()
    storage = connect(stack, nodes.endpoints)
    check(storage, fetch(storage, [0]), [0])
    wait_until(lambda: not node._waiting, "nothing waits")
    # Those that were under way, and the other client's.
    assert reader.asked <= 9


def test_replies_are_bounded_and_the_rest_is_asked_for_again(
    stack: ExitStack, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "REPLY_BYTES", 1000)
    monkeypatch.setattr(protocol, "REQUEST_SAMPLES", 9)
    nodes = start(stack, store)
    numbers = list(range(SAMPLES))
    storage = connect(stack, nodes.endpoints)
    check(storage, fetch(storage, numbers), numbers)
    node = nodes.running[0]
    assert node is not None
    assert node.requests > 3
    # One sample, named as often as a request may.
    client = Client("greedy", nodes.endpoints[0])
    stack.callback(client.close)
    largest = max(numbers, key=lambda number: len(bytes_of(number)))
    for count, kind in ((9, protocol.DATA), (10, protocol.FAILED), (100_000, protocol.FAILED)):
        client.send(protocol.GET, np.full(count, largest, "<u4").tobytes())
        message = client.expect(20, "an answer")
        assert message.kind == kind
        assert len(message.payload) <= 1000
    assert node.refused == 2


def test_keys_let_in_only_whom_they_should(stack: ExitStack, store: Path, tmp_path: Path) -> None:
    names = {name: create_keys(tmp_path, name) for name in ("node", "friend", "stranger")}
    assert (names["node"][1].stat().st_mode & 0o077) == 0
    node = StoreNode(
        open_reader(store),
        curve=load_keys(names["node"][1]),
        allowed=[load_public_key(names["friend"][0])],
    )
    stack.callback(node.close)
    server_key = load_public_key(names["node"][0])
    friend = Identity(load_keys(names["friend"][1]), server_key)
    storage = connect(stack, [node.endpoint], identity=friend)
    check(storage, fetch(storage, [0, 1, 2]), [0, 1, 2])
    stranger = Identity(load_keys(names["stranger"][1]), server_key)
    for identity in (stranger, None):
        with pytest.raises(PeerTimeoutError, match="keys match"):
            NodeStorage([node.endpoint], identity=identity, timeout=0.5)
    with pytest.raises(ConfigError, match="name must be new"):
        create_keys(tmp_path, "node")
    with pytest.raises(ConfigError, match="key_secret"):
        load_keys(names["node"][0])
    with pytest.raises(ConfigError, match="dlres store keys"):
        load_keys(tmp_path / "nothing")
    public, secret = names["node"]
    keys = load_keys(secret)
    # Each shows where it was read, and no secret.
    for path, key in ((secret, keys.secret), (secret, keys.public), (public, keys.public)):
        path.write_bytes(path.read_bytes().replace(key, key[:20]))
        with pytest.raises(ConfigError, match=f"{path}: .*must be 40 bytes") as error:
            load_keys(path) if path == secret else load_public_key(path)
        assert keys.secret.decode() not in str(error.value)


def test_bad_nodes(folder: Path) -> None:
    reader = open_reader(folder)
    for options, word in [
        ({"node": 2, "nodes": 2}, "node"),
        ({"read_threads": 0}, "read_threads"),
        ({"emulate_delay": "soon"}, "emulate_delay"),
    ]:
        with pytest.raises(ConfigError, match=word):
            StoreNode(reader, **options)  # type: ignore[arg-type]
