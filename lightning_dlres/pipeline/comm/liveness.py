"""RankFailure detection for a group of ranks, so that no rank waits for one that is gone.

A collective cannot tell a slow peer from a dead one: gloo and NCCL wait for minutes, and then name
nobody. A `Watch` runs beside the training in a thread of its own. Rank 0 is the hub of a star; each
other rank sends it a heartbeat and gets an answer (see `heartbeat`). The hub tells everyone which
rank is lost:

- at once, where a rank announces that it gives up;
- within a few heartbeats, where its connection closed without a goodbye (it was killed);
- after `deadline`, where it is silent although its connection stands (it hangs, or its machine or
  network is gone). A rank that is busy keeps its connection, so it has the whole deadline.

A rank that learns of a failure says so first, then has `grace` seconds to end in its own way, and
is ended if it does not: a main thread inside a collective may never see an exception.

Processes that a rank has forked (workers of a DataLoader) keep its connection open until they end
too; until then a killed rank looks like one that hangs, and is found by the deadline.
Once rank 0 has closed its watch, nobody watches any more.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from lightning_dlres.core.errors import (
    ConfigError,
    PeerLostError,
    ProtocolError,
    got_expected,
    text_of,
)
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.frames import Message
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.core.wire.net import Client, Server, SocketLimits, is_loopback
from lightning_dlres.pipeline.comm.heartbeat import (
    ABORT,
    GOODBYE,
    HeartbeatPatience,
    Hub,
    Invitation,
    Member,
    RankFailure,
    Side,
    identity,
)

__all__ = ["RankFailure", "Watch"]

_log = logging.getLogger(__name__)

# How long `announce` and `close` wait for the others to confirm.
FLUSH_SECONDS = 1.0
# Of the text of a failure, which may hold a whole log.
_LONGEST_TEXT = 64 << 10
_LIMITS = SocketLimits(message_bytes=1 << 20, unread_bytes=64 << 20, connections=4096, queued=1000)


class Watch:
    """Watches the ranks of a run; made by `host` on rank 0 and by `join` on the others.

    `report(message)` is called once, from the watch's thread and before anything else, when another
    rank fails (default: a line on stderr); it must not call the watch. `grace` seconds later the
    process is ended by `kill` (default: `os._exit(1)`), unless `close` was called. All times are in
    seconds. Public methods may be called from any thread.
    """

    def __init__(
        self,
        side: Side,
        invitation: bytes,
        patience: HeartbeatPatience,
        grace: float,
        report: Callable[[str], None] | None,
        kill: Callable[[], None] | None,
        parent: int | None,
    ) -> None:
        self.names = side.names
        self.rank = side.rank
        self.invitation = invitation
        self.failed = threading.Event()
        self._side = side
        self._patience = patience
        self._grace = grace
        self._report = report or _to_stderr
        self._kill = kill or _exit
        self._parent = parent
        self._failure: RankFailure | None = None
        self._announcement: RankFailure | None = None
        self._known = False
        self._delivered = threading.Event()
        self._closing = threading.Event()
        self._flush_until: float | None = None
        self._kill_at: float | None = None
        self._turned = self._next_beat = time.monotonic()
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
        """Start the hub on rank 0; `names[i]` is what messages call rank i.

        Give `invitation` to the other ranks over a channel that you trust: it holds the keys of the
        run. `bind` is the numeric address by which they reach this machine; traffic is encrypted
        unless that is a loopback address. A rank has 60 s (or `deadline`, if longer) to join.

        Raises:
            ConfigError: no names, a time that is no positive number, or a useless address.
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
            limits=_LIMITS,
            monitor=True,
        )
        server.refusals.say = _log.warning
        invitation = Invitation(
            endpoint=server.endpoint,
            names=list(names),
            token=secrets.token_bytes(32),
            deadline=deadline,
            server_key=server_keys.public if server_keys else b"",
            client_public=client_keys.public if client_keys else b"",
            client_secret=client_keys.secret if client_keys else b"",
        )
        encoded = msgspec.msgpack.encode(invitation)
        patience = HeartbeatPatience.of(deadline)
        return cls(Hub(server, invitation), encoded, patience, grace, report, kill, None)

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

        `deadline` is the hub's unless given. `watch_parent` is the process id of rank 0 where that
        started this process: then the hub also counts as lost when the parent changes.

        Raises:
            ConfigError: a rank that was not invited, or a time that is no positive number.
            ProtocolError: the invitation cannot be read.
        """
        try:
            invited = from_msgpack(invitation, Invitation)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(
                f"the invitation cannot be read ({error}): expected the bytes of rank 0's "
                "`Watch.invitation`. Pass them on unchanged, between ranks of one version."
            ) from error
        own = invited.deadline if deadline is None else deadline
        _check_times(own, grace)
        if not 0 < rank < len(invited.names):
            expected = f"1 to {len(invited.names) - 1}"
            raise ConfigError(got_expected("rank", rank, expected, "Watch.host on rank 0"))
        keys = None
        if invited.server_key:
            keys = CurveKeys(invited.client_public, invited.client_secret)
        client = Client(
            identity(rank, invited.token),
            invited.endpoint,
            server=invited.names[0],
            curve=keys,
            server_key=invited.server_key or None,
            largest=_LIMITS.message_bytes,
            send_timeout=0.0,
            monitor=True,
        )
        # The hub counts on heartbeats at its own pace, whatever this rank's patience.
        patience = HeartbeatPatience(
            own,
            min(
                HeartbeatPatience.of(own).interval, HeartbeatPatience.of(invited.deadline).interval
            ),
        )
        side = Member(rank, client, invited)
        return cls(side, invitation, patience, grace, report, kill, watch_parent)

    @property
    def failure(self) -> RankFailure | None:
        """The first failure of another rank, as this rank learned it; it outlives `close`."""
        return self._failure

    def rename(self, names: Sequence[str]) -> None:
        """Call the ranks otherwise in messages from now on."""
        self.names[:] = names

    def check(self) -> None:
        """Raise what happened to the others; nothing after `close`.

        Raises:
            PeerLostError: another rank failed; the message names it.
        """
        if self._failure is not None and not self._closing.is_set():
            raise PeerLostError(self._failure.message)

    def note_signal(self, number: int) -> None:
        """Count a signal that this rank has got; the hub learns it with the next heartbeat. Takes
        no lock, so that a signal handler may call it."""
        own = self._side.signals
        self._side.signals = {**own, number: own.get(number, 0) + 1}

    def noted_signals(self) -> dict[int, int]:
        """Return how often each signal came to the rank that got it most often; on the hub of all
        ranks, else of this one."""
        found: dict[int, int] = {}
        for signals in (self._side.signals, *self._side.others_signals.values()):
            for number, count in signals.items():
                found[number] = max(found.get(number, 0), count)
        return found

    def announce(self, message: str) -> None:
        """Tell all others that this rank gives up, and why; returns within about a second.

        Only the first failure counts: nothing happens where another is known, or after `close`.
        """
        if self._failure is None and self._announcement is None and not self._closing.is_set():
            text = text_of(f"{self.names[self.rank]} gave up: {message}")[:_LONGEST_TEXT]
            self._announcement = RankFailure(self.rank, text)
            self._side.interrupt()
            self._delivered.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """End the watch with a goodbye, so that the others do not miss this rank. May be repeated.

        Waits about a second at most for the others to confirm.
        """
        self._closing.set()
        self._side.interrupt()
        self._thread.join(2 * FLUSH_SECONDS)
        if self._thread.is_alive():
            _log.warning("the watch's thread is still busy reporting; it ends with the process")

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._ended():
                self._turn()
        except Exception as error:
            # A broken watch must not pass for a healthy run.
            _log.exception("the watch broke")
            broken = f"the watch of {self.names[self.rank]} broke: {error!r}"
            self._learn(RankFailure(self.rank, broken))
            if not self._closing.wait(self._grace):
                self._end()
        finally:
            self._side.close()

    def _ended(self) -> bool:
        if self._flush_until is None:
            return False
        return time.monotonic() >= self._flush_until or all(n.settled for n in self._side.lines)

    def _turn(self) -> None:
        """Wait for one message or the next thing to do, and act on it."""
        wait = self._wait()
        message = self._receive(wait)
        now = time.monotonic()
        self._excuse(now - self._turned - wait)
        self._turned = now
        if message is not None:
            self._take(message, now)
        self._side.connections(now)
        self._obey(now)
        if now >= self._next_beat:
            self._next_beat = now + self._patience.interval
            self._side.beat()
        # The next message in line may be the one that is missed: judge when there is none.
        if message is None and not self._known and not self._closing.is_set():
            self._judge(now)
        if self._kill_at is not None and now >= self._kill_at and not self._closing.is_set():
            self._kill_at = None
            self._end()

    def _wait(self) -> float:
        until = [self._next_beat]
        until += [t for t in (self._kill_at, self._flush_until) if t is not None]
        return max(0.0, min(until) - time.monotonic())

    def _receive(self, wait: float) -> Message | None:
        try:
            return self._side.receive(wait)
        except ProtocolError as error:
            self._side.refusals.note(error)
            return None

    def _take(self, message: Message, now: float) -> None:
        try:
            failure = self._side.take(message, now)
        except ProtocolError as error:
            self._side.refusals.note(error)
            return
        if failure is not None and failure.origin == self.rank:
            given_up = f"the other ranks gave up on this one: {failure.message}"
            failure = RankFailure(self.rank, given_up)
        if failure is not None:
            self._fail(failure)

    def _excuse(self, late: float) -> None:
        """Forgive the others the time in which this process was stopped or starved."""
        if late > self._patience.interval:
            for line in self._side.lines:
                line.excuse(late)

    def _obey(self, now: float) -> None:
        """Do what other threads have asked for."""
        if self._announcement is not None and not self._known:
            self._known = True
            self._side.tell(ABORT, self._announcement)
        if self._known and all(line.settled for line in self._side.lines):
            self._delivered.set()
        if self._closing.is_set() and self._flush_until is None:
            self._flush_until = now + FLUSH_SECONDS
            self._side.tell(GOODBYE)

    def _judge(self, now: float) -> None:
        failure = self._side.judge(self._patience, now) or self._orphaned()
        if failure is not None:
            self._fail(failure)

    def _orphaned(self) -> RankFailure | None:
        hub = self._side.lines[0] if self._parent is not None else None
        if hub is None or hub.left or os.getppid() == self._parent:
            return None
        hub.lost = True
        return RankFailure(0, f"{self.names[0]} is gone: this process has lost its parent")

    def _fail(self, failure: RankFailure) -> None:
        """Take in the first failure; later ones follow from it and are dropped."""
        if not self._known:
            self._known = True
            self._learn(failure)
            self._side.relay(failure)

    def _learn(self, failure: RankFailure) -> None:
        """Say it first: whoever sees the failure may end the process at once."""
        if self._closing.is_set():
            return
        self._say(failure.message)
        self._failure = failure
        self._kill_at = time.monotonic() + self._grace
        self.failed.set()

    def _say(self, message: str) -> None:
        try:
            self._report(message)
        except Exception:
            # The watch goes on: to end the run matters more than to have said so.
            _log.exception("reporting failed: %s", message)

    def _end(self) -> None:
        waited = format_seconds(self._grace)
        try:
            _to_stderr(f"{self.names[self.rank]} did not end within {waited} after that; ending it")
        finally:
            self._kill()


def _to_stderr(message: str) -> None:
    sys.stderr.write(f"dlres: {message}\n")
    sys.stderr.flush()


def _exit() -> None:
    os._exit(1)


def _check_times(deadline: float, grace: float) -> None:
    for what, value, least in (("deadline", deadline, 0.1), ("grace", grace, 0.0)):
        if not least <= value < float("inf"):
            raise ConfigError(got_expected(what, value, f"{least} s or more", "10.0"))
