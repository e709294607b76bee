"""Client of a host's cache: requests batches ahead of need, and releases them when no object of
this process looks at them any more.

The last object may go in any thread, the garbage collector's included.
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

from lightning_dlres.core.errors import DlresError, PeerLostError, PeerTimeoutError, ProtocolError
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.endpoint import Client, Message
from lightning_dlres.prefetch.cache import messages
from lightning_dlres.prefetch.cache.launch import HostProcess, error_of
from lightning_dlres.prefetch.cache.messages import Begin, HostConfig
from lightning_dlres.prefetch.cache.samples import Regions, Samples
from lightning_dlres.prefetch.cache.space.cache_space import EpochSlots

# Seconds that the thread waits for a message before it looks at its other tasks.
_POLL_SECONDS = 0.5
# Seconds beyond the storage's own deadline, whose error says more and shall come first.
_MARGIN_SECONDS = 5.0
# Shortest deadline, in seconds, for answers that take time in proportion to the data set and not to
# the storage's speed: the start of the process, and of an epoch.
_MIN_ANSWER_SECONDS = 60.0
# Seconds for the cache to confirm that this process has left.
_LEAVE_SECONDS = 2.0
# Attempts to join, each with another cache process: the one before may end at the same moment.
_MAX_JOINS = 5


class CacheClient:
    """Connection to the cache called `name` on this host; the cache is started if there is none.

    It may be used from any thread, but not after a fork.

    A background thread does all sending and receiving. `_lock` guards what it shares with callers:
    `_pending`, `_answers` and `_lost_error`. `_outgoing` and `_released` need no lock, because a
    deque's `append` and `popleft` are atomic; the garbage collector may call `_release` in a thread
    that holds the lock.

    Args:
        name: Unique for the data set and the job on this host.
        config: Configuration of the cache, the same in all processes.

    Raises:
        ConfigError: If the cache cannot be configured like this.
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
        # Kind and payload of messages to send.
        self._outgoing: deque[tuple[str, bytes]] = deque()
        # The request_id of batches to release.
        self._released: deque[int] = deque()
        # The request_id of batches that are delivered and not released; only for the thread.
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
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlres-cache-client", daemon=True)
        self._thread.start()

    def begin_epoch(self, **arguments: Any) -> int:
        """Begin an epoch; arguments as for `messages.Begin`. Return its epoch_id.

        Raises:
            ConfigError: If other ranks have begun another epoch under this epoch_id.
        """
        epoch_id = next(self._epoch_ids)
        begin = Begin(epoch_id=epoch_id, **arguments)
        with self._lock:
            # Batches of the epoch before that are not delivered will never be.
            self._pending.clear()
        self._call(messages.BEGIN, msgspec.msgpack.encode(begin))
        return epoch_id

    def may_request(self, waiting: int, most: int) -> bool:
        """Return true if one more batch may be requested beside `waiting` ones, of `most`; the
        cache itself bounds the bytes."""
        return waiting < most

    def request_batch(self, epoch_id: int, epoch_slots: EpochSlots) -> Future[Samples]:
        """Request the samples of some epoch slots (uint32[n]). The future gets them, or the error,
        within the deadline."""
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
            StorageError: If a sample cannot be had; it names the node and the sample.
            PeerError: If the cache has ended, or does not answer.
        """
        try:
            return future.result(self._batch_seconds)
        except TimeoutError:
            if future.done():
                # The storage's own timeout.
                raise
            raise self._timeout_error("samples", self._batch_seconds) from None

    def metrics(self) -> messages.Metrics:
        """Return the metrics of the cache."""
        payload = self._call(messages.METRICS, b"")
        return from_msgpack(payload, messages.Metrics)

    def close(self) -> None:
        """Leave the cache, which ends when the last process has left. May be called again."""
        self.leave()
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            # A process that joins after this call must not find this one still in an epoch.
            self._left.wait(2 * _LEAVE_SECONDS)
            # While an object looks at samples the connection stays: it keeps them in place.
            self._thread.join(None if not self._held else 0.0)

    def leave(self) -> None:
        """Begin to leave, without waiting; for the garbage collector, in any thread."""
        if os.getpid() == self._pid:
            self._is_closing = True
            self._client.interrupt()

    def _join(self, config: str) -> tuple[Client, messages.Joined]:
        for _ in range(_MAX_JOINS):
            self._host.ensure(self._answer_seconds)
            client = Client(
                f"pid {os.getpid()} {uuid.uuid4().hex[:8]}",
                f"ipc://{self._host.socket}",
                server="the cache of this host",
                monitor=True,
            )
            try:
                client.send(messages.JOIN, msgspec.msgpack.encode(messages.Join(config)))
                message = self._receive_answer(client)
                if message is not None and message.kind == messages.FAILED:
                    raise error_of(message.decode(messages.Failed))
                if message is not None:
                    return client, message.decode(messages.Joined)
            except BaseException:
                client.close()
                raise
            client.close()
        raise PeerLostError(
            f"The process that keeps the cache ended {_MAX_JOINS} times while this one joined. "
            f"The end of its log:\n{self._host.log_tail()}"
        )

    def _receive_answer(self, client: Client) -> Message | None:
        """Return the answer to a join. None: the cache has just ended, because no process used it;
        the next one does not know of the join."""
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

    def _call(self, kind: str, payload: bytes) -> bytes:
        """Send a request and return the payload of its answer."""
        answer = Future[bytes]()
        with self._lock:
            if self._lost_error is not None:
                raise self._lost_error
            self._answers.append(answer)
            self._outgoing.append((kind, payload))
        self._client.interrupt()
        try:
            return answer.result(self._answer_seconds)
        except TimeoutError:
            raise self._timeout_error(f"the answer to {kind!r}", self._answer_seconds) from None

    def _timeout_error(self, subject: str, seconds: float) -> PeerTimeoutError:
        return PeerTimeoutError(
            f"The cache of this host (process {self.joined.pid}) did not send {subject} within "
            f"{seconds:g} s. The end of its log:\n{self._host.log_tail()}"
        )

    def _release(self, request_id: int) -> None:
        """Note that no object looks at a batch any more. This may run in the garbage collector, in
        a thread that holds the lock, so it takes none."""
        self._released.append(request_id)
        self._client.interrupt()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # callers must not wait for a thread that has ended
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
            batch = messages.unpack_batch_reply(message.payload, message.peer)
            request_id = batch.request_id
            self._held.add(request_id)
            samples = Samples(batch, self._regions, lambda: self._release(request_id))
            with self._lock:
                future = self._pending.pop(request_id, None)
            # Without a future the batch is of an aborted epoch: it is released with `samples`.
            if future is not None:
                future.set_result(samples)
        elif message.kind == messages.FAILED:
            failed = message.decode(messages.Failed)
            with self._lock:
                waiting: Future[Any] | None = self._pending.pop(failed.request_id, None)
                if waiting is None and failed.request_id < 0 and self._answers:
                    waiting = self._answers.popleft()
            if waiting is not None:
                waiting.set_exception(error_of(failed))
        elif message.kind == messages.LEFT:
            self._left.set()
        elif message.kind in (messages.BEGUN, messages.MEASURED):
            self._answers.popleft().set_result(message.payload)
        else:
            raise ProtocolError(f"{message.peer} sent an unknown message, {message.kind!r}.")

    def _fail(self, error: DlresError) -> None:
        """Fail all pending and all later requests."""
        with self._lock:
            self._lost_error = error
            waiting: list[Future[Any]] = [*self._pending.values(), *self._answers]
            self._pending.clear()
            self._answers.clear()
        for future in waiting:
            future.set_exception(error)
