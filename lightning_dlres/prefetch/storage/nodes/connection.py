"""Thread that talks to one storage node.

It sends requests and reports how each attempt ended, also if the node is silent, gone, or sends
invalid messages.
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

# Returns the reason for which a node must not be used, by its welcome; None if it may be used.
CheckWelcome = Callable[[protocol.Welcome], str | None]
# Seconds after which the thread looks at its state even if no message comes.
_LONGEST_WAIT = 1.0
# Seconds for which a node that did not answer is avoided if a replica can be asked. An answer, even
# a late one, ends them.
_SUSPECT_SECONDS = 10.0


@dataclass(frozen=True)
class RequestFailure:
    """Reason for which an attempt gave no answer.

    Attributes:
        text: The reason.
        is_final: True if the node will not have the samples at another attempt either.
    """

    text: str
    is_final: bool = False


Outcome = Message | RequestFailure


@dataclass(eq=False)
class RequestAttempt:
    """One attempt to send a request to one node. Times are in seconds of `time.monotonic`.

    Attributes:
        payload: Payload of a "get".
        start: Time before which it is not sent.
        until: Time at which it has failed.
        context: Request and node, for the owner of the connection.
        sent: Time at which it was sent.
    """

    payload: bytes
    start: float
    until: float
    context: tuple[object, int]
    sent: float = field(default=0.0, init=False)


class NodeConnection:
    """Connection to a node.

    Args:
        client: Connected client. From now on only this connection's thread uses it.
        name: Name of the node, for errors.
        on_outcome: Called in this connection's thread with every attempt and its outcome.
        is_reachable: True if the node has answered before.
        check_welcome: Checks the welcome with which each connection begins. The process behind an
            address may be another node than before.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        on_outcome: Callable[[RequestAttempt, Outcome], None],
        is_reachable: bool,
        check_welcome: CheckWelcome,
    ) -> None:
        self._is_reachable, self._suspect_until = is_reachable, 0.0
        self._check_welcome = check_welcome
        # State of the present connection: the sequence number of its hello, and the answer to it.
        # Neither welcomed nor refused: no answer has come yet.
        self._hello_sequence, self._is_welcomed = -1, False
        self._refusal: RequestFailure | None = None
        self._client, self._name, self._on_outcome = client, name, on_outcome
        # Attempts pass from `_new` (appended to by any thread) to `_waiting` (until their time has
        # come, and the node has welcomed this client) to `_sent` (by sequence number).
        self._new: deque[RequestAttempt] = deque()
        self._waiting: list[RequestAttempt] = []
        self._sent: dict[int, RequestAttempt] = {}
        self._closing = threading.Event()
        self._thread = start_service(self._run, f"dlres {name}")

    @property
    def is_responsive(self) -> bool:
        """True if the node is likely to answer: it is connected, and was not silent recently."""
        return self._is_reachable and time.monotonic() >= self._suspect_until

    def submit(self, attempt: RequestAttempt) -> None:
        """Send a request when its time has come. May be called from any thread."""
        self._new.append(attempt)
        self._client.interrupt()

    def close(self) -> None:
        """End the thread. Attempts in flight get no outcome."""
        self._closing.set()
        self._client.interrupt()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                message = self._client.receive(self._pause())
            except ProtocolError as error:
                # An invalid message does not show its request: all that were sent have failed.
                self._fail_sent(str(error))
                message = None
            if message is not None and message.kind == protocol.WELCOME:
                self._handle_welcome(message)
            elif message is not None:
                self._suspect_until = 0.0
                # None for a late answer to an attempt that has failed already: it is dropped.
                attempt = self._sent.pop(message.sequence, None)
                if attempt is not None:
                    self._on_outcome(attempt, message)
            self._watch_connection()
            self._send_due()
            self._fail_late()

    def _pause(self) -> float:
        """Return the seconds until the next event that no message announces."""
        if self._new:
            return 0.0
        can_send = self._is_welcomed or self._refusal is not None
        times = [attempt.start if can_send else attempt.until for attempt in self._waiting]
        times += [attempt.until for attempt in self._sent.values()]
        return max(0.0, min([_LONGEST_WAIT, *(t - time.monotonic() for t in times)]))

    def _watch_connection(self) -> None:
        for event in self._client.connection_events():
            self._is_welcomed, self._refusal = False, None
            if event.opened:
                with contextlib.suppress(PeerError):
                    self._hello_sequence = self._client.send(protocol.HELLO)
            else:
                self._is_reachable = False
                self._fail_sent("it closed the connection")

    def _handle_welcome(self, message: Message) -> None:
        # The answer to the hello of an earlier connection says nothing about this one.
        if message.sequence != self._hello_sequence:
            return
        try:
            problem = self._check_welcome(message.decode(protocol.Welcome))
            self._refusal = None if problem is None else RequestFailure(problem, is_final=True)
        except ProtocolError as error:
            self._refusal = RequestFailure(str(error))
        self._is_welcomed = self._is_reachable = self._refusal is None
        self._suspect_until = 0.0

    def _send_due(self) -> None:
        while self._new:
            self._waiting.append(self._new.popleft())
        if not self._is_welcomed and self._refusal is None:
            return
        now = time.monotonic()
        due = [attempt for attempt in self._waiting if attempt.start <= now]
        self._waiting = [attempt for attempt in self._waiting if attempt.start > now]
        for attempt in due:
            if self._refusal is not None:
                self._on_outcome(attempt, self._refusal)
                continue
            try:
                sequence = self._client.send(protocol.GET, attempt.payload)
            except PeerError as error:
                self._on_outcome(attempt, RequestFailure(str(error)))
                continue
            attempt.sent = now
            self._sent[sequence] = attempt

    def _fail_late(self) -> None:
        now = time.monotonic()
        late = [attempt for attempt in self._waiting if attempt.until <= now]
        self._waiting = [attempt for attempt in self._waiting if attempt.until > now]
        for attempt in late:
            waited = format_seconds(now - attempt.start)
            self._on_outcome(attempt, RequestFailure(f"no connection for {waited}"))
        for sequence, attempt in list(self._sent.items()):
            if attempt.until <= now:
                del self._sent[sequence]
                self._suspect_until = now + _SUSPECT_SECONDS
                waited = format_seconds(now - attempt.sent)
                self._on_outcome(attempt, RequestFailure(f"no answer for {waited}"))

    def _fail_sent(self, reason: str) -> None:
        # Cleared first: `on_outcome` may submit the request again.
        attempts, self._sent = list(self._sent.values()), {}
        for attempt in attempts:
            self._on_outcome(attempt, RequestFailure(reason))
