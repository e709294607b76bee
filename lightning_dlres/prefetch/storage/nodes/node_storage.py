"""Storage nodes as storage: every request goes to the node of its samples, and on to their replicas
or to the same node again where that fails, until a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import (
    ConfigError,
    PeerTimeoutError,
    ProtocolError,
    StorageError,
    got_expected,
)
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.client import Client
from lightning_dlres.core.wire.frames import Message
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.prefetch.order.sequence import Positions
from lightning_dlres.prefetch.storage.base import Reply, ReportProgress, Storage
from lightning_dlres.prefetch.storage.manifest import SampleTable
from lightning_dlres.prefetch.storage.nodes import protocol
from lightning_dlres.prefetch.storage.nodes.connection import (
    NodeConnection,
    Outcome,
    RequestAttempt,
    RequestFailure,
)
from lightning_dlres.prefetch.storage.readers import check
from lightning_dlres.prefetch.storage.source_options import SourceConfig

_TABLE_PART = 1 << 18
# How long is waited for nodes whose samples others have, too.
_GREETING = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


@dataclass(frozen=True)
class Identity:
    """How to be let in by nodes that use CURVE: one's own keys and the nodes' public key."""

    curve: CurveKeys
    server_key: bytes


@dataclass(eq=False)
class _Request:
    fetch_id: int
    node: int
    # What is still to come; behind `pieces`, which have.
    numbers: Positions
    deadline: float
    tries: int = 0
    pieces: list[NDArray[np.uint8]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    # Nodes that will not have the samples, however often they are asked, and why.
    lost: dict[int, str] = field(default_factory=dict)


class NodeStorage(Storage):
    """N storage nodes that run elsewhere.

    Args:
        endpoints: of the nodes, in order: sample i is on node i mod N.
        replicas: r: sample i is also on the next r - 1 nodes.
        timeout: seconds after which a request has failed for good.
        identity: for nodes that use CURVE.

    Raises:
        ConfigError: fewer nodes than replicas, or the nodes serve different data sets or call
            themselves by other numbers.
        PeerTimeoutError: a node does not answer, and no replica does.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        replicas: int = 1,
        timeout: float = 30.0,
        identity: Identity | None = None,
    ) -> None:
        super().__init__()
        if not endpoints:
            raise ConfigError(
                got_expected("endpoints", endpoints, "at least one", "tcp://host:5555")
            )
        if not 1 <= replicas <= len(endpoints):
            raise ConfigError(
                got_expected("replicas", replicas, f"1 to {len(endpoints)} nodes", "replicas=1")
            )
        self.nodes = len(endpoints)
        self._endpoints, self._replicas, self._timeout = list(endpoints), replicas, timeout
        self._identity = identity
        self._largest = 0
        # A slow node is left for its replica earlier than for good.
        self._patience = timeout / (3 if replicas == 1 else 2 * replicas)
        self._lock = threading.Lock()
        self._closed = False
        self.table, answering = self._greet()
        self._largest = int(self.table.sizes.max())
        self._links = [
            NodeConnection(
                self._client(node),
                self._name(node),
                self._settled,
                node in answering,
                partial(self._wrong, node),
            )
            for node in range(self.nodes)
        ]

    def submit(self, fetch_id: int, node: int, numbers: Positions) -> None:
        """See `Storage`."""
        self._try(_Request(fetch_id, node, numbers, time.monotonic() + self._timeout))

    def close(self) -> None:
        """See `Storage`."""
        self._closed = True
        for link in self._links:
            link.close()

    def _client(self, node: int) -> Client:
        identity = self._identity
        return Client(
            f"cache {uuid.uuid4().hex}",
            self._endpoints[node],
            server=f"storage node {node}",
            curve=identity.curve if identity else None,
            server_key=identity.server_key if identity else None,
            max_message_bytes=max(protocol.REPLY_BYTES, self._largest) + protocol.MESSAGE_BYTES,
            monitor=True,
        )

    def _name(self, node: int) -> str:
        return f"storage node {node} ({self._endpoints[node]})"

    def _greet(self) -> tuple[SampleTable, set[int]]:
        """Ask every node what it serves, and one for the table; return it, and who answers."""
        start = time.monotonic()
        clients = [self._client(node) for node in range(self.nodes)]
        welcomes: dict[int, protocol.Welcome] = {}
        try:
            for client in clients:
                client.send(protocol.HELLO)
            for node, client in enumerate(clients):
                # Those that have answered meanwhile need no time of their own.
                left = max(0.0, start + min(_GREETING, self._timeout) - time.monotonic())
                with contextlib.suppress(PeerTimeoutError):
                    welcomes[node] = client.expect(left, "").decode(protocol.Welcome)
            for node, client in enumerate(clients):
                mirrors = {(node + other) % self.nodes for other in range(self._replicas)}
                if not mirrors & welcomes.keys():
                    welcomes[node] = self._await_welcome(client, node, start + self._timeout)
            self._check(welcomes)
            first = min(welcomes)
            table = self._fetch_table(clients[first], welcomes[first], self._name(first))
            return table, set(welcomes)
        finally:
            for client in clients:
                client.close()

    def _await_welcome(self, client: Client, node: int, until: float) -> protocol.Welcome:
        try:
            message = client.expect(max(0.0, until - time.monotonic()), "a welcome")
        except PeerTimeoutError:
            raise PeerTimeoutError(
                f"waited {format_seconds(self._timeout)} for an answer from {self._name(node)}, "
                "but nothing came. Check that it runs and can be reached, and that its keys match."
            ) from None
        return message.decode(protocol.Welcome)

    def _check(self, welcomes: dict[int, protocol.Welcome]) -> None:
        first = min(welcomes)
        self._first, self._expected = self._name(first), welcomes[first]
        # Nodes that served the data set when they were last asked.
        self._agreed: set[int] = set()
        for node, welcome in welcomes.items():
            if (wrong := self._wrong(node, welcome)) is not None:
                raise ConfigError(wrong)

    def _wrong(self, node: int, welcome: protocol.Welcome) -> str | None:
        """Return why a node is not the one it should be."""
        if welcome.version != protocol.VERSION:
            return (
                f"{self._name(node)} must have protocol {protocol.VERSION}, got "
                f"{welcome.version}. Run the same version there."
            )
        if (welcome.node, welcome.nodes) != (node, self.nodes):
            return (
                f"{self._name(node)} must be node {node} of {self.nodes}, got node "
                f"{welcome.node} of {welcome.nodes}. List all nodes in their order."
            )
        expected = self._expected
        if (welcome.digest, welcome.contents) != (expected.digest, expected.contents):
            got = (
                f"got {welcome.samples} samples ({_version(welcome)}) and {expected.samples} "
                f"({_version(expected)})."
            )
            if node in self._agreed:
                return (
                    f"{self._name(node)} must serve the same data set as before, {got} Serve that "
                    "one again, or start training again."
                )
            return (
                f"{self._name(node)} and {self._first} must serve the same data set, {got} Copy "
                "one store to all."
            )
        self._agreed.add(node)
        return None

    def _fetch_table(self, client: Client, welcome: protocol.Welcome, name: str) -> SampleTable:
        parts: list[SampleTable] = []
        first = 0
        while first < welcome.samples:
            count = min(_TABLE_PART, welcome.samples - first)
            wish = protocol.PartWish(first, count)
            client.send(protocol.TABLE, msgspec.msgpack.encode(wish))
            message = client.expect(self._timeout, "a part of the table")
            if message.kind != protocol.TABLE:
                raise ProtocolError(f"{name}: {message.payload.decode(errors='replace')}")
            data = np.frombuffer(message.payload, dtype=np.uint8)
            try:
                parts.append(SampleTable.from_bytes(data, name))
            except ConfigError as error:
                # The bytes are a peer's, and no argument of this process's user.
                raise ProtocolError(str(error)) from error
            first += len(parts[-1])
        table = SampleTable.join(parts)
        if table.digest != welcome.digest:
            raise ProtocolError(
                f"{name} sent a table with digest {table.digest}, expected {welcome.digest}. Did "
                "its data set change? Start it again."
            )
        return table

    def _try(self, request: _Request, pause: float = 0.0) -> None:
        now = time.monotonic()
        node = self._next_node(request)
        until = min(request.deadline, now + pause + self._patience)
        payload = protocol.pack_numbers(request.numbers[: protocol.REQUEST_SAMPLES])
        self._links[node].ask(RequestAttempt(payload, now + pause, until, (request, node)))

    def _next_node(self, request: _Request) -> int:
        """Return the node to try next: the replicas in turn, those that answer first."""
        order = [
            (request.node + (request.tries + other) % self._replicas) % self.nodes
            for other in range(self._replicas)
        ]
        order = [node for node in order if node not in request.lost]
        return next((node for node in order if self._links[node].answers), order[0])

    def _settled(self, order: RequestAttempt, outcome: Outcome) -> None:
        """Handle the end of one try; for the threads of all links."""
        request, node = order.context
        assert isinstance(request, _Request)
        failure = outcome
        if isinstance(failure, Message):
            found = self._accept(request, failure)
            if found is None and not len(request.numbers):
                self._reply(Reply(request.fetch_id, _joined(request.pieces)))
                return
            if found is None:
                # The rest has a deadline of its own: something has come.
                request.deadline = time.monotonic() + self._timeout
                if not self._closed:
                    self._try(request)
                return
            failure = found
        if self._closed:
            return
        request.tries += 1
        name = self._name(node)
        reason = failure.text if failure.text.startswith(name) else f"{name}: {failure.text}"
        request.reasons.append(reason)
        if failure.is_final:
            request.lost[node] = reason
            if len(request.lost) == self._replicas:
                self._reply(Reply(request.fetch_id, self._lost(request)))
                return
        rounds = request.tries // self._replicas
        another = request.tries % self._replicas
        pause = 0.0 if another else min(_FIRST_PAUSE * 2**rounds, _LONGEST_PAUSE)
        if time.monotonic() + pause >= request.deadline:
            self._reply(Reply(request.fetch_id, self._error(request)))
        else:
            self._try(request, pause)

    def _accept(self, request: _Request, message: Message) -> RequestFailure | None:
        """Take in the samples of a reply, which may be the first of those that were asked for;
        return what is wrong with it."""
        if message.kind != protocol.DATA:
            text = message.payload.decode(errors="replace")
            return RequestFailure(text, is_final=message.kind == protocol.LOST)
        sizes = self.table.sizes[request.numbers[: protocol.REQUEST_SAMPLES]]
        sizes = sizes[: protocol.fitting(sizes)]
        expected = int(sizes.sum())
        if len(message.payload) != expected:
            return RequestFailure(
                f"got {len(message.payload)} bytes for {len(sizes)} samples, expected {expected}"
            )
        view, ends = memoryview(message.payload), np.cumsum(sizes)
        starts = ends - sizes
        pieces = [view[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        came, rest = request.numbers[: len(sizes)], request.numbers[len(sizes) :]
        wrong = check(self.table, came, pieces)
        if wrong is None:
            request.pieces.append(np.frombuffer(message.payload, dtype=np.uint8))
            request.numbers = rest
        return None if wrong is None else RequestFailure(wrong)

    def _lost(self, request: _Request) -> StorageError:
        return StorageError(
            f"{self._asked(request)} cannot be had. {' '.join(request.lost.values())}"
        )

    def _asked(self, request: _Request) -> str:
        number = int(request.numbers[0])
        others = f" or one of {len(request.numbers) - 1} asked for with it"
        return (
            f"sample {self.table.key(number)!r} (number {number})"
            f"{others if len(request.numbers) > 1 else ''}"
        )

    def _error(self, request: _Request) -> StorageError:
        advice = (
            "Check that the node runs and can be reached"
            if self._replicas > 1
            else "Check that the node runs and can be reached; with replicas=2 another is asked"
        )
        return StorageError(
            f"{self._asked(request)} did not come from {self._name(request.node)} within "
            f"{format_seconds(self._timeout)}; the last of {request.tries} tries: "
            f"{request.reasons[-1].rstrip('.')}. {advice}."
        )


def open_nodes(
    config: SourceConfig, directory: Path, report_progress: ReportProgress | None = None
) -> NodeStorage:
    """Return the storage of `storage="nodes"`; see `open_storage`."""
    identity = None
    if config.secret_key:
        keys = CurveKeys(config.public_key, config.secret_key)
        identity = Identity(keys, config.server_key)
    return NodeStorage(
        config.addresses, replicas=config.replicas, timeout=config.timeout, identity=identity
    )


def _version(welcome: protocol.Welcome) -> str:
    contents = f", contents {welcome.contents}" if welcome.contents else ""
    return f"digest {welcome.digest}{contents}"


def _joined(pieces: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
