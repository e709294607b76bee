"""Tests of storage node, cache and watch with hostile clients beside a good one.

The servers survive, the good client sees no error, and memory stays limited.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from lightning_dlres.core.comm import heartbeat
from lightning_dlres.core.comm.liveness import Watch
from lightning_dlres.core.comm.receiving_thread import PREFIX
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.payload import encode
from lightning_dlres.prefetch.cache import messages
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.nodes import protocol
from lightning_dlres.prefetch.storage.nodes.node_storage import NodeStorage
from lightning_dlres.prefetch.storage.nodes.server import StoreNode
from tests.support.hostile_clients import (
    attack_with,
    malformed,
    resident_bytes,
)
from tests.support.rank_sockets import CHANNEL, TwoRanks
from tests.support.waiting import wait_until

# Number of hostile messages to a server.
COUNTS = [
    pytest.param(700, id="some"),
    pytest.param(34_000, id="many", marks=pytest.mark.exhaustive),
]
SAMPLES = 40
SECONDS = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "files"
    root.mkdir()
    for number in range(SAMPLES):
        (root / f"{number:02d}").write_bytes(bytes([number]) * 500)
    return root


@pytest.fixture(autouse=True)
def own_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def attack(
    stack: ExitStack,
    address: str,
    count: int,
    kinds: list[str],
    typed: list[bytes],
    good: Callable[[], None],
) -> None:
    """Send hostile messages to a server; see `attack_with` and `malformed`."""
    messages = malformed(random.Random(count), kinds, typed)
    attack_with(stack, address, itertools.islice(messages, count), good)


@pytest.mark.parametrize("count", COUNTS)
def test_a_storage_node_survives_hostile_clients(
    stack: ExitStack, folder: Path, count: int
) -> None:
    node = stack.enter_context(StoreNode(open_reader(folder)))
    storage = NodeStorage([node.address], timeout=SECONDS)
    stack.callback(storage.close)
    replied = threading.Event()
    storage.on_reply = replied.set
    fetch_ids = itertools.count()

    def good() -> None:
        replied.clear()
        storage.submit(next(fetch_ids), 0, np.arange(SAMPLES, dtype=np.uint32))
        assert replied.wait(2 * SECONDS)
        (reply,) = storage.replies()
        assert isinstance(reply.data, np.ndarray), reply.data
        assert reply.data.tobytes() == b"".join(bytes([n]) * 500 for n in range(SAMPLES))

    good()
    before = resident_bytes()
    typed = [
        np.arange(SAMPLES, dtype="<u4").tobytes(),
        np.zeros(10_000, "<u4").tobytes(),
        msgspec.msgpack.encode(protocol.TableRows(0, SAMPLES)),
    ]
    attack(stack, node.address, count, [protocol.HELLO, protocol.TABLE, protocol.GET], typed, good)
    wait_until(lambda: node.refused > count // 4, "a quarter of the messages is refused")
    assert resident_bytes() < 2 * before


@pytest.mark.parametrize("count", COUNTS)
def test_a_cache_survives_hostile_clients(
    stack: ExitStack, folder: Path, tmp_path: Path, count: int
) -> None:
    config = host_config(folder, storage="files", capacity="64KiB", prefetch=8)
    loader = PrefetchLoader(
        "fuzz", config, batch_size=SAMPLES, decode=lambda sample: sample.sample_id, shuffle=False
    )
    stack.enter_context(closing(loader))
    joined = loader.data_set

    def good() -> None:
        (batch,) = loader
        assert batch.tolist() == list(range(SAMPLES))
        assert loader.client.joined.pid == joined.pid

    good()
    before = resident_bytes(joined.pid)
    begin = {
        "rank": 0,
        "epoch_id": 1 << 40,
        "seed": 0,
        "epoch": 0,
        "shuffle": True,
        "consumed": 0,
        "ranks": 1,
        "local_ranks": (0,),
        "batch": 1,
        "tail": "pad",
        "has_next": False,
    }
    wrong = [("ranks", 1 << 62), ("batch", 1 << 62), ("local_ranks", (-1,)), ("local_ranks", ())]
    wrong += [
        ("consumed", 1 << 40),
        ("consumed", -1),
        ("tail", "none"),
        ("local_ranks", (1 << 62,)),
    ]
    typed = [msgspec.msgpack.encode({**begin, key: value}) for key, value in wrong]
    typed += [
        msgspec.msgpack.encode(messages.Join(messages.fingerprint(config))),
        messages.pack_batch_request(0, 1 << 40, np.arange(5, dtype=np.uint32)),
        messages.pack_release([0, 1, -1]),
    ]
    kinds = [
        messages.BEGIN,
        messages.BATCH_REQUEST,
        messages.RELEASE,
        messages.METRICS,
        messages.LEAVE,
    ]
    # A member of the cache that sends wrong messages.
    member = Client("member", f"ipc://{socket_of(tmp_path)}")
    stack.callback(member.close)
    member.send(messages.JOIN, typed[-3])
    assert member.expect(SECONDS, "a welcome").kind == messages.JOINED
    for payload in typed:
        member.send(messages.BEGIN, payload)
        assert member.expect(SECONDS, "a refusal").kind == messages.FAILED
    member.send(messages.LEAVE)
    assert member.expect(SECONDS, "a goodbye").kind == messages.LEFT
    attack(stack, f"ipc://{socket_of(tmp_path)}", count, kinds, typed, good)
    assert resident_bytes(joined.pid) < 2 * before


def socket_of(base: Path) -> Path:
    return base / f"dlres-{os.getuid()}" / "fuzz" / "cache.sock"


@pytest.mark.parametrize("count", COUNTS)
def test_a_mailbox_survives_hostile_clients(stack: ExitStack, count: int) -> None:
    ranks = TwoRanks(stack)
    numbers = itertools.count()
    before = resident_bytes()

    def good() -> None:
        sent = [next(numbers), torch.ones(20_000)]
        ranks.send(sent)
        key, received = ranks.items.get(timeout=SECONDS)  # type: ignore[misc]
        assert (key, received[0]) == (("key",), sent[0])
        assert torch.equal(received[1], sent[1])

    typed = [PREFIX.pack(CHANNEL, n) + encode([n, torch.ones(5)], ("key",))[0] for n in range(3)]
    attack(stack, ranks.sockets[0].address, count, ["rank 1"], typed, good)
    refusals = ranks.sockets[0].refusals
    # A client without a token is cut off, and loses what it has sent besides.
    wait_until(lambda: refusals.count > count // 50, "all clients have come and were refused")
    assert ranks.receiving.failures == {}
    assert resident_bytes() < 2 * before


@pytest.mark.parametrize("count", COUNTS)
def test_a_watch_survives_hostile_clients(stack: ExitStack, count: int) -> None:
    killed = threading.Event()
    hub = Watch.host(["rank 0", "rank 1"], deadline=SECONDS, grace=0.0, kill=killed.set)
    stack.callback(hub.close)
    invited = msgspec.msgpack.decode(hub.invitation, type=heartbeat.Invitation)
    member = Watch.join(1, hub.invitation, grace=0.0, kill=killed.set)
    stack.callback(member.close)
    before = resident_bytes()
    typed = [
        msgspec.msgpack.encode(heartbeat.WatchPayload(bytes(32), n, n, "false")) for n in (-1, 0, 1)
    ]

    def good() -> None:
        hub.check()
        member.check()
        assert not killed.is_set()

    kinds = [heartbeat.HEARTBEAT, heartbeat.ABORT, heartbeat.GOODBYE, heartbeat.CONFIRM]
    attack(stack, invited.address, count, kinds, typed, good)
    refusals = hub._endpoint.refusals
    wait_until(lambda: refusals.count > count // 4, "a quarter of the messages is refused")
    member.announce("a true alarm")
    assert hub.failed.wait(SECONDS)
    assert hub.failure is not None
    assert "a true alarm" in hub.failure.message
    assert resident_bytes() < 2 * before
