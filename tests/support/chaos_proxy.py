"""Proxy between ZeroMQ clients and one server that loses, repeats, delays and reorders messages."""

from __future__ import annotations

import heapq
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import zmq

# Longest wait for a message, in milliseconds.
_POLL_MS = 50
# Messages that wait for a server or a client that does not read; more are lost.
_QUEUED = 10_000


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """Probabilities of faults for each message.

    Attributes:
        drop: Loss.
        duplicate: A second copy, which is delayed.
        delay: Delay. Later messages overtake a delayed one.
        seconds: Longest delay.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    seconds: float = 0.0


class ChaosProxy:
    """Proxy in a thread. Clients connect to `address`, and reach the server under their own names.

    Args:
        target: Address of the server, which may end and come back.
        chaos: Faults of both directions.
        seed: Seed of the faults.

    Attributes:
        address: Address for clients.
        counts: Number of messages by what happened to them.
    """

    def __init__(self, target: str, chaos: Chaos, seed: int) -> None:
        self._target, self._chaos, self._random = target, chaos, random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._new_socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.counts: Counter[str] = Counter()
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._delayed: list[tuple[float, int, Callable[[], None]]] = []
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> ChaosProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, and lose all messages that are under way."""
        self._wake_writer.send(b"\0")
        self._thread.join()
        self._context.destroy(linger=0)
        self._wake_reader.close()
        self._wake_writer.close()

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        created = self._context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            created.setsockopt(option, _QUEUED)
        created.setsockopt(zmq.LINGER, 0)
        return created

    def _run(self) -> None:
        while True:
            wait = _POLL_MS
            if self._delayed:
                wait = max(0, min(wait, int(1000 * (self._delayed[0][0] - time.monotonic())) + 1))
            ready = dict(self._poller.poll(wait))
            if self._wake_reader.fileno() in ready:
                return
            if self._front in ready:
                self._from_client()
            for name, back in list(self._backs.items()):
                if back in ready:
                    frames = back.recv_multipart()
                    self._pass_on(self._front, [name, *frames])
            while self._delayed and self._delayed[0][0] <= time.monotonic():
                heapq.heappop(self._delayed)[2]()

    def _from_client(self) -> None:
        name, *frames = self._front.recv_multipart()
        if name not in self._backs:
            back = self._backs[name] = self._new_socket(zmq.DEALER)
            back.setsockopt(zmq.IDENTITY, name)
            # A server that was killed is back soon.
            back.setsockopt(zmq.RECONNECT_IVL, 20)
            back.connect(self._target)
            self._poller.register(back, zmq.POLLIN)
        self._pass_on(self._backs[name], frames)

    def _pass_on(self, to: zmq.Socket[bytes], frames: list[bytes]) -> None:
        self.counts["all"] += 1
        if self._random.random() < self._chaos.drop:
            self.counts["dropped"] += 1
            return
        if self._random.random() < self._chaos.duplicate:
            self.counts["duplicated"] += 1
            self._later(to, frames)
        if self._random.random() < self._chaos.delay:
            self.counts["delayed"] += 1
            self._later(to, frames)
        else:
            self._send(to, frames)

    def _later(self, to: zmq.Socket[bytes], frames: list[bytes]) -> None:
        due = time.monotonic() + self._random.uniform(0, self._chaos.seconds)
        order = self.counts["all"] + self.counts["duplicated"] + self.counts["delayed"]
        heapq.heappush(self._delayed, (due, order, lambda: self._send(to, frames)))

    def _send(self, to: zmq.Socket[bytes], frames: list[bytes]) -> None:
        try:
            to.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.counts["overflowed"] += 1
