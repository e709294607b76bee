"""Small keys travel in the messages of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.message import Message
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.riders import (
    MessageRoom,
    push_details,
    pushes_with_riders,
    rider,
)
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from lightning_dlres.paramserver.execute.worker.connection.link import ServerLink
from lightning_dlres.paramserver.execute.worker.connection.push_window import PushQueue
from lightning_dlres.paramserver.execute.worker.state.push_log import LogEntry
from tests.support.parameter_jobs import TOKEN, Worker, new_worker

LARGE = 32 << 10
_SECONDS = 30.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def push(**changes: Any) -> protocol.Push:
    fields: dict[str, Any] = {
        "job": TOKEN,
        "worker": 0,
        "incarnation": 5,
        "key": 0,
        "number": 1,
        "options": b"",
        "codec": "",
        "has_gradient": True,
        "is_held": False,
        "clip_value": 0.0,
    }
    return protocol.Push(**(fields | changes))


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 17)), max_size=200))
def test_a_message_has_one_large_payload_and_few_bytes_of_small_ones(
    keys: list[tuple[int, int]],
) -> None:
    room = MessageRoom()
    taken = [key for key in keys if room.take(*key)]
    assert taken[:1] == keys[:1]
    assert len(taken) <= protocol.MOST_RIDERS + 1
    # The largest payload has a frame of its own. All else fits into the details of a message.
    payloads = sum(payload for payload, _ in taken) - max((one for one, _ in taken), default=0)
    assert len(taken) < 2 or payloads + sum(details for _, details in taken) <= LARGE


def test_pushes_in_a_row_leave_together() -> None:
    queue = PushQueue()
    sizes = [8, 4, LARGE, 4, 8, LARGE, 8]
    for order, size in enumerate(sizes):
        queue.add(LogEntry(order, 1, b"", memoryview(bytes(size)), -1.0, order, 0, size))
    popped = []
    while queue:
        popped.append([entry.key for entry in queue.pop()])
    assert popped == [[0, 1, 2, 3, 4], [5, 6]]


def test_pushes_of_one_key_leave_in_their_order() -> None:
    queue, sizes = PushQueue(), [0, LARGE, 8]
    for order, size in enumerate(sizes):
        entry = LogEntry(order % 2, 1 + order, b"", memoryview(bytes(size)), -1.0, order, 0, size)
        queue.add(entry)
    assert [[entry.number for entry in queue.pop()] for _ in range(2)] == [[1, 2], [3]]


def test_pushes_of_a_predecessor_go_out_as_those_of_this_process() -> None:
    old, other = (msgspec.msgpack.encode(push(key=key)) for key in (0, 1))
    assert push_details(old, (), 5) == old
    details = push_details(old, [(other, memoryview(b"abcd"))], 7)
    message = msgspec.msgpack.decode(details, type=protocol.Push)
    pushes = pushes_with_riders(message, memoryview(b"payload"))
    assert [(own.key, own.incarnation, bytes(data)) for own, data in pushes] == [
        (0, 7, b"payload"),
        (1, 7, b"abcd"),
    ]


FOREIGN: dict[str, Any] = {
    "job": {"job": bytes(16)},
    "worker": {"worker": 1},
    "incarnation": {"incarnation": 6},
    "riders": {"riders": [protocol.Rider(details=b"", data=b"")]},
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_rider_is_of_its_sender(case: str) -> None:
    details = msgspec.msgpack.encode(push(key=1, **FOREIGN[case]))
    carrier = push(riders=[rider(details, memoryview(b""))])
    with pytest.raises(ProtocolError, match="worker 0 sent a rider that is not one of its own"):
        pushes_with_riders(carrier, memoryview(b""))


def shapes() -> dict[str, tuple[int, ...]]:
    """Return shapes of small and large parameters, and of one without elements."""
    small = {f"bias {index}": (64,) for index in range(20)}
    return {**small, "matrix": (64, 64), "empty": (0, 3), "number": (), "last": (64, 65)}


def joined(stack: ExitStack, *, worker: int = 0, workers: int = 1, address: str) -> Worker:
    made = new_worker([address], shapes(), worker=worker, workers=workers)
    stack.callback(made.session.close)
    if worker == 0:
        made.session.start()
    return made


def trained_alone(steps: int, workers: int) -> dict[str, torch.Tensor]:
    """Return the parameters after steps of plain training with the mean gradients."""
    with ExitStack() as stack:
        server = stack.enter_context(ParameterServer())
        made = joined(stack, address=server.address)
        plain = {name: nn.Parameter(value.clone()) for name, value in made.parameters.items()}
    optimizer = torch.optim.SGD(plain.values(), lr=0.01, momentum=0.9)
    for step in range(steps):
        sums = {name: torch.zeros_like(one) for name, one in plain.items()}
        for worker in range(workers):
            generator = torch.Generator().manual_seed(1000 * step + worker)
            for name, one in plain.items():
                sums[name] += torch.randn(one.shape, generator=generator)
        for name, one in plain.items():
            one.grad = sums[name] / workers
        optimizer.step()
    return {name: one.detach() for name, one in plain.items()}


def test_small_keys_take_few_messages(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: Counter[str] = Counter()
    handle_request, handle_answer = ParameterServer._handle, ServerLink._handle

    def count_request(server: ParameterServer, message: Message) -> None:
        kinds[message.kind] += 1
        handle_request(server, message)

    def count_answer(link: ServerLink, message: Message, now: float) -> None:
        kinds[message.kind] += 1
        handle_answer(link, message, now)

    monkeypatch.setattr(ParameterServer, "_handle", count_request)
    monkeypatch.setattr(ServerLink, "_handle", count_answer)
    server = stack.enter_context(ParameterServer())
    workers = [joined(stack, worker=index, workers=2, address=server.address) for index in range(2)]
    for worker in workers:
        worker.session.join()
    kinds.clear()
    for _ in range(3):
        for worker in workers:
            # The link sends when all pushes wait: no message leaves with the first one alone.
            with worker.session.exchange.lock:
                worker.push()
        for worker in workers:
            worker.land()
    expected = trained_alone(3, 2)
    for worker in workers:
        for name, value in worker.parameters.items():
            assert torch.equal(value, expected[name]), name
    # Of 24 keys, two are large.
    assert kinds[protocol.PUSH] == 3 * 2 * 2
    assert kinds[protocol.VALUE] <= 3 * 2 * 4


def test_a_bad_rider_is_refused_before_anything_changes(stack: ExitStack) -> None:
    server = stack.enter_context(ParameterServer())
    worker = joined(stack, address=server.address)
    worker.session.join()
    worker.step()
    incarnation = worker.session.exchange.incarnation
    worker.session.close()
    client = Client(protocol.worker_name(0, incarnation), server.address)
    stack.callback(client.close)
    own = {"incarnation": incarnation, "number": 2, "options": worker.options}
    keys = worker.job.keys
    for details in (b"\xc1", msgspec.msgpack.encode(push(**own | {"worker": 1, "key": 1}))):
        carrier = push(**own, riders=[rider(details, memoryview(bytes(keys[1].nbytes)))])
        client.send(protocol.PUSH, bytes(keys[0].nbytes), details=msgspec.msgpack.encode(carrier))
        assert client.expect(_SECONDS, "an answer").kind == protocol.FAILED
    later = joined(stack, address=server.address)
    assert later.session.join() == 1
    later.steps = 1
    later.step()
    expected = trained_alone(2, 1)
    for name, value in later.parameters.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("is_rider", [False, True])
def test_a_server_releases_no_push_to_another_one(stack: ExitStack, is_rider: bool) -> None:
    servers = [stack.enter_context(ParameterServer()) for _ in range(2)]
    worker = new_worker([server.address for server in servers], shapes())
    stack.callback(worker.session.close)
    worker.session.start()
    worker.session.join()
    own, foreign = (
        next(key.index for key in worker.job.keys if key.server == server) for server in (0, 1)
    )
    reply = protocol.KeyReply(key=foreign, number=1, durable=1 << 62)
    if is_rider:
        details = msgspec.msgpack.encode(reply)
        reply = protocol.KeyReply(key=own, number=0, riders=[rider(details, memoryview(b""))])
    encoded = msgspec.msgpack.encode(reply)
    message = Message(protocol.VALUE, 0, b"", "server 0", 0, encoded)
    exchange = worker.session.exchange
    with exchange.lock:
        worker.push()
        with pytest.raises(ProtocolError, match="which is not one of its own"):
            worker.session._links[0]._handle(message, 0.0)
        assert exchange.log.get(foreign, 1) is not None
    worker.land()
