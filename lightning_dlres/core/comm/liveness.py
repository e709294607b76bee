"""Failure detection for a group of ranks, so that no rank waits for a lost one.

A collective cannot tell a slow peer from a dead one: gloo and NCCL wait for minutes, and their
error names no rank. A `Watch` runs beside the training in a thread. Rank 0 is the hub of a star.
Each other rank sends it heartbeats and gets answers (see `heartbeat`). The hub tells all others of
a lost rank:

- at once, if the rank announces its failure;
- within a few heartbeats, if its connection closed without a goodbye (it was killed);
- after `deadline`, if it is silent although its connection is open (it hangs, or its host or
  network is down). A busy rank keeps its connection, so it has the whole deadline.

The watch of a rank that learns of a failure calls `report`, which prints a line by default. The
process then has `grace` seconds to end by itself. After that the watch ends it, since a main thread
inside a collective may never see an exception.

Processes that a rank has forked (DataLoader workers) keep its connection open: if it is killed,
it then looks like one that hangs. After rank 0 has closed its watch, no failure is detected.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from lightning_dlres.core.comm.heartbeat import (
    ABORT,
    GOODBYE,
    HeartbeatTimeouts,
    Hub,
    Invitation,
    Member,
    RankFailure,
    WatchEndpoint,
    identity,
)
from lightning_dlres.core.errors import (
    ConfigError,
    PeerLostError,
    ProtocolError,
    announced,
    announcement,
    got_expected,
)
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.core.wire.message import Message
from lightning_dlres.core.wire.server import Server, SocketLimits, is_loopback

__all__ = ["RankFailure", "Watch"]

_log = logging.getLogger(__name__)

# Seconds that `announce` and `close` wait for confirmations of the other ranks.
FLUSH_SECONDS = 1.0
# Most characters of a failure's text that are sent. The text may hold a whole log.
_MAX_TEXT_LENGTH = 64 << 10
_LIMITS = SocketLimits(frame_bytes=1 << 20, unread_bytes=64 << 20, connections=4096, queued=1000)


class Watch:
    """Watches the ranks of a run; made by `host` on rank 0 and by `join` on the others.

    All times are in seconds. Public methods may be called from any thread.

    Args:
        endpoint: This rank's end of the star.
        invitation: Encoded invitation of the run.
        timeouts: Interval of heartbeats, and the deadline by which silence becomes a failure.
        grace: Time between a failure and the call of `kill`. `kill` is not called after `close`.
        report: Called once, with the failure's message, from the watch's thread, before `failure`
            is set. It must not call the watch. None writes a line to stderr.
        kill: Ends the process. None: `os._exit(1)`.
        parent: Process id of rank 0 if it has started this process, else None.

    Attributes:
        names: Names of all ranks in messages.
        rank: This rank.
        invitation: Encoded invitation, for the other ranks to join.
        failed: Event that is set with `failure`.
        calls: Numbers of collective calls, which the user of the watch counts.
    """

    def __init__(
        self,
        *,
        endpoint: WatchEndpoint,
        invitation: bytes,
        timeouts: HeartbeatTimeouts,
        grace: float,
        report: Callable[[str], None] | None,
        kill: Callable[[], None] | None,
        parent: int | None,
    ) -> None:
        self.names, self.rank, self.calls = endpoint.names, endpoint.rank, endpoint.calls
        self.invitation = invitation
        self.failed = threading.Event()
        self._endpoint = endpoint
        self._timeouts = timeouts
        self._grace = grace
        self._report, self._kill = report or _to_stderr, kill or _exit
        self._parent = parent
        # Failure that the watch's thread has learnt of, and the one that this rank has announced.
        self._failure: RankFailure | None = None
        self._announcement: RankFailure | None = None
        # True once the watch's thread has handled a failure of any rank.
        self._is_failure_handled = False
        self._confirmed = threading.Event()
        self._closing = threading.Event()
        # Time at which the wait for confirmations of the goodbye ends; None before `close`. Time at
        # which `kill` is called; None without a failure.
        self._flush_until: float | None = None
        self._kill_at: float | None = None
        self._last_event_time = self._next_heartbeat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dlres-watch", daemon=True)
        self._thread.start()

    @classmethod
    def host(
        cls,
        names: Sequence[str],
        *,
        bind: str = "127.0.0.1",
        deadline: float = 10.0,
        grace: float = 5.0,
        report: Callable[[str], None] | None = None,
        kill: Callable[[], None] | None = None,
    ) -> Watch:
        """Start the watch of rank 0, which is the hub.

        Give its `invitation` to the other ranks over a trusted channel: it holds the keys of the
        run. A rank has 60 s to join, or `deadline` if that is longer.

        Args:
            names: Names of all ranks in messages, by rank.
            bind: Numeric address at which the other ranks reach this host. Traffic is encrypted
                unless it is a loopback address.
            deadline: Silence after which a rank counts as lost.
            grace, report, kill: See `Watch`.

        Raises:
            ConfigError: If there are no names, or more than this process can connect; if a time is
                too short or infinite, or this host cannot listen at the address.
        """
        _check_times(deadline, grace)
        if not names:
            raise ConfigError(got_expected("names", names, "a name for every rank", '["rank 0"]'))
        if bind in ("0.0.0.0", "::", "*"):
            expected = "an address that the other ranks can connect to"
            raise ConfigError(got_expected("bind", bind, expected, "the address in `ip address`"))
        server_keys = client_keys = None
        if not is_loopback(bind):
            server_keys, client_keys = CurveKeys.generate(), CurveKeys.generate()
        server = Server(
            bind=bind,
            curve=server_keys,
            allowed=[client_keys.public] if client_keys else [],
            limits=_LIMITS.for_clients(len(names) - 1, "other ranks"),
            monitor=True,
        )
        server.refusals.log = _log.warning
        invitation = Invitation(
            address=server.address,
            names=list(names),
            token=secrets.token_bytes(32),
            deadline=deadline,
            server_key=server_keys.public if server_keys else b"",
            client_public=client_keys.public if client_keys else b"",
            client_secret=client_keys.secret if client_keys else b"",
        )
        return cls(
            endpoint=Hub(server, invitation),
            invitation=msgspec.msgpack.encode(invitation),
            timeouts=HeartbeatTimeouts.of(deadline),
            grace=grace,
            report=report,
            kill=kill,
            parent=None,
        )

    @classmethod
    def join(
        cls,
        rank: int,
        invitation: bytes,
        *,
        deadline: float | None = None,
        grace: float = 5.0,
        report: Callable[[str], None] | None = None,
        kill: Callable[[], None] | None = None,
        watch_parent: int | None = None,
    ) -> Watch:
        """Start the watch of another rank, without waiting for the hub.

        Args:
            rank: This rank.
            invitation: Invitation from rank 0.
            deadline: Silence after which the hub counts as lost. None: the hub's own deadline.
            grace, report, kill: See `Watch`.
            watch_parent: Process id of rank 0 if it has started this process. The hub then counts
                as lost when the parent of this process changes, too.

        Raises:
            ConfigError: If the invitation is not for this rank, or a time is too short or infinite.
            ProtocolError: If the invitation cannot be decoded.
        """
        try:
            decoded = from_msgpack(invitation, Invitation)
        except msgspec.MsgspecError as error:
            raise ProtocolError(
                "the invitation must be the bytes of rank 0's `Watch.invitation`; they cannot be "
                f"decoded ({error}). Pass them on unchanged, between ranks of one version."
            ) from error
        own_deadline = decoded.deadline if deadline is None else deadline
        _check_times(own_deadline, grace)
        if not 0 < rank < len(decoded.names):
            expected = f"1 to {len(decoded.names) - 1}"
            raise ConfigError(got_expected("rank", rank, expected, "Watch.host on rank 0"))
        keys = None
        if decoded.server_key:
            keys = CurveKeys(decoded.client_public, decoded.client_secret)
        client = Client(
            identity(rank, decoded.token),
            decoded.address,
            server=decoded.names[0],
            curve=keys,
            server_key=decoded.server_key or None,
            max_frame_bytes=_LIMITS.frame_bytes,
            send_timeout=0.0,
            monitor=True,
        )
        # Heartbeats must be frequent enough for the hub, even if this rank's deadline is longer.
        interval = HeartbeatTimeouts.of(min(own_deadline, decoded.deadline)).interval
        return cls(
            endpoint=Member(rank, client, decoded),
            invitation=invitation,
            timeouts=HeartbeatTimeouts(own_deadline, interval),
            grace=grace,
            report=report,
            kill=kill,
            parent=watch_parent,
        )

    @property
    def failure(self) -> RankFailure | None:
        """First failure of another rank, or of this one if the others gave up on it or its watch
        failed; kept after `close`. A failure that this rank announces is not included."""
        return self._failure

    def rename(self, names: Sequence[str]) -> None:
        """Replace the names of the ranks in messages."""
        self.names[:] = names

    def check(self) -> None:
        """Raise the error of `failure`, if there is one; do nothing after `close`.

        Raises:
            PeerLostError: If a rank has failed; the message names it.
        """
        if self._failure is not None and not self._closing.is_set():
            is_own = self._failure.origin == self.rank
            raise (PeerLostError if is_own else announced)(self._failure.message)

    def count_signal(self, number: int) -> None:
        """Count a signal that this process has received; the next heartbeat carries the count to
        the hub. It takes no lock, so a signal handler may call it."""
        own = self._endpoint.signals
        self._endpoint.signals = {**own, number: own.get(number, 0) + 1}

    def signal_counts(self) -> dict[int, int]:
        """Return the largest known count of each signal on any rank, by signal number. A count
        reaches the hub with the next heartbeat, and other ranks with the one after it."""
        return self._endpoint.signal_counts()

    def announce(self, error: str | BaseException) -> None:
        """Tell all other ranks that this one has failed, and why; return within about a second.

        Only the first failure of a run counts: nothing is sent if another one is known. Nothing is
        sent after `close` either.
        """
        if self._failure is None and self._announcement is None and not self._closing.is_set():
            text = announcement(self.names[self.rank], error)[:_MAX_TEXT_LENGTH]
            self._announcement = RankFailure(self.rank, text)
            self._endpoint.interrupt()
            self._confirmed.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """End the watch with a goodbye, so that the silence of this rank is no failure.

        It waits for confirmations, for about a second at most. Further calls do nothing.
        """
        self._closing.set()
        self._endpoint.interrupt()
        self._thread.join(2 * FLUSH_SECONDS)
        if self._thread.is_alive():
            _log.warning("the watch's thread is still reporting; it ends with the process")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._is_finished():
                self._handle_next_event()
        except Exception as error:
            # Without a watch, a failure would go unnoticed. So an error in the watch is a failure
            # of this rank.
            _log.exception("the watch failed")
            message = f"the watch of {self.names[self.rank]} failed: {error!r}"
            self._publish(RankFailure(self.rank, message))
            if not self._closing.wait(self._grace):
                self._kill_process()
        finally:
            self._endpoint.close()

    def _is_finished(self) -> bool:
        if self._flush_until is None:
            return False
        flushed = all(peer.is_flushed for peer in self._endpoint.peers)
        return flushed or time.monotonic() >= self._flush_until

    def _handle_next_event(self) -> None:
        """Wait for a message, at most until something else is due, and act on both."""
        wait = self._seconds_to_next_event()
        message = self._receive(wait)
        now = time.monotonic()
        self._discount_pause(now - self._last_event_time - wait)
        self._last_event_time = now
        if message is not None:
            self._handle(message, now)
        self._endpoint.update_connections(now)
        self._handle_requests(now)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._timeouts.interval
            self._endpoint.send_heartbeat()
        # Judge silence only when no message is queued: the next one may be of a silent peer.
        if message is None and not self._is_failure_handled and not self._closing.is_set():
            failure = self._endpoint.find_failure(self._timeouts, now) or self._parent_failure()
            if failure is not None:
                self._handle_failure(failure)
        if self._kill_at is not None and now >= self._kill_at and not self._closing.is_set():
            self._kill_at = None
            self._kill_process()

    def _seconds_to_next_event(self) -> float:
        times = [self._next_heartbeat]
        times += [t for t in (self._kill_at, self._flush_until) if t is not None]
        return max(0.0, min(times) - time.monotonic())

    def _receive(self, wait: float) -> Message | None:
        try:
            return self._endpoint.receive(wait)
        except ProtocolError as error:
            self._endpoint.refusals.note(error)
            return None

    def _handle(self, message: Message, now: float) -> None:
        try:
            failure = self._endpoint.handle(message, now)
        except ProtocolError as error:
            self._endpoint.refusals.note(error)
            return
        if failure is not None and failure.origin == self.rank:
            reason = f"the other ranks gave up on this one: {failure.message}"
            failure = RankFailure(self.rank, reason)
        if failure is not None:
            self._handle_failure(failure)

    def _discount_pause(self, late: float) -> None:
        """Leave out time in which this process was stopped or got no CPU time: the other ranks may
        have sent heartbeats in it. `late` are the seconds by which this thread woke up late."""
        if late > self._timeouts.interval:
            for peer in self._endpoint.peers:
                peer.discount_pause(late)

    def _handle_requests(self, now: float) -> None:
        """Act on `announce` and `close`, which other threads call."""
        if self._announcement is not None and not self._is_failure_handled:
            self._is_failure_handled = True
            self._endpoint.broadcast(ABORT, self._announcement)
        if self._is_failure_handled and all(peer.is_flushed for peer in self._endpoint.peers):
            self._confirmed.set()
        if self._closing.is_set() and self._flush_until is None:
            self._flush_until = now + FLUSH_SECONDS
            self._endpoint.broadcast(GOODBYE)

    def _parent_failure(self) -> RankFailure | None:
        """Return the failure of the hub if it was the parent of this process and is gone."""
        hub = self._endpoint.peers[0] if self._parent is not None else None
        if hub is None or hub.left or os.getppid() == self._parent:
            return None
        hub.lost = True
        return RankFailure(0, f"{self.names[0]} is gone: this process has lost its parent")

    def _handle_failure(self, failure: RankFailure) -> None:
        """Publish and forward the first failure; drop later ones, which follow from it."""
        if not self._is_failure_handled:
            self._is_failure_handled = True
            self._publish(failure)
            self._endpoint.forward_failure(failure)

    def _publish(self, failure: RankFailure) -> None:
        """Report a failure, and make it visible to other threads."""
        if self._closing.is_set():
            return
        # Report before the failure is visible: a thread that sees it may end the process at once.
        try:
            self._report(failure.message)
        except Exception:
            # Ending the run matters more than the report.
            _log.exception("reporting failed: %s", failure.message)
        self._failure = failure
        self._kill_at = time.monotonic() + self._grace
        self.failed.set()

    def _kill_process(self) -> None:
        waited = format_seconds(self._grace)
        try:
            name = self.names[self.rank]
            _to_stderr(f"{name} did not end within {waited} after the failure; ending it")
        finally:
            self._kill()


def _to_stderr(message: str) -> None:
    sys.stderr.write(f"dlres: {message}\n")
    sys.stderr.flush()


def _exit() -> None:
    os._exit(1)


def _check_times(deadline: float, grace: float) -> None:
    for name, value, least in (("deadline", deadline, 0.1), ("grace", grace, 0.0)):
        if not least <= value < float("inf"):
            raise ConfigError(got_expected(name, value, f"finite and at least {least} s", "10.0"))
