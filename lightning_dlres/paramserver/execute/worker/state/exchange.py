"""State of a worker's exchange with all servers, shared by its threads.

The training thread pushes gradients and waits for values. One thread per server sends and receives.
All of them hold `lock` while they use anything here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from lightning_dlres.core.errors import PeerError
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.worker.state.parameters import KeyedParameters
from lightning_dlres.paramserver.execute.worker.state.push_lead import PushLead
from lightning_dlres.paramserver.execute.worker.state.push_log import PushLog
from lightning_dlres.paramserver.plan.keys import Key


@dataclass
class KeyExchange:
    """Exchange of one key.

    Attributes:
        key: The key.
        number: Number of the latest push; 0 before the first.
        expected: Smallest number that the awaited value may have; -1 if none is awaited.
        value: Value that has arrived, in the memory of its message; None before.
        value_number: Its number.
        is_merged: True if the server waits for the commit of the awaited number.
        is_committed: True once this worker has committed the awaited number.
        norm: Squared norm of the merged gradient.
        is_queued: True while the awaited push has not been handed to ZeroMQ.
        touched: Clock at the last message about the awaited value.
        queries: Number of queries since the push.
        waiting_for: Workers that the server waits for, by its last answer.
        unanswerable: Number of answers that asked for pushes that the log does not have.
        is_unconfirmed: True if a restarted server may lack pushes, and no value is awaited.
        replayed: Number of the last push that was sent again, while the server lacks pushes; or -1.
    """

    key: Key
    number: int = 0
    expected: int = -1
    value: memoryview | None = None
    value_number: int = 0
    is_merged: bool = False
    is_committed: bool = False
    norm: float = 0.0
    is_queued: bool = False
    touched: float = 0.0
    queries: int = 0
    waiting_for: tuple[int, ...] = ()
    unanswerable: int = 0
    is_unconfirmed: bool = False
    replayed: int = -1

    @property
    def is_pending(self) -> bool:
        """True if a value is awaited, or has arrived and was not landed."""
        return self.expected >= 0

    @property
    def is_awaited(self) -> bool:
        """True if a value is awaited that has not arrived."""
        return self.expected >= 0 and self.value is None


@dataclass
class Exchange:
    """Exchange of all keys.

    Attributes:
        job: Token of the job.
        worker: Index of this worker.
        incarnation: Number of this process; larger than those of earlier ones of the worker.
        keys: Exchange of each key.
        log: Pushes that a server may ask for again.
        bases: For each key, the number of the value from which this process has begun.
        is_synchronous: True under "bsp": servers need the pushes of predecessors, too.
        failure: Error that ended the exchange; None while it runs.
        progress: Clock at the last answer of a server, or at the start of the present wait.
        awaited: Keys whose values are awaited, by index.
        unmerged: Keys in `awaited` whose pushes are not known to be merged.
        pushed_bytes, pulled_bytes: Bytes of payloads so far, those sent again included.
    """

    job: bytes
    worker: int
    incarnation: int
    keys: list[KeyExchange]
    log: PushLog
    bases: list[int]
    is_synchronous: bool
    lock: threading.RLock = field(default_factory=threading.RLock)
    failure: PeerError | None = None
    progress: float = field(default_factory=time.monotonic)
    awaited: set[int] = field(default_factory=set)
    unmerged: set[int] = field(default_factory=set)
    pushed_bytes: int = 0
    pulled_bytes: int = 0

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self.lead = PushLead(1 + max((one.key.server for one in self.keys), default=0))

    def expect(self, key: int, number: int, *, is_queued: bool) -> None:
        """Await a value of a number; `is_queued` says that its push is still to be sent."""
        one = self.keys[key]
        one.expected, one.value, one.is_queued = number, None, is_queued
        one.is_merged = one.is_committed = one.is_unconfirmed = False
        one.touched = time.monotonic()
        one.queries = one.unanswerable = 0
        one.waiting_for = ()
        self.awaited.add(key)
        self.unmerged.add(key)

    def answered(self, key: int, *, has_value: bool) -> None:
        """Note that a key was merged, or that its value has arrived; wake the training thread if it
        may go on."""
        self.progress = time.monotonic()
        self.unmerged.discard(key)
        if has_value:
            self.awaited.discard(key)
        if not self.unmerged or not self.awaited:
            self.changed.notify_all()

    def land(self, parameters: KeyedParameters) -> None:
        """Copy all values that have arrived into the parameters."""
        with self.lock:
            landing = [(one, one.value) for one in self.keys if one.value is not None]
            with torch.no_grad():
                parameters.land((one.key, value) for one, value in landing)
            for one, _ in landing:
                one.value, one.expected = None, -1

    def owed_after(self, key: int, number: int) -> int:
        """Return the number after which a key's pushes must be sent to a server again.

        Args:
            key: Index of the key.
            number: Number of this worker's latest push that the server has. Except under "bsp", the
                server does not need the pushes of predecessors that it lacks.
        """
        return number if self.is_synchronous else max(number, self.bases[key])

    def request(self) -> protocol.Request:
        """Return the details of a request without arguments."""
        return protocol.Request(job=self.job, worker=self.worker, incarnation=self.incarnation)

    def key_request(self, key: int, number: int) -> protocol.KeyRequest:
        """Return the details of a request about a key."""
        return protocol.KeyRequest(
            job=self.job,
            worker=self.worker,
            incarnation=self.incarnation,
            key=key,
            number=number,
        )

    def content_request(
        self, key: int, number: int, numbers: Sequence[int]
    ) -> protocol.ContentRequest:
        """Return the details of a request for a key's parameter or optimizer state.

        Args:
            key: Index of the key.
            number: Number of this worker's push that must be in it.
            numbers: Those of all workers; empty if only `number` counts.
        """
        request = msgspec.structs.asdict(self.key_request(key, number))
        return protocol.ContentRequest(**request, numbers=list(numbers))

    def fail(self, error: PeerError) -> None:
        """End the exchange with an error, for all threads."""
        with self.lock:
            if self.failure is None:
                self.failure = error
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the error that has ended the exchange, if any.

        Raises:
            PeerError: If a server failed, or shut this process out.
        """
        if self.failure is not None:
            raise self.failure
