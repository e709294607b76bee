"""Protocol of storage nodes: its messages, and the thread of the cache that talks to one node.

The messages are those of `core.wire.message`. Below are their kinds, with the payload in brackets:

- "hello" is answered by "welcome" (`Welcome`), which describes the data set and the node.
- "table" (`TableRows`) is answered by "table": these rows, in the format of a store's manifest.
- "get" (sample ids, uint32, little-endian) is answered by "data": the samples, concatenated. If the
  read fails and another try may help, the answer is "failed" (text). If a file is gone or has
  another size, the answer is "lost" (text).
- Anything else is answered by "failed".

Each answer has the sequence number of its request. An answer holds at most `REPLY_BYTES`, or a
single sample. It may therefore hold only the first of the requested samples; then the client
requests the rest again. So the answer to any request takes a bounded amount of a node's memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import PeerError, ProtocolError
from lightning_dlres.core.host.service import start_service
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.message import Message
from lightning_dlres.prefetch.order.sequence import MAX_SAMPLES, SampleIds

VERSION = 5
# Maximum bytes of an answer, unless it is a single sample that is larger.
REPLY_BYTES = 64 << 20
# Maximum number of samples in a "get". Their ids have four bytes each.
REQUEST_SAMPLES = 1 << 16
# Maximum bytes of a request, and of an answer without its samples.
MESSAGE_BYTES = 1 << 20
HELLO, WELCOME, TABLE, GET = "hello", "welcome", "table", "get"
DATA, FAILED, LOST = "data", "failed", "lost"
# Longest wait for a message, in seconds. Then the thread checks for other events.
_MAX_WAIT = 1.0
# Seconds for which requests avoid a node that did not answer, if another node has the samples, too.
# An answer of the node, even a late one, ends this time.
_SUSPECT_SECONDS = 10.0

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SAMPLES)]


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description that a node gives of itself.

    Attributes:
        version: Version of this protocol.
        samples: Number of samples in the data set.
        digest: Hash of the table, see `SampleTable`.
        node: Index of the node.
        nodes: Number of nodes.
        content_digest: Hash of the beginnings of some samples, see `Reader`.
    """

    version: int
    samples: _Count
    digest: str
    node: _Count
    nodes: _Count
    content_digest: str = ""


class TableRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request for the rows of `count` samples of the table, from sample_id `first` on."""

    first: _Count
    count: _Count


def pack_sample_ids(sample_ids: SampleIds) -> bytes:
    """Return the payload of a "get"."""
    return np.ascontiguousarray(sample_ids, "<u4").tobytes()


def samples_in_reply(sizes: NDArray[np.int64]) -> int:
    """Return the number of samples in the answer to a "get".

    Client and node compute it alike, so that an answer need not list its samples.

    Args:
        sizes: int64[n], sizes of the requested samples in bytes.
    """
    ends = np.cumsum(sizes)
    return max(1, int(np.searchsorted(ends, REPLY_BYTES, side="right")))


def unpack_sample_ids(payload: bytes, samples: int, peer: str) -> SampleIds:
    """Return the sample ids of a "get".

    Args:
        payload: The payload.
        samples: Number of samples in the data set.
        peer: Name of the client, for errors.

    Raises:
        ProtocolError: If the payload is no "get", or an id is out of range.
    """
    if not 0 < len(payload) <= 4 * REQUEST_SAMPLES or len(payload) % 4:
        raise ProtocolError(
            f"{peer} sent a get of {len(payload)} bytes, expected 1 to {REQUEST_SAMPLES} sample "
            "ids of 4 bytes."
        )
    sample_ids = np.frombuffer(payload, dtype="<u4").astype(np.uint32, copy=False)
    if int(sample_ids.max()) >= samples:
        raise ProtocolError(
            f"{peer} requested sample_id {int(sample_ids.max())}, expected less than {samples}. "
            "Use the same data set on both sides."
        )
    return sample_ids


# Returns the reason for which a node must not be used, by its welcome; None if it may be used.
CheckWelcome = Callable[[Welcome], str | None]


@dataclass(frozen=True)
class RequestFailure:
    """Failure of an attempt.

    Attributes:
        text: Reason of the failure.
        is_final: True if every further attempt at this node would fail, too.
    """

    text: str
    is_final: bool = False


Outcome = Message | RequestFailure


@dataclass(eq=False)
class RequestAttempt:
    """One attempt to send a request to one node. Times are in seconds of `time.monotonic`.

    Attributes:
        payload: Payload of a "get".
        start: Earliest time to send the request.
        until: Time at which the attempt fails if no answer has come.
        context: Fetch and index of the node. Only the owner of the connection uses them.
        sent: Time at which the request was sent; 0 before.
    """

    payload: bytes
    start: float
    until: float
    context: tuple[object, int]
    sent: float = field(default=0.0, init=False)


class NodeConnection:
    """Connection to a node, with a thread of its own.

    It sends requests and reports the outcome of each attempt, also if the node is silent, gone, or
    sends invalid messages.

    Args:
        client: Connected client, which belongs to this connection from now on.
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
        # If the client is neither welcomed nor refused, no answer has come yet.
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
                # An invalid message does not show its request, so fail all that were sent.
                self._fail_sent(str(error))
                message = None
            if message is not None and message.kind == WELCOME:
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
        return max(0.0, min([_MAX_WAIT, *(t - time.monotonic() for t in times)]))

    def _watch_connection(self) -> None:
        for event in self._client.connection_events():
            self._is_welcomed, self._refusal = False, None
            if event.opened:
                with contextlib.suppress(PeerError):
                    self._hello_sequence = self._client.send(HELLO)
            else:
                self._is_reachable = False
                self._fail_sent("it closed the connection")

    def _handle_welcome(self, message: Message) -> None:
        # The answer to the hello of an earlier connection says nothing about this one.
        if message.sequence != self._hello_sequence:
            return
        try:
            problem = self._check_welcome(message.decode(Welcome))
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
                sequence = self._client.send(GET, attempt.payload)
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
