"""State of a server, for `dlres ps status`."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from lightning_dlres.paramserver.execute.server.job_workers import JobWorker
from lightning_dlres.paramserver.execute.server.shard import Shard
from lightning_dlres.paramserver.protocol import ServerStatus, WorkerStatus

# Seconds after which a worker that sends nothing is called silent; it pings more often.
_SILENT_SECONDS = 5.0
# Largest age of the state that a server answers with, in seconds.
_AGE_SECONDS = 0.1


class StatusAnswer:
    """Answer to requests for a server's state; the state in it is at most a moment old.

    Anyone may ask, so many requests must not take the server's time.

    Args:
        status: Function that returns the state.
    """

    def __init__(self, status: Callable[[], ServerStatus]) -> None:
        self._status, self._encoded, self._next = status, b"", 0.0

    def __call__(self) -> bytes:
        """Return the state as msgpack."""
        now = time.monotonic()
        if now >= self._next:
            self._encoded, self._next = msgspec.msgpack.encode(self._status()), now + _AGE_SECONDS
        return self._encoded


def server_status(
    shard: Shard | None,
    *,
    address: str,
    now: float,
    uptime: float,
    snapshot_seconds: float,
    snapshot_error: str,
    refused: int,
) -> ServerStatus:
    """Return the state of a server.

    Args:
        shard: Its keys; None without a job.
        address: Its address.
        now: Clock in seconds.
        uptime: Seconds since its start.
        snapshot_seconds: Seconds since the last snapshot; -1 without one.
        snapshot_error: Reason why the last snapshot failed; "" if it did not.
        refused: Number of refused messages.
    """
    states = [] if shard is None else list(shard.states.values())
    updates = [state.updates for state in states]
    return ServerStatus(
        address=address,
        server=0 if shard is None else shard.setup.server,
        servers=0 if shard is None else shard.setup.servers,
        consistency="" if shard is None else shard.setup.consistency,
        keys=len(states),
        parameter_bytes=sum(state.key.nbytes for state in states),
        first_version=min(updates, default=0),
        last_version=max(updates, default=0),
        snapshot_seconds=snapshot_seconds,
        snapshot_error=snapshot_error,
        refused=refused,
        uptime_seconds=uptime,
        workers=[] if shard is None else _workers(shard, now),
    )


def _workers(shard: Shard, now: float) -> list[WorkerStatus]:
    statuses = []
    for index, member in enumerate(shard.members.by_index):
        # A parameter that was never trained has no pushes, and says nothing about staleness.
        states = shard.states.values()
        numbers = [state.applied[index] for state in states if any(state.applied)]
        silent = 0.0 if member.last_heard is None else now - member.last_heard
        statuses.append(
            WorkerStatus(
                worker=index,
                state=_state(member, silent),
                silent_seconds=silent,
                first_number=min(numbers, default=0),
                last_number=max(numbers, default=0),
                pushed_bytes=member.pushed_bytes,
                pulled_bytes=member.pulled_bytes,
            )
        )
    return statuses


def _state(member: JobWorker, silent: float) -> str:
    if member.last_heard is None:
        return "unknown"
    if member.has_left:
        return "left"
    if member.is_shut_out:
        return "shut out"
    return "silent" if silent > _SILENT_SECONDS else "active"
