"""Workers go on when answers are late, lost or in another order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import torch
from torch import nn

from lightning_dlres.core.arrays import byte_array
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.message import Message
from lightning_dlres.core.wire.server import Server
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.worker.job import Job
from lightning_dlres.paramserver.execute.worker.session import WorkerSession
from lightning_dlres.paramserver.execute.worker.state.parameters import KeyedParameters
from tests.support.paramserver_training import adamw, model_keys

TIMEOUT = 30.0


class ScriptedServer:
    """Server in a thread, whose answers about keys a test decides.

    Args:
        on_key: Called with this server, a message, and key and number in it, for pushes, and pulls
            and commits of pushes.
    """

    def __init__(self, on_key: Callable[[ScriptedServer, Message, int, int], None]) -> None:
        self._on_key, self._server, self._closing = on_key, Server(), threading.Event()
        self.address = self._server.address
        self.model = nn.Linear(2, 2)
        self.keys = model_keys(self.model, 1)
        self._peer = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._server.interrupt()
        self._thread.join()
        self._server.close()

    def session(self, stack: ExitStack) -> WorkerSession:
        """Return the session of the only worker, which has joined."""
        job = Job(
            token=b"t" * 16,
            worker=0,
            workers=1,
            servers=[self.address],
            keys=self.keys,
            optimizers=[adamw(self.model)[0]],
            timeout=TIMEOUT,
            retry_seconds=0.1,
        )
        parameters = dict(nn.Linear(2, 2).named_parameters())
        session = WorkerSession(job, KeyedParameters(parameters))
        stack.callback(session.close)
        assert session.join() == 0
        return session

    def answer(self, kind: str, key: int, number: int, norm: float = 0.0) -> None:
        """Send an answer about a key."""
        reply = protocol.KeyReply(key=key, number=number, norm=norm)
        value = self.model.get_parameter(self.keys[key].name).detach()
        payload = byte_array(value).tobytes() if kind == protocol.VALUE else b""
        details = msgspec.msgpack.encode(reply)
        self._server.send(self._peer, kind, payload, sequence=0, details=details)

    def send_durable(self, number: int) -> None:
        """Tell the worker that all its pushes up to a number are safe."""
        versions = [
            protocol.KeyVersion(key=key.index, number=number, durable=number) for key in self.keys
        ]
        payload = msgspec.msgpack.encode(versions)
        self._server.send(self._peer, protocol.DURABLE, payload, sequence=0)

    def _run(self) -> None:
        while not self._closing.is_set():
            message = self._server.receive(1.0)
            if message is not None:
                self._peer = message.peer
                self._handle(message)

    def _handle(self, message: Message) -> None:
        if message.kind == protocol.HELLO:
            welcome = protocol.ServerWelcome(version=protocol.VERSION, boot=1, is_started=True)
            self._reply(message, protocol.WELCOME, welcome)
        elif message.kind == protocol.VERSIONS:
            versions = [
                protocol.KeyVersion(key=key.index, number=0, durable=0) for key in self.keys
            ]
            self._reply(message, protocol.VERSIONS, versions)
        elif message.kind == protocol.COMMIT:
            for key, number in from_msgpack(message.payload, list[tuple[int, int]]):
                self._on_key(self, message, key, number)
        elif message.kind in (protocol.PUSH, protocol.PULL):
            kind = protocol.Push if message.kind == protocol.PUSH else protocol.KeyRequest
            request = message.decode_details(kind)
            if request.number == 0:
                self.answer(protocol.VALUE, request.key, 0)
            else:
                self._on_key(self, message, request.key, request.number)

    def _reply(self, message: Message, kind: str, content: object) -> None:
        payload = msgspec.msgpack.encode(content)
        self._server.send(message.peer, kind, payload, sequence=message.sequence)


def push_all(server: ScriptedServer, session: WorkerSession) -> None:
    options = adamw(server.model)[1]
    for key in server.keys:
        shape = server.model.get_parameter(key.name).shape
        session.push(key.index, torch.ones(shape), options, is_held=True)


def test_a_late_answer_after_the_commit_does_not_end_the_queries(stack: ExitStack) -> None:
    def on_key(server: ScriptedServer, message: Message, key: int, number: int) -> None:
        if message.kind == protocol.PUSH:
            server.answer(protocol.MERGED, key, number)
        elif message.kind == protocol.COMMIT:
            # The value is lost, a snapshot is complete, and an old answer arrives.
            server.send_durable(number)
            server.answer(protocol.MERGED, key, number)
        else:
            server.answer(protocol.VALUE, key, number)

    server = ScriptedServer(on_key)
    stack.callback(server.close)
    session = server.session(stack)
    push_all(server, session)
    session.wait_merged()
    session.commit(1.0)
    session.wait()


def test_a_value_brings_the_norm_if_another_worker_has_committed(stack: ExitStack) -> None:
    def on_key(server: ScriptedServer, message: Message, key: int, number: int) -> None:
        if message.kind == protocol.COMMIT or key == 1:
            server.answer(protocol.VALUE, key, number, norm=16.0)
        else:
            server.answer(protocol.MERGED, key, number, norm=9.0)

    server = ScriptedServer(on_key)
    stack.callback(server.close)
    session = server.session(stack)
    push_all(server, session)
    assert session.wait_merged() == {0: 9.0, 1: 16.0}
    session.commit(1.0)
    session.wait()


def test_pushes_that_are_durable_before_they_are_sent_are_asked_for(stack: ExitStack) -> None:
    def on_key(server: ScriptedServer, message: Message, key: int, number: int) -> None:
        if message.kind == protocol.PULL:
            server.answer(protocol.VALUE, key, number)

    server = ScriptedServer(on_key)
    stack.callback(server.close)
    session = server.session(stack)
    with session.exchange.lock:
        push_all(server, session)
        for key in server.keys:
            session.exchange.log.note_durable(key.index, 1)
    session.wait()
