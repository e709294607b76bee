"""A process's end of its host's cache: asks for samples ahead of need, and lets go of them when
nothing looks at them any more, from whichever thread that happens in.
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
from lightning_dlres.core.wire.frames import Message
from lightning_dlres.core.wire.net import Client
from lightning_dlres.prefetch.cache import messages
from lightning_dlres.prefetch.cache.launch import HostProcess, error_of
from lightning_dlres.prefetch.cache.messages import Begin, HostConfig
from lightning_dlres.prefetch.cache.samples import Regions, Samples
from lightning_dlres.prefetch.order.sequence import Positions

_WAIT = 0.5
# Seconds besides the storage's own deadline, which comes first and says more.
_MARGIN = 5.0
# Seconds at least for what depends on the data set's size and not on the storage: the start of the
# process, and that of an epoch.
_LEAST_PATIENCE = 60.0
_LEAVE_SECONDS = 2.0
_MOST_JOINS = 5


class CacheClient:
    """A connection to the cache called `name` on this host; it is started where there is none.

    May be used from any thread, but not across a fork.

    Args:
        name: unique for the data set and the job on this host.
        config: of the cache; the same in all processes.

    Raises:
        ConfigError: the cache cannot be as it is asked for.
        PeerTimeoutError: the cache, or a storage node, does not answer.
    """

    def __init__(self, name: str, config: HostConfig) -> None:
        self._timeout = config.source.timeout + _MARGIN
        self._patience = max(self._timeout, _LEAST_PATIENCE)
        self._host = HostProcess(name, config)
        self._client, self.joined = self._join(messages.fingerprint(config))
        joined = self.joined
        try:
            self._regions = Regions(
                joined.cache_path, joined.cache_bytes, joined.kept_path, joined.kept_bytes
            )
        except OSError as error:
            self._client.close()
            raise PeerLostError(
                f"the memory of the cache of this host (process {joined.pid}): {error}. Has it "
                "just ended? Expected it to run, as this user."
            ) from error
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._generations = itertools.count()
        self._outgoing: deque[tuple[str, bytes]] = deque()
        self._released: deque[int] = deque()
        # The takes of which something may be left; for the thread alone.
        self._held: set[int] = set()
        self._takes: dict[int, Future[Samples]] = {}
        # Answers that name no take come in the order of the questions.
        self._questions: deque[Future[bytes]] = deque()
        self._lock = threading.Lock()
        self._lost: DlresError | None = None
        # Set by whoever closes, which may be the garbage collector: so it has no lock.
        self._is_closing = False
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlres-cache-client", daemon=True)
        self._thread.start()

    def begin(self, **arguments: Any) -> int:
        """Start an epoch, see `messages.Begin`; return its generation.

        Raises:
            ConfigError: other ranks start another epoch.
        """
        generation = next(self._generations)
        begin = Begin(generation=generation, **arguments)
        with self._lock:
            # What the epoch before has not delivered never comes.
            self._takes.clear()
        self._ask(messages.BEGIN, msgspec.msgpack.encode(begin))
        return generation

    def may_take(self, waiting: int, least: int) -> bool:
        """Return whether to take more, beside so many takes that wait; the cache does the rest."""
        return waiting < least

    def take(self, generation: int, positions: Positions) -> Future[Samples]:
        """Ask for samples; the future has them, or the error, within the deadline."""
        take, future = next(self._numbers), Future[Samples]()
        payload = messages.pack_take(take, generation, positions)
        with self._lock:
            if self._lost is not None:
                future.set_exception(self._lost)
                return future
            self._takes[take] = future
            self._outgoing.append((messages.TAKE, payload))
        self._client.interrupt()
        return future

    def wait(self, future: Future[Samples]) -> Samples:
        """Return what was asked for.

        Raises:
            StorageError: a sample cannot be had; it names the node and the sample.
            PeerError: the cache is gone, or does not answer.
        """
        try:
            return future.result(self._timeout)
        except TimeoutError:
            if future.done():
                raise
            raise self._silent("samples", self._timeout) from None

    def metrics(self) -> messages.Metrics:
        """Return what the cache has counted."""
        payload = self._ask(messages.METRICS, b"")
        return from_msgpack(payload, messages.Metrics)

    def close(self) -> None:
        """Leave the cache, which ends when the last process has left; may be called again."""
        self.leave()
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            # Whoever joins after this must not find this process still in an epoch.
            self._left.wait(2 * _LEAVE_SECONDS)
            # While something looks at samples the connection stays, and with it their place.
            self._thread.join(None if not self._held else 0.0)

    def leave(self) -> None:
        """Begin to leave, and wait for nothing: for the garbage collector, in any thread."""
        if os.getpid() == self._pid:
            self._is_closing = True
            self._client.interrupt()

    def _join(self, config: str) -> tuple[Client, messages.Joined]:
        for _ in range(_MOST_JOINS):
            self._host.ensure(self._patience)
            client = Client(
                f"pid {os.getpid()} {uuid.uuid4().hex[:8]}",
                f"ipc://{self._host.socket}",
                server="the cache of this host",
                monitor=True,
            )
            try:
                client.send(messages.JOIN, msgspec.msgpack.encode(messages.Join(config)))
                message = self._answer(client)
                if message is not None and message.kind == messages.FAILED:
                    raise error_of(message.decode(messages.Failed))
                if message is not None:
                    return client, message.decode(messages.Joined)
            except BaseException:
                client.close()
                raise
            client.close()
        raise PeerLostError(
            f"the process that keeps the cache ended {_MOST_JOINS} times while this one joined. "
            f"Its last words:\n{self._host.last_words()}"
        )

    def _answer(self, client: Client) -> Message | None:
        """Return the answer to a join; None if the cache has ended just now, since nobody used it:
        then the next one does not know of the join."""
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            message = client.receive(_WAIT)
            if message is not None:
                return message
            closed = any(not event.opened for event in client.connection_events())
            if closed or not self._host.runs():
                return client.receive(0.0)
        raise PeerTimeoutError(
            f"waited {self._patience:g} s to join the cache of this host. Its last words:\n"
            f"{self._host.last_words()}"
        )

    def _ask(self, kind: str, payload: bytes) -> bytes:
        answer = Future[bytes]()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._questions.append(answer)
            self._outgoing.append((kind, payload))
        self._client.interrupt()
        try:
            return answer.result(self._patience)
        except TimeoutError:
            raise self._silent(f"an answer to {kind!r}", self._patience) from None

    def _silent(self, what: str, seconds: float) -> PeerTimeoutError:
        return PeerTimeoutError(
            f"waited {seconds:g} s for {what} from the cache of this host (process "
            f"{self.joined.pid}). Its last words:\n{self._host.last_words()}"
        )

    def _release(self, take: int) -> None:
        """Note that nothing looks at a take any more; may run in the garbage collector, in any
        thread, so it takes no lock."""
        self._released.append(take)
        self._client.interrupt()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # nobody must wait for a thread that has ended
            self._fail(PeerLostError(f"the connection to the cache of this host: {error!r}"))
        finally:
            self._client.close()
            self._left.set()

    def _serve(self) -> None:
        leave_until: float | None = None
        while self._held or not self._left.is_set():
            try:
                if self._is_closing and leave_until is None:
                    leave_until = time.monotonic() + _LEAVE_SECONDS
                    self._outgoing.append((messages.LEAVE, b""))
                elif leave_until is not None and time.monotonic() > leave_until:
                    self._left.set()
                message = self._client.receive(0.0 if self._outgoing else _WAIT)
                if message is not None:
                    self._handle(message)
                if any(not event.opened for event in self._client.connection_events()):
                    raise PeerLostError(
                        f"the cache of this host (process {self.joined.pid}) has ended. Its last "
                        f"words:\n{self._host.last_words()}"
                    )
                self._send()
            except DlresError as error:
                self._fail(error)
                return
        self._fail(PeerLostError("the cache was left while something was asked of it."))

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
        if message.kind == messages.DELIVERY:
            delivered = messages.unpack_delivery(message.payload, message.peer)
            take = delivered.take
            self._held.add(take)
            samples = Samples(delivered, self._regions, lambda: self._release(take))
            with self._lock:
                future = self._takes.pop(take, None)
            # Of an epoch that was given up: gone with `samples`.
            if future is not None:
                future.set_result(samples)
        elif message.kind == messages.FAILED:
            failed = message.decode(messages.Failed)
            with self._lock:
                waiting: Future[Any] | None = self._takes.pop(failed.take, None)
                if waiting is None and failed.take < 0 and self._questions:
                    waiting = self._questions.popleft()
            if waiting is not None:
                waiting.set_exception(error_of(failed))
        elif message.kind == messages.LEFT:
            self._left.set()
        elif message.kind in (messages.BEGUN, messages.MEASURED):
            self._questions.popleft().set_result(message.payload)
        else:
            raise ProtocolError(f"{message.peer} sent {message.kind!r}, which is not known here.")

    def _fail(self, error: DlresError) -> None:
        with self._lock:
            self._lost = error
            waiting: list[Future[Any]] = [*self._takes.values(), *self._questions]
            self._takes.clear()
            self._questions.clear()
        for future in waiting:
            future.set_exception(error)
