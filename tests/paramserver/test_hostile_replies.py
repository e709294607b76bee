"""Tests of a worker whose server's replies are damaged, made up, or missing.

The worker goes on, or ends with an error within its deadline. It never takes wrong values.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch
import zmq

from lightning_dlres.core.errors import PeerError
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.message import MessageHeader, pack
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from lightning_dlres.paramserver.execute.worker.session import norm_scale
from tests.support.parameter_jobs import Worker, new_worker

# Frames that are sent in the place of a reply, or beside it.
Garble = Callable[[list[bytes]], list[list[bytes]]]
STEPS = 5
SEEDS = [*range(3), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(3, 40))]


class Proxy:
    """A server's address for one worker, whose replies a function changes.

    Args:
        address: Address of the true server.
        garble: See `Garble`.

    Attributes:
        address: Address for the worker.
    """

    def __init__(self, address: str, garble: Garble) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind("tcp://127.0.0.1:*")
        self.address = self._front.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._true_address, self._garble = address, garble
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        back: zmq.Socket[bytes] | None = None
        poller, name = zmq.Poller(), b""
        poller.register(self._front, zmq.POLLIN)
        while not self._stopped.is_set():
            ready = dict(poller.poll(20))
            if self._front in ready:
                name, *frames = self._front.recv_multipart()
                if back is None:
                    back = self._context.socket(zmq.DEALER)
                    back.setsockopt(zmq.IDENTITY, name)
                    back.connect(self._true_address)
                    poller.register(back, zmq.POLLIN)
                back.send_multipart(frames)
            if back is not None and back in ready:
                for frames in self._garble(back.recv_multipart()):
                    self._front.send_multipart([name, *frames])


@pytest.fixture
def new_worker_behind(stack: ExitStack) -> Callable[..., Worker]:
    """Return a function that returns a worker whose replies are garbled."""

    def make(garble: Garble, **options: Any) -> Worker:
        server = stack.enter_context(ParameterServer())
        proxy = Proxy(server.address, garble)
        stack.callback(proxy.close)
        arguments: dict[str, Any] = {"retry_seconds": 0.1, "timeout": 30.0} | options
        worker = new_worker([proxy.address], **arguments)
        stack.callback(worker.session.close)
        return worker

    return make


def train(worker: Worker) -> None:
    worker.session.start()
    worker.session.join()
    for _ in range(STEPS):
        worker.step()


def check_values(worker: Worker) -> None:
    with ParameterServer() as server:
        plain = new_worker([server.address])
        train(plain)
        plain.session.leave()
    for key, own in worker.parameters.items():
        assert torch.equal(own, plain.parameters[key]), key


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_and_missing_replies_are_asked_for_again(
    new_worker_behind: Callable[..., Worker], seed: int
) -> None:
    draw = random.Random(seed)

    def garble(frames: list[bytes]) -> list[list[bytes]]:
        choice = draw.randrange(8)
        if choice == 0:
            return []
        if choice == 1:
            return [frames, frames]
        if choice == 2:
            return [[draw.randbytes(draw.randrange(30)) for _ in range(draw.randrange(1, 5))]]
        if choice == 3:
            part = draw.randrange(2)
            changed = bytearray(frames[part] or b"x")
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            changed = bytearray(b"\xc1") if part == 0 and draw.randrange(2) else changed
            if part == 0 and not_a_header(bytes(changed)):
                return [[bytes(changed), frames[1]]]
            return [[frames[0], bytes(changed)]] if part else []
        if choice == 4:
            return [[frames[0], frames[1][:-1]], [*frames, b""]]
        return [frames]

    worker = new_worker_behind(garble)
    train(worker)
    check_values(worker)


def not_a_header(data: bytes) -> bool:
    try:
        from_msgpack(data, MessageHeader)
    except msgspec.MsgspecError:
        return True
    return False


HUGE = 1 << 62


def reply(kind: str, sequence: int = 0, payload: bytes = b"", **fields: Any) -> list[bytes]:
    """Return the frames of a reply that is intact; `fields` are those of `KeyReply`."""
    details = msgspec.msgpack.encode(protocol.KeyReply(**fields)) if fields else b""
    return [bytes(one) for one in pack(kind, sequence, payload, details=details)]


def riders(key: int) -> list[protocol.Rider]:
    """Return a rider with a few bytes for a key."""
    details = protocol.KeyReply(key=key, number=HUGE)
    return [protocol.Rider(details=msgspec.msgpack.encode(details), data=b"123")]


def versions(*rows: tuple[int, int, int]) -> bytes:
    return msgspec.msgpack.encode(rows)


MADE_UP: dict[str, list[bytes]] = {
    "no details": reply(protocol.VALUE),
    "unknown key": reply(protocol.VALUE, key=99, number=1),
    "short value": reply(protocol.VALUE, payload=b"123", key=0, number=HUGE),
    "old value": reply(protocol.VALUE, payload=b"\1" * 16384, key=0, number=0),
    "rider of no key": reply(
        protocol.VALUE, payload=b"\1" * 16384, key=0, number=0, riders=riders(99)
    ),
    "short rider": reply(protocol.VALUE, payload=b"\1" * 16384, key=0, number=0, riders=riders(1)),
    "malformed rider": reply(
        protocol.VALUE,
        payload=b"\1" * 16384,
        key=0,
        number=0,
        riders=[protocol.Rider(details=b"\xc1", data=b"")],
    ),
    "merged": reply(protocol.MERGED, key=0, number=1),
    "negative norm": reply(protocol.MERGED, key=0, number=1, norm=-1.0),
    "merged of no key": reply(protocol.MERGED, key=HUGE, number=1),
    "waiting": reply(protocol.WAITING, key=0, number=1, workers=list(range(5000))),
    "behind": reply(protocol.BEHIND, key=0, number=0),
    "far behind": reply(protocol.BEHIND, key=1, number=HUGE),
    "durable": reply(protocol.BEHIND, key=1, number=0, durable=HUGE),
    "all durable": reply(protocol.DURABLE, payload=versions((0, HUGE, HUGE), (1, HUGE, HUGE))),
    "durable of no key": reply(protocol.DURABLE, payload=versions((99, 1, 1))),
    "no list": reply(protocol.DURABLE, payload=b"\x01"),
    "fenced": reply(protocol.FENCED),
    "failed": reply(protocol.FAILED, payload=b"\xff\xfe" * 100_000),
    "unknown job": reply(protocol.UNKNOWN_JOB),
    "unknown kind": reply("\x1b[2J"),
    "done": reply(protocol.DONE),
    "answers": reply(protocol.VERSIONS, 1 << 32, versions((99, 1, 1))),
    "no answers": reply(protocol.WELCOME, (1 << 32) + 1, b"\xc1"),
}
# Kinds of answers to requests, and payloads for them that do not fit.
ANSWERS: dict[str, tuple[str, bytes]] = {
    "welcome": (protocol.WELCOME, b"\x01"),
    "empty welcome": (protocol.WELCOME, b""),
    "versions of no key": (protocol.VERSIONS, versions((99, 1, 1))),
    "large versions": (protocol.VERSIONS, versions((0, HUGE, HUGE), (1, HUGE, HUGE))),
    "unlike versions": (protocol.VERSIONS, versions((0, 0, 0), (1, 9, 9))),
    "no versions": (protocol.VERSIONS, b"\x90"),
    "text": (protocol.VERSIONS, b"\xa1x"),
}


def ends(worker: Worker, run: Callable[[Worker], None]) -> None:
    """Assert that a worker goes on to the right values, or ends with a `PeerError`."""
    outcome: list[BaseException | None] = []

    def guarded() -> None:
        try:
            run(worker)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(60)
    assert outcome, "the worker hangs"
    if outcome[0] is None:
        check_values(worker)
    else:
        assert isinstance(outcome[0], PeerError), repr(outcome[0])
        assert len(str(outcome[0])) < 5000


@pytest.mark.parametrize("made_up", MADE_UP)
def test_a_made_up_reply_is_ignored_or_ends_the_worker(
    new_worker_behind: Callable[..., Worker], made_up: str
) -> None:
    ends(new_worker_behind(lambda frames: [MADE_UP[made_up], frames], timeout=2.0), train)


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_wrong_answer_ends_the_worker(
    new_worker_behind: Callable[..., Worker], answer: str
) -> None:
    kind, payload = ANSWERS[answer]

    def garble(frames: list[bytes]) -> list[list[bytes]]:
        header = msgspec.msgpack.decode(frames[0], type=MessageHeader)
        return [reply(kind, header.sequence, payload) if header.kind == kind else frames]

    ends(new_worker_behind(garble, timeout=2.0), train)


def test_a_server_that_merges_forever_does_not_prolong_the_wait(
    new_worker_behind: Callable[..., Worker],
) -> None:
    def garble(frames: list[bytes]) -> list[list[bytes]]:
        header = msgspec.msgpack.decode(frames[0], type=MessageHeader)
        is_pong = header.kind == protocol.ALIVE
        if header.kind != protocol.VALUE and not is_pong:
            return [frames]
        one = (
            msgspec.msgpack.decode(header.details, type=protocol.KeyReply) if not is_pong else None
        )
        if one is not None and one.number == 0:
            return [frames]
        return [reply(protocol.MERGED, key=key, number=1) for key in (0, 0, 1)]

    ends(new_worker_behind(garble, timeout=2.0), train)


def test_norms_of_any_size_give_a_factor() -> None:
    assert norm_scale({0: 1e308, 1: 1e308}, 1.0) == 0.0
    assert norm_scale({0: 9.0, 1: 16.0}, 1.0) == pytest.approx(0.2)
    assert math.isnan(norm_scale({0: 9.0, 1: math.nan}, 1.0))
