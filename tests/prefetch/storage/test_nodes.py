"""Storage nodes that are killed, restarted, slow or silent, or that send invalid replies.

Samples then come from a replica, or an error names the node and the sample before the deadline.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq.auth

from lightning_dlres.core.errors import ConfigError, PeerTimeoutError, StorageError
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.keys import create_keys, load_keys, load_public_key
from lightning_dlres.prefetch.storage.base import Reply
from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.nodes import node_storage, protocol
from lightning_dlres.prefetch.storage.nodes.node_storage import Identity, NodeStorage
from lightning_dlres.prefetch.storage.nodes.server import StoreNode
from lightning_dlres.prefetch.storage.writer import put
from tests.support.sample_files import SAMPLES, bytes_of
from tests.support.storage_nodes import AlteringReader, AlterSamples, Nodes
from tests.support.waiting import wait_until


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> Path:
    put(folder, tmp_path / "store")
    return tmp_path / "store"


def start(stack: ExitStack, source: Path, count: int = 3) -> Nodes:
    nodes = Nodes(source, count)
    stack.callback(lambda: [nodes.kill(node) for node in range(count)])
    return nodes


def connect(stack: ExitStack, addresses: Sequence[str], **options: object) -> NodeStorage:
    storage = NodeStorage(addresses, **options)  # type: ignore[arg-type]
    stack.callback(storage.close)
    return storage


def fetch(storage: NodeStorage, sample_ids: Sequence[int], seconds: float = 20.0) -> list[Reply]:
    """Fetch samples, with one fetch for each node, and return the replies by node."""
    has_reply = threading.Event()
    storage.on_reply = has_reply.set
    nodes = sorted({sample_id % storage.nodes for sample_id in sample_ids})
    for node in nodes:
        of_node = [sample_id for sample_id in sample_ids if sample_id % storage.nodes == node]
        storage.submit(node, node, np.array(of_node, np.uint32))
    replies: dict[int, Reply] = {}
    deadline = time.monotonic() + seconds
    while len(replies) < len(nodes):
        timeout = max(0.0, deadline - time.monotonic())
        assert has_reply.wait(timeout), f"only {len(replies)} replies"
        has_reply.clear()
        replies.update({reply.fetch_id: reply for reply in storage.replies()})
    return [replies[node] for node in nodes]


def check(storage: NodeStorage, replies: list[Reply], sample_ids: Sequence[int]) -> None:
    """Assert that replies have the samples of their nodes."""
    for reply in replies:
        assert not isinstance(reply.data, StorageError), reply.data
        of_node = [
            sample_id for sample_id in sample_ids if sample_id % storage.nodes == reply.fetch_id
        ]
        assert reply.data.tobytes() == b"".join(map(bytes_of, of_node))


class Clock:
    """Clock of a `NodeStorage`, which a test can put ahead by some seconds."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def test_a_client_gets_the_table_and_the_samples(stack: ExitStack, store: Path) -> None:
    storage = connect(stack, start(stack, store).addresses)
    assert storage.table.digest == open_reader(store).table.digest
    assert storage.table.key(3) == "part0/sample 003.bin"
    sample_ids = list(range(SAMPLES))
    check(storage, fetch(storage, sample_ids), sample_ids)


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda samples: [bytes(len(data)) for data in samples], "is damaged"),
        (lambda samples: samples[:-1], "bytes for"),
        (lambda samples: [*samples, b"more"], "bytes for"),
    ],
)
def test_corrupt_and_short_replies_are_errors_without_a_replica(
    stack: ExitStack,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    alter: AlterSamples,
    words: str,
) -> None:
    nodes, clock = start(stack, store), Clock()

    def alter_until_deadline(samples: list[bytes]) -> list[bytes]:
        if nodes.readers[1].reads > 1:
            clock.ahead = 20.0
        return alter(samples)

    # The last attempt fails by its bytes, not by the deadline, even on a busy machine.
    monkeypatch.setattr(node_storage, "time", clock)
    nodes.readers[1].alter = alter_until_deadline
    unreplicated = connect(stack, nodes.addresses, timeout=20.0)
    (reply,) = fetch(unreplicated, [1, 4, 7])
    assert isinstance(reply.data, StorageError)
    text = str(reply.data)
    assert words in text
    assert f"storage node 1 ({nodes.addresses[1]})" in text
    assert "'part0/sample 001.bin'" in text
    assert nodes.readers[1].reads > 1, "the read was not repeated"
    clock.ahead, nodes.readers[1].alter = 0.0, alter
    check(unreplicated, fetch(unreplicated, [0, 2]), [0, 2])
    # With a replica all samples come.
    replicated = connect(stack, nodes.addresses, replicas=2, timeout=20.0)
    check(replicated, fetch(replicated, [0, 1, 2, 4, 7]), [0, 1, 2, 4, 7])


def test_a_read_is_repeated_after_a_passing_fault(stack: ExitStack, store: Path) -> None:
    nodes = start(stack, store)
    faults = iter(range(2))

    def fail_twice(samples: list[bytes]) -> list[bytes]:
        return samples if next(faults, None) is None else [b""]

    nodes.readers[1].alter = fail_twice
    storage = connect(stack, nodes.addresses, timeout=20.0)
    check(storage, fetch(storage, [1, 4]), [1, 4])


def test_pauses_double_up_to_a_limit_for_any_number_of_rounds() -> None:
    # A node that fails at once reaches 2000 rounds within a timeout of about an hour.
    pauses = [node_storage._pause_seconds(rounds) for rounds in (1, 2, 3, 2000)]
    assert pauses == [0.05, 0.1, 0.2, 2.0]


def test_a_silent_node_is_an_error_and_its_replica_is_preferred(
    stack: ExitStack, store: Path
) -> None:
    nodes = start(stack, store)
    may_continue = threading.Event()
    stack.callback(may_continue.set)

    def wait(samples: list[bytes]) -> list[bytes]:
        may_continue.wait(30)
        return samples

    nodes.readers[2].alter = wait
    unreplicated = connect(stack, nodes.addresses, timeout=0.6)
    (reply,) = fetch(unreplicated, [2, 5])
    assert isinstance(reply.data, StorageError)
    assert "within 600 ms" in str(reply.data)
    assert "no answer for" in str(reply.data)
    replicated = connect(stack, nodes.addresses, replicas=2, timeout=2.0)
    check(replicated, fetch(replicated, [2, 5]), [2, 5])
    # From now on the replica is asked first.
    reads = nodes.readers[2].reads
    check(replicated, fetch(replicated, [2, 8]), [2, 8])
    assert nodes.readers[2].reads == reads


def test_a_node_that_is_down_at_the_start_delays_nothing(stack: ExitStack, store: Path) -> None:
    nodes = start(stack, store)
    nodes.kill(0)
    storage = connect(stack, nodes.addresses, replicas=2, timeout=80.0)
    # Waiting for this node alone would take 20 s.
    check(storage, fetch(storage, [0, 3], 10.0), [0, 3])


def test_a_node_that_restarts_with_another_data_set_is_refused(
    stack: ExitStack, store: Path, tmp_path: Path
) -> None:
    nodes = start(stack, store)
    storage = connect(stack, nodes.addresses, replicas=2, timeout=20.0)
    unreplicated = connect(stack, nodes.addresses, timeout=1.0)
    nodes.kill(0)
    # Files of the same sizes; a folder has no checksums.
    for sample_id in range(SAMPLES):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / f"{sample_id:03d}").write_bytes(bytes(len(bytes_of(sample_id))))
    nodes.readers[0] = AlteringReader(open_reader(tmp_path / "other"))
    nodes.restart(0)
    (reply,) = fetch(unreplicated, [0, 3])
    assert isinstance(reply.data, StorageError)
    assert "must serve the same data set as before" in str(reply.data)
    check(storage, fetch(storage, [0, 3]), [0, 3])


def test_other_bytes_of_the_same_keys_and_sizes_are_another_data_set(
    stack: ExitStack, folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    nodes = start(stack, folder, 2)
    # A failing fetch would be repeated for longer than a test may take, unless it is final.
    unreplicated = connect(stack, nodes.addresses, timeout=1e6)
    check(unreplicated, fetch(unreplicated, [0, 2, 1]), [0, 2, 1])
    for path in other.rglob("*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    nodes.kill(1)
    nodes.readers[1] = AlteringReader(open_reader(other))
    nodes.restart(1)
    with pytest.raises(ConfigError, match="must serve the same data set,"):
        NodeStorage(nodes.addresses)
    (reply,) = fetch(unreplicated, [1])
    assert isinstance(reply.data, StorageError)
    assert str(reply.data).count("storage node 1") == 1
    assert "must serve the same data set as before" in str(reply.data)


@pytest.mark.parametrize("change", ["gone", "grown"])
def test_a_file_of_a_node_that_changes_is_an_error_at_once(
    stack: ExitStack, folder: Path, tmp_path: Path, change: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    nodes = start(stack, copy, 2)
    # The second node serves a copy that does not change.
    nodes.kill(1)
    nodes.readers[1] = AlteringReader(open_reader(folder))
    nodes.restart(1)
    unreplicated = connect(stack, nodes.addresses, timeout=1e6)
    replicated = connect(stack, nodes.addresses, replicas=2, timeout=1e6)
    path = copy / "part0/sample 002.bin"
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes_of(2) + b"x")
    (reply,) = fetch(unreplicated, [0, 2])
    assert isinstance(reply.data, StorageError)
    assert "'part0/sample 002.bin' (sample_id 2)" in str(reply.data)
    assert ("No such file" if change == "gone" else "more than the") in str(reply.data)
    check(replicated, fetch(replicated, [0, 2]), [0, 2])


def test_a_node_that_is_killed_and_restarted_is_used_again(stack: ExitStack, store: Path) -> None:
    nodes = start(stack, store)
    unreplicated = connect(stack, nodes.addresses, timeout=1.0)
    replicated = connect(stack, nodes.addresses, replicas=2, timeout=20.0)
    check(unreplicated, fetch(unreplicated, [0, 3]), [0, 3])
    nodes.kill(0)
    (reply,) = fetch(unreplicated, [0, 3])
    assert isinstance(reply.data, StorageError)
    assert "storage node 0" in str(reply.data)
    check(replicated, fetch(replicated, [0, 3]), [0, 3])
    # A restarted node answers a fetch that is in flight at its start.
    patient = NodeStorage(nodes.addresses, replicas=2, timeout=20.0)
    stack.callback(patient.close)
    restarted = threading.Timer(0.3, nodes.restart, [0])
    restarted.start()
    nodes.kill(1)
    check(patient, fetch(patient, [0, 3]), [0, 3])
    restarted.join()
    check(unreplicated, fetch(unreplicated, [0, 3]), [0, 3])


def test_samples_of_two_dead_neighbours_are_lost_with_one_replica(
    stack: ExitStack, store: Path
) -> None:
    nodes = start(stack, store)
    storage = connect(stack, nodes.addresses, replicas=2, timeout=1.0)
    nodes.kill(0)
    nodes.kill(1)
    (reply,) = fetch(storage, [0])
    assert isinstance(reply.data, StorageError)
    with pytest.raises(PeerTimeoutError, match="storage node 0"):
        NodeStorage(nodes.addresses, replicas=2, timeout=0.5)
    with pytest.raises(PeerTimeoutError, match="storage node 0"):
        NodeStorage(nodes.addresses, timeout=0.5)


def test_nodes_of_other_data_sets_or_in_another_order_are_refused(
    stack: ExitStack, store: Path, folder: Path, tmp_path: Path
) -> None:
    nodes = start(stack, store)
    with pytest.raises(ConfigError, match="must be node 0 of 3, got node 1 of 3"):
        NodeStorage([nodes.addresses[1], nodes.addresses[0], nodes.addresses[2]])
    with pytest.raises(ConfigError, match="must be node 0 of 1, got node 0 of 3"):
        NodeStorage(nodes.addresses[:1])
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x").write_bytes(b"x")
    other = start(stack, tmp_path / "other")
    with pytest.raises(ConfigError, match="must serve the same data set"):
        NodeStorage([*nodes.addresses[:2], other.addresses[2]])
    for replicas in (0, 4):
        with pytest.raises(ConfigError, match="replicas"):
            NodeStorage(nodes.addresses, replicas=replicas)
    with pytest.raises(ConfigError, match="addresses"):
        NodeStorage([])


def test_invalid_messages_are_refused_and_other_clients_served(
    stack: ExitStack, store: Path
) -> None:
    nodes = start(stack, store)
    client = Client("stranger", nodes.addresses[0])
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
        sequence = client.send(kind, payload)
        message = client.expect(20, "a refusal")
        assert (message.kind, message.sequence) == (protocol.FAILED, sequence)
    storage = connect(stack, nodes.addresses)
    check(storage, fetch(storage, [0, 1]), [0, 1])


def test_missing_files_of_a_folder_whose_name_is_not_utf8_are_errors(
    stack: ExitStack, folder: Path, tmp_path: Path
) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff"))
    shutil.copytree(folder, odd)
    nodes = start(stack, odd, 1)
    storage = connect(stack, nodes.addresses)
    for name in os.listdir(odd):
        shutil.rmtree(odd / name) if (odd / name).is_dir() else (odd / name).unlink()
    # One fetch more than the node reads at once.
    for _ in range(5):
        (reply,) = fetch(storage, [0])
        assert isinstance(reply.data, StorageError)
        assert "Check that the file is there" in str(reply.data)


def test_waiting_requests_of_a_client_that_is_gone_are_dropped(
    stack: ExitStack, store: Path
) -> None:
    nodes = start(stack, store, 1)
    reader, node = nodes.readers[0], nodes.running[0]
    assert node is not None
    started, may_continue = threading.Event(), threading.Event()
    stack.callback(may_continue.set)

    def wait(samples: list[bytes]) -> list[bytes]:
        started.set()
        assert may_continue.wait(20)
        return samples

    reader.alter = wait
    client = Client("gone", nodes.addresses[0])
    stack.callback(client.close)
    for _ in range(100):
        client.send(protocol.GET, np.zeros(1, "<u4").tobytes())
    # A hello is answered at once, and received after the requests before it.
    client.send(protocol.HELLO)
    assert client.expect(20, "a welcome").kind == protocol.WELCOME
    assert started.wait(20)
    client.close()
    wait_until(
        lambda: not len(node._server._connections), "the node has noticed that the client is gone"
    )
    may_continue.set()
    storage = connect(stack, nodes.addresses)
    check(storage, fetch(storage, [0]), [0])
    wait_until(lambda: not node._waiting, "no request waits")
    # Far fewer than 100: only requests whose reads had started, and one of the other client.
    assert reader.reads <= 9


def test_replies_are_bounded_and_the_rest_is_requested_again(
    stack: ExitStack, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "REPLY_BYTES", 1000)
    monkeypatch.setattr(protocol, "REQUEST_SAMPLES", 9)
    nodes = start(stack, store)
    sample_ids = list(range(SAMPLES))
    storage = connect(stack, nodes.addresses)
    check(storage, fetch(storage, sample_ids), sample_ids)
    node = nodes.running[0]
    assert node is not None
    assert node.requests > 3
    # A request may repeat one sample.
    client = Client("greedy", nodes.addresses[0])
    stack.callback(client.close)
    largest = max(sample_ids, key=lambda sample_id: len(bytes_of(sample_id)))
    for count, kind in ((9, protocol.DATA), (10, protocol.FAILED), (100_000, protocol.FAILED)):
        client.send(protocol.GET, np.full(count, largest, "<u4").tobytes())
        message = client.expect(20, "an answer")
        assert message.kind == kind
        assert len(message.payload) <= 1000
    assert node.refused == 2


def test_nodes_with_keys_admit_only_allowed_clients(
    stack: ExitStack, store: Path, tmp_path: Path
) -> None:
    keys_of = {name: create_keys(tmp_path, name) for name in ("node", "friend", "stranger")}
    assert (keys_of["node"][1].stat().st_mode & 0o077) == 0
    node = StoreNode(
        open_reader(store),
        curve=load_keys(keys_of["node"][1]),
        allowed=[load_public_key(keys_of["friend"][0])],
    )
    stack.callback(node.close)
    server_key = load_public_key(keys_of["node"][0])
    friend = Identity(load_keys(keys_of["friend"][1]), server_key)
    storage = connect(stack, [node.address], identity=friend)
    check(storage, fetch(storage, [0, 1, 2]), [0, 1, 2])
    stranger = Identity(load_keys(keys_of["stranger"][1]), server_key)
    for identity in (stranger, None):
        with pytest.raises(PeerTimeoutError, match="keys match"):
            NodeStorage([node.address], identity=identity, timeout=0.5)
    with pytest.raises(ConfigError, match="name must be new"):
        create_keys(tmp_path, "node")
    with pytest.raises(ConfigError, match="key_secret"):
        load_keys(keys_of["node"][0])
    with pytest.raises(ConfigError, match="dlres store keys"):
        load_keys(tmp_path / "nothing")
    public, secret = keys_of["node"]
    keys = load_keys(secret)
    # Each error names the file and shows no secret.
    for path, key in ((secret, keys.secret), (secret, keys.public), (public, keys.public)):
        path.write_bytes(path.read_bytes().replace(key, key[:20]))
        with pytest.raises(ConfigError, match=f"{path}: .*must be 40 bytes") as error:
            load_keys(path) if path == secret else load_public_key(path)
        assert keys.secret.decode() not in str(error.value)


def test_a_secret_key_file_is_private_before_it_holds_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, modes = zmq.auth.create_certificates, []

    def record_mode(directory: Path, name: str) -> Any:
        modes.append((directory / f"{name}.key_secret").stat().st_mode & 0o777)
        return create(directory, name)

    monkeypatch.setattr(zmq.auth, "create_certificates", record_mode)
    _, secret = create_keys(tmp_path, "node")
    assert [*modes, secret.stat().st_mode & 0o777] == [0o600, 0o600]
    assert load_keys(secret)


def test_bad_arguments_of_a_node_are_refused(folder: Path) -> None:
    reader = open_reader(folder)
    for options, word in [
        ({"node": 2, "nodes": 2}, "node"),
        ({"read_threads": 0}, "read_threads"),
        ({"emulate_delay": "soon"}, "emulate_delay"),
    ]:
        with pytest.raises(ConfigError, match=word):
            StoreNode(reader, **options)  # type: ignore[arg-type]
