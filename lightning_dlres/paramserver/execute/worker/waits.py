"""Waits for servers: each one has a deadline, and an error that names the peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lightning_dlres.core.errors import PeerError, PeerTimeoutError
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.message import Message
from lightning_dlres.paramserver.execute.worker.connection.link import ServerLink
from lightning_dlres.paramserver.execute.worker.connection.pending_request import PendingRequest
from lightning_dlres.paramserver.execute.worker.state.exchange import Exchange

_POLL_SECONDS = 0.2


class ServerWaits:
    """Waits of the training thread.

    Args:
        exchange: State of the exchange.
        links: Connections to all servers.
        timeout: Longest wait without any progress, in seconds.
        retry_seconds: Pause before servers are asked again, at most a second.
        check_peers: Called again and again while other workers are awaited; it raises if one has
            failed. After a failure servers still answer requests, as for a checkpoint.
    """

    def __init__(
        self,
        exchange: Exchange,
        links: Sequence[ServerLink],
        timeout: float,
        retry_seconds: float,
        check_peers: Callable[[], None] | None = None,
    ) -> None:
        self._exchange, self._links = exchange, links
        self._timeout, self._pause_seconds = timeout, min(retry_seconds, 1.0)
        self._check_peers = check_peers

    def answers(
        self, pending: Sequence[PendingRequest], *, need_workers: bool = False
    ) -> list[Message]:
        """Wait for the answers to requests, and return them.

        Args:
            pending: The requests.
            need_workers: True if they are answered only after pushes of other workers.

        Raises:
            PeerError: See `until`.
        """
        # Requests that were answered leave this list, so that a wake-up does not look at all again.
        unanswered = list(pending)[::-1]

        def are_answered() -> bool:
            while unanswered and unanswered[-1].answer is not None:
                unanswered.pop()
            return not unanswered

        self._until(are_answered, self.check if need_workers else self._exchange.check)
        return [one.answer for one in pending if one.answer is not None]

    def until(self, is_met: Callable[[], bool]) -> None:
        """Wait until a condition is met, which may need other workers; progress prolongs the wait.

        Raises:
            PeerError: If the exchange or another worker has failed, or nothing has arrived for too
                long.
        """
        self._until(is_met, self.check)

    def _until(self, is_met: Callable[[], bool], check: Callable[[], None]) -> None:
        with self._exchange.lock:
            self._exchange.progress = time.monotonic()
            while not is_met():
                check()
                self._exchange.changed.wait(_POLL_SECONDS)
                if time.monotonic() - self._exchange.progress > self._timeout:
                    raise self._late()
            # Servers do not wait for a worker that has left, as one does after its failure.
            check()

    def check(self) -> None:
        """Raise if the exchange or another worker has failed.

        Raises:
            PeerError: If one has.
        """
        self._exchange.check()
        if self._check_peers is not None:
            self._check_peers()

    def _late(self) -> PeerError:
        """Return the error of a wait that took too long. It names the silent servers, or else the
        workers whose pushes are missing."""
        seconds = format_seconds(self._timeout)
        now = time.monotonic()
        silent = [link.name for link in self._links if now - link.last_heard > self._timeout / 2]
        if silent:
            return PeerTimeoutError(
                f"waited {seconds} for {', '.join(silent)}, but no message came. Check that it "
                "runs and can be reached, and that its encryption keys match."
            )
        awaited = [self._exchange.keys[key] for key in sorted(self._exchange.awaited)]
        workers = sorted({worker for one in awaited for worker in one.waiting_for})
        if workers:
            names = ", ".join(f"worker {worker}" for worker in workers)
            return PeerTimeoutError(
                f"waited {seconds} for {names} to push {awaited[0].key}. Check that it still runs."
            )
        what = str(awaited[0].key) if awaited else "an answer"
        return PeerTimeoutError(f"waited {seconds} for {what} from the servers.")

    def pause(self, deadline: float, peer: str) -> None:
        """Wait a moment before the servers are asked again.

        Raises:
            PeerTimeoutError: If the deadline has passed; the message names the peer.
        """
        if time.monotonic() > deadline:
            raise PeerTimeoutError(
                f"waited {format_seconds(self._timeout)} for {peer}. Check that it runs."
            )
        with self._exchange.lock:
            self._exchange.changed.wait(self._pause_seconds)
            self.check()
