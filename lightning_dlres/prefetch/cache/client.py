"""Client of a host's cache.

The loader requests batches through it, ahead of need. The client releases a batch when no object of
this process refers to the batch any more. The last reference may end in any thread, because the
garbage collector runs in any.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import uuid
from collections import deque
from concurrent.futures import Future
from typing import Any

import msgspec

from lightning_dlres.core.errors import (
    DlresError,
    EpochTakenError,
    PeerLostError,
    PeerTimeoutError,
    error_named,
)
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.message import Message, protocol_error
from lightning_dlres.prefetch.cache import messages
from lightning_dlres.prefetch.cache.launch import HostProcess
from lightning_dlres.prefetch.cache.messages import Begin, HostConfig
from lightning_dlres.prefetch.cache.samples import Regions, Samples
from lightning_dlres.prefetch.cache.space.cache_space import EpochSlots

# Variables by which launchers tell jobs apart. All ranks of a job have the same values.
_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_PORT")
# Seconds that the background thread waits for a message before its other tasks.
_POLL_SECONDS = 0.5
# Seconds that a batch may take beyond the timeout of the storage. The storage's error says more,
# so it should come first.
_MARGIN_SECONDS = 5.0
# Minimum deadline, in seconds, for the start of the process and of an epoch. Their time grows with
# the data set and does not depend on the storage.
_MIN_ANSWER_SECONDS = 60.0
# Seconds that processes of an earlier job have to leave the cache, and seconds between two attempts
# to begin an epoch while they are there.
_TAKEN_SECONDS, _RETRY_SECONDS = 5.0, 0.05
# Seconds that the cache has to confirm a leave.
_LEAVE_SECONDS = 2.0
# Maximum number of attempts to join. A cache process may end while this process joins it.
_MAX_JOINS = 5


class CacheClient:
    """Connection to a cache of this host, which is started if it does not run.

    Any thread may use the client, but not a forked process.

    A background thread does all sending and receiving. `_lock` guards what it shares with callers:
    `_pending`, `_answers` and `_lost_error`. `_outgoing` and `_released` need no lock, because a
    deque's `append` and `popleft` are atomic; the garbage collector may call `_release` in a thread
    that holds the lock.

    Args:
        name: Name of the cache, unique for the data set and the job on this host.
        config: Configuration of the cache, the same in all processes.

    Raises:
        ConfigError: If the cache refuses the configuration.
        PeerTimeoutError: If the cache, or a storage node, does not answer.
    """

    def __init__(self, name: str, config: HostConfig) -> None:
        self._batch_seconds = config.source.timeout + _MARGIN_SECONDS
        self._answer_seconds = max(self._batch_seconds, _MIN_ANSWER_SECONDS)
        self._host = HostProcess(name, config)
        self._client, self.joined = self._join(messages.fingerprint(config))
        joined = self.joined
        try:
            self._regions = Regions(
                joined.cache_path, joined.cache_bytes, joined.pinned_path, joined.pinned_bytes
            )
        except OSError as error:
            self._client.close()
            raise PeerLostError(
                f"The memory of the cache of this host (process {joined.pid}) must be readable by "
                f"this user, got: {error}. Start again if the cache has just ended."
            ) from error
        self._pid = os.getpid()
        self._request_ids = itertools.count()
        self._epoch_ids = itertools.count()
        # Messages to send, as (kind, payload).
        self._outgoing: deque[tuple[str, bytes]] = deque()
        # The request_id of batches to release.
        self._released: deque[int] = deque()
        # The request_id of batches that are delivered and not released. Only the background thread
        # uses it.
        self._held: set[int] = set()
        # Batch requests without a reply, by request_id.
        self._pending: dict[int, Future[Samples]] = {}
        # Answers that carry no request_id come in the order of their requests.
        self._answers: deque[Future[bytes]] = deque()
        self._lock = threading.Lock()
        # Set once the connection is lost: the error of every later call.
        self._lost_error: DlresError | None = None
        # Set by `leave`, which may run in the garbage collector and so must take no lock.
        self._is_closing = False
        # Set once the cache has confirmed that this process has left, once it has not done so in
        # time, or once the thread has ended.
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlres-cache-client", daemon=True)
        self._thread.start()

    def begin_epoch(self, **arguments: Any) -> int:
        """Begin an epoch and return its epoch_id. The arguments are those of `messages.Begin`.

        Processes of an earlier job, which has been killed or has failed, may still use the cache.
        This waits a few seconds for them to leave.

        Raises:
            EpochTakenError: If other processes use this epoch_id for another epoch.
        """
        epoch_id = next(self._epoch_ids)
        begin = Begin(epoch_id=epoch_id, job=_job(), **arguments)
        with self._lock:
            # The cache delivers no more batches of the epoch before.
            self._pending.clear()
        deadline = time.monotonic() + _TAKEN_SECONDS
        while True:
            try:
                self._call(messages.BEGIN, msgspec.msgpack.encode(begin), self._answer_seconds)
                return epoch_id
            except EpochTakenError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    def may_request(self, waiting: int, max_waiting: int) -> bool:
        """Return True if one more batch may be requested.

        Only the number of batches counts: the process that keeps the cache limits their bytes.

        Args:
            waiting: Number of requested batches that the loader has not passed on yet.
            max_waiting: Maximum number of such batches.
        """
        return waiting < max_waiting

    def request_batch(self, epoch_id: int, epoch_slots: EpochSlots) -> Future[Samples]:
        """Request the samples of epoch slots, uint32[n].

        The future gets the samples or the error.
        """
        request_id, future = next(self._request_ids), Future[Samples]()
        payload = messages.pack_batch_request(request_id, epoch_id, epoch_slots)
        with self._lock:
            if self._lost_error is not None:
                future.set_exception(self._lost_error)
                return future
            self._pending[request_id] = future
            self._outgoing.append((messages.BATCH_REQUEST, payload))
        self._client.interrupt()
        return future

    def wait(self, future: Future[Samples]) -> Samples:
        """Return the samples of a batch request.

        Raises:
            StorageError: If a sample cannot be read. The message names the node and the sample.
            PeerError: If the cache has ended, or does not answer.
        """
        try:
            return future.result(self._batch_seconds)
        except TimeoutError:
            if future.done():
                # The cache answered with a TimeoutError of its own: the storage timed out.
                raise
            raise self._timeout_error("samples", self._batch_seconds) from None

    def metrics(self) -> messages.Metrics:
        """Return the metrics of the cache."""
        payload = self._call(messages.METRICS, b"", self._batch_seconds)
        return from_msgpack(payload, messages.Metrics)

    def close(self) -> None:
        """Leave the cache, which ends when the last process has left. A second call does
        nothing."""
        self.leave()
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            # The next process to join counts its epochs from 0. Until this process has left, that
            # would clash with the epochs of this one.
            self._left.wait(2 * _LEAVE_SECONDS)
            # Do not wait for the thread while an object refers to samples. The thread then keeps
            # the connection open, so that the cache keeps the samples in place.
            self._thread.join(None if not self._held else 0.0)

    def leave(self) -> None:
        """Begin to leave and return at once. The garbage collector may call this in any thread."""
        if os.getpid() == self._pid:
            self._is_closing = True
            self._client.interrupt()

    def _join(self, fingerprint: str) -> tuple[Client, messages.Joined]:
        for _ in range(_MAX_JOINS):
            self._host.ensure(self._answer_seconds)
            client = Client(
                f"pid {os.getpid()} {uuid.uuid4().hex[:8]}",
                f"ipc://{self._host.socket}",
                server="the cache of this host",
                monitor=True,
            )
            try:
                client.send(messages.JOIN, msgspec.msgpack.encode(messages.Join(fingerprint)))
                message = self._receive_answer(client)
                if message is not None and message.kind == messages.FAILED:
                    failed = message.decode(messages.Failed)
                    raise error_named(failed.error, failed.text)
                if message is not None:
                    return client, message.decode(messages.Joined)
            except BaseException:
                client.close()
                raise
            client.close()
        raise PeerLostError(
            f"The cache of this host must run until this process has joined; it ended before that "
            f"{_MAX_JOINS} times. The end of its log:\n{self._host.log_tail()}"
        )

    def _receive_answer(self, client: Client) -> Message | None:
        """Return the answer to a join.

        Returns:
            None if the cache has just ended, because no process used it. Then join the next one.
        """
        deadline = time.monotonic() + self._answer_seconds
        while time.monotonic() < deadline:
            message = client.receive(_POLL_SECONDS)
            if message is not None:
                return message
            closed = any(not event.opened for event in client.connection_events())
            if closed or not self._host.runs():
                return client.receive(0.0)
        raise PeerTimeoutError(
            f"The cache of this host did not answer a join within {self._answer_seconds:g} s. The "
            f"end of its log:\n{self._host.log_tail()}"
        )

    def _call(self, kind: str, payload: bytes, seconds: float) -> bytes:
        """Send a request and return the payload of its answer, which comes within `seconds`."""
        answer = Future[bytes]()
        with self._lock:
            if self._lost_error is not None:
                raise self._lost_error
            self._answers.append(answer)
            self._outgoing.append((kind, payload))
        self._client.interrupt()
        try:
            return answer.result(seconds)
        except TimeoutError:
            raise self._timeout_error(f"the answer to {kind!r}", seconds) from None

    def _timeout_error(self, subject: str, seconds: float) -> PeerTimeoutError:
        return PeerTimeoutError(
            f"The cache of this host (process {self.joined.pid}) did not send {subject} within "
            f"{seconds:g} s. The end of its log:\n{self._host.log_tail()}"
        )

    def _release(self, request_id: int) -> None:
        """Release a batch to which no object refers any more.

        This takes no lock: the garbage collector may run it in a thread that holds the lock.
        """
        self._released.append(request_id)
        self._client.interrupt()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # pending calls would wait forever
            self._fail(PeerLostError(f"The connection to the cache of this host failed: {error!r}"))
        finally:
            self._client.close()
            self._left.set()

    def _serve(self) -> None:
        leave_until: float | None = None
        # After leaving, the connection stays until the last batch is released.
        while self._held or not self._left.is_set():
            try:
                if self._is_closing and leave_until is None:
                    leave_until = time.monotonic() + _LEAVE_SECONDS
                    self._outgoing.append((messages.LEAVE, b""))
                elif leave_until is not None and time.monotonic() > leave_until:
                    self._left.set()
                message = self._client.receive(0.0 if self._outgoing else _POLL_SECONDS)
                if message is not None:
                    self._handle(message)
                if any(not event.opened for event in self._client.connection_events()):
                    raise PeerLostError(
                        f"The cache of this host (process {self.joined.pid}) has ended. The end of "
                        f"its log:\n{self._host.log_tail()}"
                    )
                self._send()
            except DlresError as error:
                self._fail(error)
                return
        self._fail(PeerLostError("This process left the cache while a request was pending."))

    def _send(self) -> None:
        released = []
        while self._released:
            released.append(self._released.popleft())
        self._held.difference_update(released)
        if released:
            self._client.send(messages.RELEASE, messages.pack_release(released))
        while self._outgoing:
            self._client.send(*self._outgoing.popleft())

    def _handle(self, message: Message) -> None:
        if message.kind == messages.BATCH_REPLY:
            batch = messages.unpack_batch_reply(bytes(message.payload), message.peer)
            request_id = batch.request_id
            self._held.add(request_id)
            samples = Samples(batch, self._regions, lambda: self._release(request_id))
            with self._lock:
                future = self._pending.pop(request_id, None)
            # Without a future, the batch belongs to an aborted epoch. Then the end of `samples`
            # releases it.
            if future is not None:
                future.set_result(samples)
        elif message.kind == messages.FAILED:
            failed = message.decode(messages.Failed)
            with self._lock:
                waiting: Future[Any] | None = self._pending.pop(failed.request_id, None)
                if waiting is None and failed.request_id < 0 and self._answers:
                    waiting = self._answers.popleft()
            if waiting is not None:
                waiting.set_exception(error_named(failed.error, failed.text))
        elif message.kind == messages.LEFT:
            self._left.set()
        elif message.kind in (messages.BEGUN, messages.MEASURED):
            self._answers.popleft().set_result(bytes(message.payload))
        else:
            raise protocol_error(message.peer, f"{message.kind!r}", "a kind of `cache.messages`")

    def _fail(self, error: DlresError) -> None:
        """Fail all pending and all later requests."""
        with self._lock:
            self._lost_error = error
            waiting: list[Future[Any]] = [*self._pending.values(), *self._answers]
            self._pending.clear()
            self._answers.clear()
        for future in waiting:
            future.set_exception(error)


def _job() -> str:
    return " ".join(os.environ.get(name, "") for name in _JOB_VARIABLES)
