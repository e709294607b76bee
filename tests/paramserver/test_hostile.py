"""Tests of a parameter server with hostile clients beside a good worker, without keys and with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import pytest
import torch
import zmq

from lightning_dlres.core.errors import PeerError, PeerTimeoutError
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.core.wire.message import pack
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from tests.support.hostile_clients import attack_with, malformed, resident_bytes
from tests.support.parameter_jobs import TOKEN, Worker, new_worker
from tests.support.waiting import wait_until

COUNTS = [
    pytest.param(600, id="some"),
    pytest.param(100_000, id="many", marks=pytest.mark.exhaustive),
]
KINDS = [
    protocol.HELLO,
    protocol.SETUP,
    protocol.LOAD,
    protocol.START,
    protocol.PUSH,
    protocol.PULL,
    protocol.COMMIT,
    protocol.STATE,
    protocol.VERSIONS,
    protocol.PING,
    protocol.SNAPSHOT,
    protocol.LEAVE,
    protocol.STATUS,
]
OTHER_TOKEN = bytes(16)
OPTIONS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}


def push_of(job: dict[str, Any], **changes: Any) -> protocol.Push:
    """Return the details of the first push of key 0."""
    fields: dict[str, Any] = {
        "key": 0,
        "number": 1,
        "options": msgspec.msgpack.encode(OPTIONS),
        "codec": "",
        "has_gradient": True,
        "is_held": False,
        "clip_value": 0.0,
    }
    return protocol.Push(**(job | fields | changes))


def requests(job: dict[str, Any], worker: Worker) -> list[tuple[str, msgspec.Struct, bytes]]:
    """Return kind, details and payload of valid requests of every kind but LEAVE."""
    setup = worker.session._joining._setup(0)
    key = worker.job.keys[0]
    request = protocol.Request(**job)
    number = worker.steps + 1
    at_key = protocol.KeyRequest(**job, key=0, number=number)
    content = protocol.ContentRequest(**job, key=0, number=number, numbers=[number])
    load = protocol.Load(**job, key=0, number=0, state="", dtype="float32", shape=key.shape)
    gradient = bytes(key.nbytes)
    small = worker.job.keys[-1]
    push = msgspec.msgpack.encode(push_of(job, key=small.index, number=number))
    riding = protocol.Rider(details=push, data=bytes(small.nbytes))
    commit = msgspec.msgpack.encode([(0, number)])
    return [
        (protocol.HELLO, protocol.Hello(**job, version=protocol.VERSION), b""),
        (protocol.SETUP, request, msgspec.msgpack.encode(setup)),
        (protocol.LOAD, load, gradient),
        (protocol.START, request, b""),
        (protocol.PUSH, push_of(job, number=number), gradient),
        (protocol.PUSH, push_of(job, number=number, has_gradient=False), b""),
        (protocol.PUSH, push_of(job, number=number, riders=[riding]), gradient),
        (protocol.PULL, at_key, b""),
        (protocol.COMMIT, protocol.Commit(**job, scale=0.5), commit),
        (protocol.STATE, content, b""),
        (protocol.CONTENT, content, b""),
        (protocol.VERSIONS, request, b""),
        (protocol.PING, request, b""),
        (protocol.SNAPSHOT, request, b""),
        (protocol.STATUS, request, b""),
    ]


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Return data with a changed bit, cut off, or repeated."""
    if not data or draw.randrange(3) == 0:
        return data[: draw.randrange(len(data) + 1)] * draw.randrange(3)
    changed = bytearray(data)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def hostile_frames(
    draw: random.Random, worker: Worker, count: int, *, own_name: bool
) -> Iterator[list[bytes]]:
    """Yield hostile messages.

    Args:
        draw: Generator of random numbers.
        worker: A good worker.
        count: Number of messages.
        own_name: True if the messages come under the name of the good worker. Those with its
            token are then replays.
    """
    incarnation = worker.session.exchange.incarnation
    own = {"job": TOKEN, "worker": 0, "incarnation": incarnation}
    foreign = [
        own | {"job": OTHER_TOKEN},
        own | {"job": OTHER_TOKEN, "incarnation": incarnation + 1},
        own | {"worker": 1},
        own | {"worker": (1 << 62)},
        own | {"incarnation": incarnation - 1},
        own | {"incarnation": incarnation + 1},
        own | {"incarnation": 1 << 62},
    ]
    random_frames = malformed(draw, KINDS, [msgspec.msgpack.encode([TOKEN, 0, incarnation])])
    sequences = itertools.count()
    for _ in range(count):
        choice = draw.randrange(4)
        if choice == 0:
            yield next(random_frames)
            continue
        job = own if choice == 1 else draw.choice(foreign)
        kind, details, payload = draw.choice(requests(job, worker))
        encoded = msgspec.msgpack.encode(details)
        if own_name and job["job"] == TOKEN:
            # Nothing but their numbers tells these messages from those of the worker.
            if job is not own:
                continue
            if isinstance(details, protocol.Push):
                sent = msgspec.structs.replace(details, number=max(worker.steps, 1))
                encoded = msgspec.msgpack.encode(sent)
            elif kind == protocol.COMMIT:
                payload = msgspec.msgpack.encode([(0, max(worker.steps, 1))])
        elif draw.randrange(3) == 0:
            encoded = damaged(draw, encoded)
        elif draw.randrange(3) == 0:
            payload = damaged(draw, payload)
        yield [bytes(one) for one in pack(kind, next(sequences), payload, details=encoded)]


def undisturbed(steps: int) -> dict[str, torch.Tensor]:
    """Return the parameters after so many steps without any other client."""
    with ParameterServer() as server:
        worker = new_worker([server.address])
        worker.session.start()
        worker.session.join()
        for _ in range(steps):
            worker.step()
        worker.session.leave()
    return worker.parameters


def joined(stack: ExitStack, server: ParameterServer, **options: Any) -> Worker:
    worker = new_worker([server.address], **options)
    stack.callback(worker.session.close)
    worker.session.start()
    worker.session.join()
    return worker


def client_of(
    stack: ExitStack, server: ParameterServer, name: str = "hostile", **options: Any
) -> Client:
    client = Client(name, server.address, **options)
    stack.callback(client.close)
    return client


@pytest.mark.parametrize("count", COUNTS)
def test_a_server_survives_hostile_clients_beside_a_good_worker(
    stack: ExitStack, count: int
) -> None:
    server = stack.enter_context(ParameterServer())
    worker = joined(stack, server, retry_seconds=0.2)
    before = resident_bytes()
    messages = hostile_frames(random.Random(count), worker, count, own_name=False)
    attack_with(stack, server.address, messages, worker.step)
    wait_until(lambda: server.refused > count // 4, "a quarter of the messages is refused")
    worker.step()
    assert server._thread.is_alive()
    assert resident_bytes() < 2 * before
    check_values(worker)
    worker.session.leave()


def check_values(worker: Worker) -> None:
    """Assert that a worker has what it would have without other clients, bit by bit."""
    expected = undisturbed(worker.steps)
    for key, own in worker.parameters.items():
        assert torch.equal(own, expected[key]), key


def test_a_worker_whose_name_is_taken_and_messages_replayed_goes_on(stack: ExitStack) -> None:
    server = stack.enter_context(ParameterServer())
    worker = joined(stack, server, retry_seconds=0.2, timeout=8.0)
    name = protocol.worker_name(0, worker.session.exchange.incarnation)
    for seed in range(3):
        worker.step()
        # Another client takes the name while the worker waits, and sends what the worker has sent.
        thief = client_of(stack, server, name)
        for frames in hostile_frames(random.Random(seed), worker, 60, own_name=True):
            thief._socket.send_multipart(frames)
        worker.step()
    check_values(worker)
    worker.session.leave()


BAD_SETUPS: dict[str, Callable[[dict[str, Any]], object]] = {
    "huge": lambda s: s["keys"][0].update(shape=[1 << 50], count=1 << 50, nbytes=1 << 52),
    "huge product": lambda s: s["keys"][0].update(shape=[0, 1 << 62, 1 << 62], count=0, nbytes=0),
    "beyond 64 bits": lambda s: s["keys"][0].update(shape=[0, 1 << 63], count=0, nbytes=0),
    "many dimensions": lambda s: s["keys"][0].update(shape=[1] * 5000, count=1, nbytes=4),
    "negative": lambda s: s["keys"][0].update(shape=[-1, -1], count=1, nbytes=4),
    "wrong bytes": lambda s: s["keys"][0].update(nbytes=3),
    "tiny floats": lambda s: s["keys"][0].update(dtype="float8_e8m0fnu", nbytes=5000),
    "integers": lambda s: s["keys"][0].update(dtype="int32"),
    "a module": lambda s: s["keys"][0].update(dtype="_dynamo"),
    "a function": lambda s: s["keys"][0].update(dtype="zeros"),
    "no dtype": lambda s: s["keys"][0].update(dtype=""),
    "two indices": lambda s: s["keys"][0].update(index=1),
    "negative index": lambda s: s["keys"][0].update(index=-1),
    "optimizer index": lambda s: s["keys"][0].update(optimizer=7),
    "group index": lambda s: s["keys"][0].update(group=-1),
    "no optimizer": lambda s: s.update(optimizers=[]),
    "many optimizers": lambda s: s.update(optimizers=s["optimizers"] * 1000),
    "a program": lambda s: s["optimizers"][0].update(name="os:system"),
    "NaN": lambda s: s["optimizers"][0]["groups"][0].update(lr=float("nan")),
    "negative option": lambda s: s["optimizers"][0]["groups"][0].update(lr=-1.0),
    "text": lambda s: s["optimizers"][0]["groups"][0].update(lr="1"),
    "list": lambda s: s["optimizers"][0]["groups"][0].update(lr=[[[]]]),
    "parameters": lambda s: s["optimizers"][0]["groups"][0].update(params=[1]),
    "capturable": lambda s: s["optimizers"][0]["groups"][0].update(differentiable=True),
    "consistency": lambda s: s.update(consistency="none"),
    "no workers": lambda s: s.update(workers=0),
    "many workers": lambda s: s.update(workers=1 << 40),
    "endless deadline": lambda s: s.update(worker_deadline=float("inf")),
    "no deadline": lambda s: s.update(worker_deadline=float("nan")),
    "codec": lambda s: s.update(codec="os:system"),
    "lossless codec": lambda s: s.update(codec="zvc"),
    "codec option": lambda s: s.update(codec="dgc", codec_options={"ratio": "1"}),
    "codec options": lambda s: s.update(codec="dgc", codec_options={"a b": 1}),
    "other job": lambda s: s.update(job=OTHER_TOKEN),
}


@pytest.mark.parametrize("change", BAD_SETUPS)
def test_a_hostile_description_of_a_job_is_refused(stack: ExitStack, change: str) -> None:
    server = stack.enter_context(ParameterServer())
    worker = new_worker([server.address])
    stack.callback(worker.session.close)
    setup: Any = msgspec.to_builtins(worker.session._joining._setup(0), builtin_types=(bytes,))
    BAD_SETUPS[change](setup)
    client = client_of(stack, server)
    details = msgspec.msgpack.encode(worker.session.exchange.request())
    client.send(protocol.SETUP, msgspec.msgpack.encode(setup), details=details)
    assert client.expect(20, "an answer").kind == protocol.FAILED
    assert server.refused == 1
    # The server is free for a good worker.
    worker.session.start()
    worker.session.join()
    worker.step()
    assert torch.equal(worker.parameters["bias"], undisturbed(1)["bias"])


BAD_LOADS: dict[str, tuple[dict[str, Any], bytes]] = {
    "short": ({"state": ""}, b"123"),
    "of no key": ({"state": "", "key": 99}, b""),
    "unknown state": ({"state": "params"}, bytes(8)),
    "other shape": ({"state": "momentum_buffer", "shape": (2,)}, bytes(8)),
    "no tensor": ({"state": "momentum_buffer", "dtype": "", "shape": ()}, b"\x01"),
    "text": ({"state": "momentum_buffer", "dtype": "", "shape": ()}, b"\xa1x"),
    "of no dtype": (
        {"state": "momentum_buffer", "dtype": "float8_e8m0fnu", "shape": (8,)},
        b"8" * 8,
    ),
    "of a module": ({"state": "momentum_buffer", "dtype": "_dynamo", "shape": (8,)}, bytes(8)),
    "negative": ({"state": "momentum_buffer", "shape": (-1, -2)}, bytes(8)),
    "huge": ({"state": "momentum_buffer", "shape": (0, 1 << 63)}, b""),
    "long": ({"state": "momentum_buffer", "shape": (0,) + (1,) * 5000}, b""),
}
BAD_PUSHES: dict[str, dict[str, Any]] = {
    "malformed options": {"options": b"\xc1"},
    "no options": {"options": b""},
    "a list of options": {"options": b"\x90"},
    "a number as name": {"options": msgspec.msgpack.encode({1: 2})},
    "unknown": {"options": msgspec.msgpack.encode({"os": 1})},
    "parameters": {"options": msgspec.msgpack.encode({"params": []})},
    "text": {"options": msgspec.msgpack.encode({"lr": "0.1"})},
    "nothing": {"options": msgspec.msgpack.encode({"lr": None})},
    "true": {"options": msgspec.msgpack.encode({"lr": True})},
    "a list": {"options": msgspec.msgpack.encode({"lr": [0.1]})},
    "NaN": {"options": msgspec.msgpack.encode({"lr": float("nan")})},
    "negative": {"options": msgspec.msgpack.encode({"momentum": -1})},
    "too large": {"options": msgspec.msgpack.encode({"weight_decay": 1e300})},
    "contradictory": {"options": msgspec.msgpack.encode({"fused": True, "foreach": True})},
    "codec": {"codec": "dgc"},
    "clip value": {"clip_value": float("nan")},
    "large clip value": {"clip_value": 1e300},
    "base": {"base": 5},
    "key": {"key": 1 << 40},
}


@pytest.mark.parametrize("bad", BAD_LOADS)
def test_a_wrong_load_fails_the_worker_only(stack: ExitStack, bad: str) -> None:
    server = stack.enter_context(ParameterServer())
    worker = new_worker([server.address])
    stack.callback(worker.session.close)
    joining = worker.session._joining
    load_part, changed = joining._load_part, BAD_LOADS[bad]

    def bad_load(link: Any, key: int, name: str, value: Any) -> Any:
        if key:
            return load_part(link, key, name, value)
        request = worker.session.exchange.request()
        fields = {"key": 0, "number": 0, "dtype": "float32", "shape": ()} | changed[0]
        load = protocol.Load(job=TOKEN, worker=0, incarnation=request.incarnation, **fields)
        return link.request(protocol.LOAD, load, changed[1])

    stack.enter_context(pytest.MonkeyPatch.context()).setattr(joining, "_load_part", bad_load)
    with pytest.raises(PeerError, match="refused"):
        worker.session.start()
    later = new_worker([server.address])
    stack.callback(later.session.close)
    later.session.start()
    later.session.join()
    later.step()
    assert torch.equal(later.parameters["matrix"], undisturbed(1)["matrix"])


@pytest.mark.parametrize("bad", BAD_PUSHES)
def test_a_wrong_push_is_refused_before_it_changes_anything(stack: ExitStack, bad: str) -> None:
    server = stack.enter_context(ParameterServer())
    worker = joined(stack, server)
    worker.step()
    exchange = worker.session.exchange
    job = {"job": TOKEN, "worker": 0, "incarnation": exchange.incarnation}
    worker.session.close()
    name = protocol.worker_name(0, exchange.incarnation)
    client = client_of(stack, server, name)
    push = push_of(job, **({"number": 2} | BAD_PUSHES[bad]))
    client.send(
        protocol.PUSH, bytes(worker.job.keys[0].nbytes), details=msgspec.msgpack.encode(push)
    )
    assert client.expect(20, "an answer").kind == protocol.FAILED
    # A later process of the worker goes on from the first step.
    steps = worker.steps
    worker = new_worker([server.address])
    stack.callback(worker.session.close)
    assert worker.session.join() == steps
    worker.steps = steps
    worker.step()
    assert torch.equal(worker.parameters["matrix"], undisturbed(2)["matrix"])


@pytest.mark.parametrize(
    ("scale", "payload"),
    [
        (float("inf"), [(0, 1)]),
        (-1.0, [(0, 1)]),
        (1.0, [(99, 1)]),
        (1.0, [(0, 1)] * 10_000),
        (1.0, [(0, -1)]),
        (1.0, ["x"]),
        (1.0, None),
    ],
    ids=str,
)
def test_a_nonsensical_commit_is_refused(stack: ExitStack, scale: float, payload: object) -> None:
    server = stack.enter_context(ParameterServer())
    worker = joined(stack, server)
    incarnation = worker.session.exchange.incarnation
    worker.session.close()
    client = client_of(stack, server, protocol.worker_name(0, incarnation))
    commit = protocol.Commit(job=TOKEN, worker=0, incarnation=incarnation, scale=scale)
    client.send(
        protocol.COMMIT,
        msgspec.msgpack.encode(payload),
        details=msgspec.msgpack.encode(commit),
    )
    assert client.expect(20, "an answer").kind == protocol.FAILED
    assert server._thread.is_alive()


@pytest.mark.parametrize("codec", ["dgc", "graddrop", "onebit", "tbq", "fp16", "int8", "qsgd"])
def test_a_payload_of_nonsense_changes_only_values(stack: ExitStack, codec: str) -> None:
    from lightning_dlres.paramserver.gradient_codecs import job_codec

    server = stack.enter_context(ParameterServer())
    made = job_codec(codec, {})
    assert made is not None
    worker = joined(stack, server, codec=made)
    incarnation = worker.session.exchange.incarnation
    worker.session.close()
    client = client_of(stack, server, protocol.worker_name(0, incarnation))
    job = {"job": TOKEN, "worker": 0, "incarnation": incarnation}
    key, draw = worker.job.keys[0], random.Random(0)
    assert key.nbytes >= 16 << 10
    number = 1
    for payload in (b"\x7f", b"\xff", b"\x80", b""):
        nbytes = made.payload_bytes(key.count)
        data = (payload * nbytes)[:nbytes] or draw.randbytes(nbytes)
        push = push_of(job, number=number, codec=codec)
        client.send(protocol.PUSH, data, details=msgspec.msgpack.encode(push))
        answer = client.expect(20, "an answer")
        assert answer.kind in (protocol.FAILED, protocol.VALUE)
        number += answer.kind == protocol.VALUE
    assert server._thread.is_alive()


def test_an_unknown_key_gets_no_answer_and_a_known_one_does(stack: ExitStack) -> None:
    keys, known, unknown = (CurveKeys.generate() for _ in range(3))
    server = stack.enter_context(ParameterServer(curve=keys, allowed=[known.public]))
    for curve in (unknown, None):
        options = {"curve": curve, "server_key": keys.public} if curve else {}
        client = client_of(stack, server, "hostile", **options)
        # ZeroMQ gives a refused connection up. If it is refused before the send, that fails.
        with suppress(PeerTimeoutError):
            client.send(protocol.STATUS)
        assert client.receive(1.0) is None
    bare: zmq.Socket[bytes] = stack.enter_context(zmq.Context()).socket(zmq.DEALER)
    bare.connect(server.address)
    bare.send_multipart([bytes(one) for one in pack(protocol.STATUS, 0, b"")])
    assert not bare.poll(500)
    bare.close(linger=0)
    worker = joined(stack, server, curve=known, server_keys=[keys.public])
    worker.step()
    assert torch.equal(worker.parameters["bias"], undisturbed(1)["bias"])


def test_a_wrong_key_of_the_server_ends_with_a_hint(stack: ExitStack) -> None:
    keys, known, other = (CurveKeys.generate() for _ in range(3))
    server = stack.enter_context(ParameterServer(curve=keys, allowed=[known.public]))
    worker = new_worker(
        [server.address], curve=known, server_keys=[other.public], timeout=1.0, retry_seconds=0.2
    )
    stack.callback(worker.session.close)
    with pytest.raises(PeerTimeoutError, match="keys match"):
        worker.session.start()
