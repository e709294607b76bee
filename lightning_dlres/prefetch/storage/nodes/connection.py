"""The thread that talks to one storage node: sends what is asked, and says of every try how it
ended, be it that the node is silent, gone, or sends nonsense.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_dlres.core.errors import PeerError, ProtocolError
from lightning_dlres.core.host.service import start_service
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.client import Client
from lightning_dlres.core.wire.frames import Message
from lightning_dlres.prefetch.storage.nodes import protocol

Wrong = Callable[[protocol.Welcome], str | None]
_LONGEST_WAIT = 1.0
# So long one that was silent is asked only where nobody else can be; unless it answers late.
_DOUBT = 10.0


@dataclass(frozen=True)
class RequestFailure:
    """Why there is no reply; `is_final`: the node will not have the samples at another try."""

    text: str
    is_final: bool = False


Outcome = Message | RequestFailure


@dataclass(eq=False)
class RequestAttempt:
    """One try of a request: not before `start`, given up at `until` (seconds of `monotonic`)."""

    payload: bytes
    start: float
    until: float
    context: tuple[object, int]
    sent: float = field(default=0.0, init=False)


class NodeConnection:
    """A connection to a node.

    Args:
        client: handed over: only this thread uses it from now on.
        name: of the node, for errors.
        settled: called in this thread with every order and how it ended.
        reachable: whether the node is known to be.
        wrong: what is wrong with a node that says this of itself, None where nothing is. Every
            connection begins with that: behind an address may be another node than before.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        settled: Callable[[RequestAttempt, Outcome], None],
        reachable: bool,
        wrong: Wrong,
    ) -> None:
        self._reachable, self._doubted_until = reachable, 0.0
        self._wrong = wrong
        # Of this connection: the greeting that was not answered yet, and whether, and how, it was.
        self._greeting, self._is_greeted = -1, False
        self._refusal: RequestFailure | None = None
        self._client, self._name, self._settled = client, name, settled
        self._new: deque[RequestAttempt] = deque()
        self._waiting: list[RequestAttempt] = []
        self._sent: dict[int, RequestAttempt] = {}
        self._closing = threading.Event()
        self._thread = start_service(self._run, f"dlres {name}")

    @property
    def answers(self) -> bool:
        """Whether the node is likely to answer: it is connected, and was not silent just now."""
        return self._reachable and time.monotonic() >= self._doubted_until

    def ask(self, order: RequestAttempt) -> None:
        """Send an order when its time has come; for any thread."""
        self._new.append(order)
        self._client.interrupt()

    def close(self) -> None:
        """Stop; orders under way are forgotten."""
        self._closing.set()
        self._client.interrupt()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                message = self._client.receive(self._pause())
            except ProtocolError as error:
                # Which order it was for cannot be known; those that were sent are tried again.
                self._fail_sent(str(error))
                message = None
            if message is not None and message.kind == protocol.WELCOME:
                self._be_welcomed(message)
            elif message is not None:
                self._doubted_until = 0.0
                # The reply to an order that was given up comes late, and is dropped.
                order = self._sent.pop(message.sequence, None)
                if order is not None:
                    self._settled(order, message)
            self._watch_connection()
            self._send_due()
            self._give_up_late()

    def _pause(self) -> float:
        if self._new:
            return 0.0
        is_told = self._is_greeted or self._refusal is not None
        times = [order.start if is_told else order.until for order in self._waiting]
        times += [order.until for order in self._sent.values()]
        return max(0.0, min([_LONGEST_WAIT, *(t - time.monotonic() for t in times)]))

    def _watch_connection(self) -> None:
        for event in self._client.connection_events():
            self._is_greeted, self._refusal = False, None
            if event.opened:
                with contextlib.suppress(PeerError):
                    self._greeting = self._client.send(protocol.HELLO)
            else:
                self._reachable = False
                self._fail_sent("it closed the connection")

    def _be_welcomed(self, message: Message) -> None:
        if message.sequence != self._greeting:
            return
        try:
            wrong = self._wrong(message.decode(protocol.Welcome))
            self._refusal = None if wrong is None else RequestFailure(wrong, is_final=True)
        except ProtocolError as error:
            self._refusal = RequestFailure(str(error))
        self._is_greeted = self._reachable = self._refusal is None
        self._doubted_until = 0.0

    def _send_due(self) -> None:
        while self._new:
            self._waiting.append(self._new.popleft())
        if not self._is_greeted and self._refusal is None:
            return
        now = time.monotonic()
        due = [order for order in self._waiting if order.start <= now]
        self._waiting = [order for order in self._waiting if order.start > now]
        for order in due:
            if self._refusal is not None:
                self._settled(order, self._refusal)
                continue
            try:
                number = self._client.send(protocol.GET, order.payload)
            except PeerError as error:
                self._settled(order, RequestFailure(str(error)))
                continue
            order.sent = now
            self._sent[number] = order

    def _give_up_late(self) -> None:
        now = time.monotonic()
        late = [order for order in self._waiting if order.until <= now]
        self._waiting = [order for order in self._waiting if order.until > now]
        for order in late:
            waited = format_seconds(now - order.start)
            self._settled(order, RequestFailure(f"no connection for {waited}"))
        for number, order in list(self._sent.items()):
            if order.until <= now:
                del self._sent[number]
                self._doubted_until = now + _DOUBT
                waited = format_seconds(now - order.sent)
                self._settled(order, RequestFailure(f"no answer for {waited}"))

    def _fail_sent(self, why: str) -> None:
        orders, self._sent = list(self._sent.values()), {}
        for order in orders:
            self._settled(order, RequestFailure(why))
