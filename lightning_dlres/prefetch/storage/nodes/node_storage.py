"""Storage backend of nodes that run elsewhere.

Each fetch is sent to the node of its samples. If that fails, it is sent to the nodes with replicas,
or to the same node again, until a deadline.
"""

from __future__ import annotations

import contextlib
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
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.core.wire.message import Message
from lightning_dlres.prefetch.order.sequence import SampleIds
from lightning_dlres.prefetch.storage.base import Reply, ReportProgress, Storage
from lightning_dlres.prefetch.storage.manifest import SampleTable
from lightning_dlres.prefetch.storage.nodes import protocol
from lightning_dlres.prefetch.storage.nodes.protocol import (
    NodeConnection,
    Outcome,
    RequestAttempt,
    RequestFailure,
)
from lightning_dlres.prefetch.storage.readers import checksum_error
from lightning_dlres.prefetch.storage.source_options import SourceConfig

# Number of rows of the table in one request.
_TABLE_ROWS = 1 << 18
# Seconds to wait at the start for nodes whose samples other nodes have, too.
_WELCOME_SECONDS = 2.0
# Seconds between two rounds of attempts; the pause doubles after each round.
_FIRST_PAUSE, _MAX_PAUSE = 0.05, 2.0


@dataclass(frozen=True)
class Identity:
    """Keys for nodes that use CURVE.

    Attributes:
        curve: The client's own keys.
        server_key: Public key of the nodes.
    """

    curve: CurveKeys
    server_key: bytes


@dataclass(eq=False)
class _NodeFetch:
    """Fetch in flight. An answer may have only the first of the samples, so `missing_ids` shrinks
    with each answer.

    Attributes:
        fetch_id: The id of `Storage.submit`.
        node: Node that has the samples; the next nodes have their replicas.
        missing_ids: uint32[n], samples that have not arrived yet; they follow those of `pieces`.
        deadline: Time at which the fetch fails, in seconds of `time.monotonic`.
        tries: Number of attempts that have failed.
        pieces: Samples that have arrived, in order; each element is the data of one answer.
        reasons: Reasons of the failed attempts.
        lost: Reason of each node that cannot serve the samples, such as after a file was deleted,
            by the node's index. These nodes get no further attempts.
    """

    fetch_id: int
    node: int
    missing_ids: SampleIds
    deadline: float
    tries: int = 0
    pieces: list[NDArray[np.uint8]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)


class NodeStorage(Storage):
    """N storage nodes that run elsewhere.

    Args:
        addresses: Addresses of the nodes, in order: sample i is on node i mod N.
        replicas: Number of nodes that have each sample, r: sample i is also on the r - 1 nodes
            after its own.
        timeout: Seconds after which a fetch fails and is not tried again.
        identity: Keys for nodes that use CURVE; None for nodes without.

    Raises:
        ConfigError: If there are fewer nodes than replicas, or the nodes serve different data sets
            or are in another order.
        PeerTimeoutError: If a node and all nodes with its replicas do not answer.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        replicas: int = 1,
        timeout: float = 30.0,
        identity: Identity | None = None,
    ) -> None:
        super().__init__()
        if not addresses:
            raise ConfigError(
                got_expected("addresses", addresses, "at least one", "tcp://host:5555")
            )
        if not 1 <= replicas <= len(addresses):
            raise ConfigError(
                got_expected("replicas", replicas, f"1 to {len(addresses)} nodes", "replicas=1")
            )
        self.nodes = len(addresses)
        self._addresses, self._replicas, self._timeout = list(addresses), replicas, timeout
        self._identity = identity
        self._largest_sample_bytes = 0
        # Seconds of one attempt: the deadline leaves time for attempts at all replicas.
        self._attempt_seconds = timeout / (3 if replicas == 1 else 2 * replicas)
        self._closed = False
        self.table, answering = self._greet()
        self._largest_sample_bytes = int(self.table.sizes.max())
        self._connections = [
            NodeConnection(
                self._client(node),
                self._name(node),
                self._on_outcome,
                node in answering,
                partial(self._welcome_error, node),
            )
            for node in range(self.nodes)
        ]

    def submit(self, fetch_id: int, node: int, sample_ids: SampleIds) -> None:
        """See `Storage`."""
        self._attempt(_NodeFetch(fetch_id, node, sample_ids, time.monotonic() + self._timeout))

    def close(self) -> None:
        """See `Storage`."""
        self._closed = True
        for connection in self._connections:
            connection.close()

    def _client(self, node: int) -> Client:
        identity = self._identity
        return Client(
            f"cache {uuid.uuid4().hex}",
            self._addresses[node],
            server=f"storage node {node}",
            curve=identity.curve if identity else None,
            server_key=identity.server_key if identity else None,
            max_frame_bytes=max(protocol.REPLY_BYTES, self._largest_sample_bytes)
            + protocol.MESSAGE_BYTES,
            monitor=True,
        )

    def _name(self, node: int) -> str:
        return f"storage node {node} ({self._addresses[node]})"

    def _greet(self) -> tuple[SampleTable, set[int]]:
        """Send a hello to every node and get the table from one. Return the table, and the nodes
        that have answered."""
        start = time.monotonic()
        clients = [self._client(node) for node in range(self.nodes)]
        welcomes: dict[int, protocol.Welcome] = {}
        try:
            for client in clients:
                client.send(protocol.HELLO)
            for node, client in enumerate(clients):
                # All nodes share one deadline. After it, answers that have come are still read.
                seconds_left = max(
                    0.0, start + min(_WELCOME_SECONDS, self._timeout) - time.monotonic()
                )
                with contextlib.suppress(PeerTimeoutError):
                    welcomes[node] = client.expect(seconds_left, "").decode(protocol.Welcome)
            for node, client in enumerate(clients):
                replicas = {(node + other) % self.nodes for other in range(self._replicas)}
                if not replicas & welcomes.keys():
                    welcomes[node] = self._await_welcome(client, node, start + self._timeout)
            self._check_welcomes(welcomes)
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

    def _check_welcomes(self, welcomes: dict[int, protocol.Welcome]) -> None:
        first = min(welcomes)
        self._reference_name, self._reference_welcome = self._name(first), welcomes[first]
        # Nodes that have served this data set at least once. The threads of several connections add
        # to it; `set.add` needs no lock.
        self._verified_nodes: set[int] = set()
        for node, welcome in welcomes.items():
            if (problem := self._welcome_error(node, welcome)) is not None:
                raise ConfigError(problem)

    def _welcome_error(self, node: int, welcome: protocol.Welcome) -> str | None:
        """Return the reason why a node must not be used; None if it may be used."""
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
        expected = self._reference_welcome
        if (welcome.digest, welcome.content_digest) != (expected.digest, expected.content_digest):
            got = (
                f"got {welcome.samples} samples ({_describe_data_set(welcome)}) and "
                f"{expected.samples} ({_describe_data_set(expected)})."
            )
            if node in self._verified_nodes:
                return (
                    f"{self._name(node)} must serve the same data set as before, {got} Serve that "
                    "one again, or start training again."
                )
            return (
                f"{self._name(node)} and {self._reference_name} must serve the same data set, "
                f"{got} Copy one store to all."
            )
        self._verified_nodes.add(node)
        return None

    def _fetch_table(self, client: Client, welcome: protocol.Welcome, name: str) -> SampleTable:
        parts: list[SampleTable] = []
        first = 0
        while first < welcome.samples:
            count = min(_TABLE_ROWS, welcome.samples - first)
            rows = protocol.TableRows(first, count)
            client.send(protocol.TABLE, msgspec.msgpack.encode(rows))
            message = client.expect(self._timeout, "a part of the table")
            if message.kind != protocol.TABLE:
                raise ProtocolError(f"{name}: {bytes(message.payload).decode(errors='replace')}")
            data = np.frombuffer(message.payload, dtype=np.uint8)
            try:
                parts.append(SampleTable.from_bytes(data, name))
            except ConfigError as error:
                # The bytes come from a peer, so this is no error of the user's configuration.
                raise ProtocolError(str(error)) from error
            first += len(parts[-1])
        table = SampleTable.join(parts)
        if table.digest != welcome.digest:
            raise ProtocolError(
                f"{name} sent a table with digest {table.digest}, expected {welcome.digest}. Its "
                "data set may have changed: start the node again."
            )
        return table

    def _attempt(self, fetch: _NodeFetch, pause: float = 0.0) -> None:
        """Send a fetch to a node, after a pause in seconds."""
        now = time.monotonic()
        node = self._next_node(fetch)
        until = min(fetch.deadline, now + pause + self._attempt_seconds)
        payload = protocol.pack_sample_ids(fetch.missing_ids[: protocol.REQUEST_SAMPLES])
        attempt = RequestAttempt(payload, now + pause, until, (fetch, node))
        self._connections[node].submit(attempt)

    def _next_node(self, fetch: _NodeFetch) -> int:
        """Return the node of the next attempt: the replicas in turn, responsive ones first."""
        order = [
            (fetch.node + (fetch.tries + other) % self._replicas) % self.nodes
            for other in range(self._replicas)
        ]
        order = [node for node in order if node not in fetch.lost]
        return next((node for node in order if self._connections[node].is_responsive), order[0])

    def _on_outcome(self, attempt: RequestAttempt, outcome: Outcome) -> None:
        """Handle the end of one attempt, in the thread of the connection.

        A fetch needs no lock: it has one attempt at a time, and so one thread at a time.
        """
        fetch, node = attempt.context
        assert isinstance(fetch, _NodeFetch)
        if isinstance(outcome, Message):
            failure = self._accept(fetch, outcome)
            if failure is None:
                self._reply_or_request_rest(fetch)
                return
        else:
            failure = outcome
        if self._closed:
            return
        fetch.tries += 1
        name = self._name(node)
        reason = failure.text if failure.text.startswith(name) else f"{name}: {failure.text}"
        fetch.reasons.append(reason)
        if failure.is_final:
            fetch.lost[node] = reason
            if len(fetch.lost) == self._replicas:
                self._reply(Reply(fetch.fetch_id, self._lost_error(fetch)))
                return
        # Pause only after each replica has failed once more.
        rounds, next_replica = divmod(fetch.tries, self._replicas)
        pause = 0.0 if next_replica else _pause_seconds(rounds)
        if time.monotonic() + pause >= fetch.deadline:
            self._reply(Reply(fetch.fetch_id, self._timeout_error(fetch)))
        else:
            self._attempt(fetch, pause)

    def _reply_or_request_rest(self, fetch: _NodeFetch) -> None:
        """Reply to a fetch whose samples have all arrived, else request the rest."""
        if not len(fetch.missing_ids):
            self._reply(Reply(fetch.fetch_id, _join(fetch.pieces)))
            return
        # Samples have arrived, so the rest gets a new deadline.
        fetch.deadline = time.monotonic() + self._timeout
        if not self._closed:
            self._attempt(fetch)

    def _accept(self, fetch: _NodeFetch, message: Message) -> RequestFailure | None:
        """Add the samples of an answer to a fetch; return the failure if it is no valid answer."""
        if message.kind != protocol.DATA:
            text = bytes(message.payload).decode(errors="replace")
            return RequestFailure(text, is_final=message.kind == protocol.LOST)
        sizes = self.table.sizes[fetch.missing_ids[: protocol.REQUEST_SAMPLES]]
        sizes = sizes[: protocol.samples_in_reply(sizes)]
        expected = int(sizes.sum())
        if len(message.payload) != expected:
            return RequestFailure(
                f"got {len(message.payload)} bytes for {len(sizes)} samples, expected {expected}"
            )
        view, ends = memoryview(message.payload), np.cumsum(sizes)
        starts = ends - sizes
        pieces = [view[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        received_ids = fetch.missing_ids[: len(sizes)]
        problem = checksum_error(self.table, received_ids, pieces)
        if problem is not None:
            return RequestFailure(problem)
        fetch.pieces.append(np.frombuffer(message.payload, dtype=np.uint8))
        fetch.missing_ids = fetch.missing_ids[len(sizes) :]
        return None

    def _lost_error(self, fetch: _NodeFetch) -> StorageError:
        return StorageError(
            f"{self._describe(fetch)} cannot be read. {' '.join(fetch.lost.values())}"
        )

    def _describe(self, fetch: _NodeFetch) -> str:
        sample_id = int(fetch.missing_ids[0])
        others = f" or one of {len(fetch.missing_ids) - 1} requested with it"
        return (
            f"sample {self.table.key(sample_id)!r} (sample_id {sample_id})"
            f"{others if len(fetch.missing_ids) > 1 else ''}"
        )

    def _timeout_error(self, fetch: _NodeFetch) -> StorageError:
        advice = "Check that the node runs and can be reached"
        if self._replicas == 1:
            advice += ", or use replicas=2, so that another node can send the samples"
        return StorageError(
            f"{self._describe(fetch)} did not come from {self._name(fetch.node)} within "
            f"{format_seconds(self._timeout)}; the last of {fetch.tries} attempts: "
            f"{fetch.reasons[-1].rstrip('.')}. {advice}."
        )


def open_nodes(
    config: SourceConfig, directory: Path, report_progress: ReportProgress | None = None
) -> NodeStorage:
    """Return the storage of `storage="nodes"`; see `registry.open_storage`."""
    identity = None
    if config.secret_key:
        keys = CurveKeys(config.public_key, config.secret_key)
        identity = Identity(keys, config.server_key)
    return NodeStorage(
        config.addresses, replicas=config.replicas, timeout=config.timeout, identity=identity
    )


def _describe_data_set(welcome: protocol.Welcome) -> str:
    contents = f", contents {welcome.content_digest}" if welcome.content_digest else ""
    return f"digest {welcome.digest}{contents}"


def _pause_seconds(rounds: int) -> float:
    """Return the seconds to pause after this many rounds of failed attempts, at least one."""
    # Cut the exponent too: within a long timeout there are thousands of rounds, and such a power
    # does not fit into a float.
    return min(_FIRST_PAUSE * 2.0 ** min(rounds - 1, 16), _MAX_PAUSE)


def _join(pieces: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
