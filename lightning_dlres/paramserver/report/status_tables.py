"""Tables of the state of servers and workers, for `dlres ps status`."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.paramserver.execute.status_client import ServerSample
from lightning_dlres.paramserver.protocol import ServerStatus, WorkerStatus

_SERVER_COLUMNS = (
    "server",
    "address",
    "state",
    "keys",
    "parameters",
    "versions",
    "snapshot",
    "refused",
    "up",
)
_WORKER_COLUMNS = ("worker", "state", "silent", "pushes", "staleness", "up/s", "down/s")
# States of a worker, from the one that matters most when servers disagree.
_STATES = ("shut out", "silent", "active", "unknown", "left")
# Longest text of a server in a cell.
_LONGEST_TEXT = 60


def status_tables(now: Sequence[ServerSample], before: Sequence[ServerSample] = ()) -> str:
    """Return a table of servers, and one of workers, as text.

    Args:
        now: Samples of all servers.
        before: Earlier samples of the same servers, for rates; empty without.
    """
    servers = render("Servers", _SERVER_COLUMNS, [_server_row(sample) for sample in now])
    rows = worker_rows(now, before)
    if not rows:
        return f"{servers}\nNo job."
    return f"{servers}\n\n{render('Workers', _WORKER_COLUMNS, rows)}"


def worker_rows(
    now: Sequence[ServerSample], before: Sequence[ServerSample] = ()
) -> list[tuple[object, ...]]:
    """Return a row for each worker, of what all servers say about it; see `status_tables`.

    Staleness is the number of pushes by which the worker is behind the fastest one. A worker's
    slowest key counts: the one with the fewest pushes. A rate is None without an earlier sample of
    the same process.
    """
    by_worker: dict[int, list[WorkerStatus]] = {}
    for sample in now:
        for worker in sample.status.workers if sample.status else ():
            by_worker.setdefault(worker.worker, []).append(worker)
    rates = _rates(now, before)
    lowest = {index: min(one.first_number for one in own) for index, own in by_worker.items()}
    fastest = max(lowest.values(), default=0)
    rows: list[tuple[object, ...]] = []
    for index, own in sorted(by_worker.items()):
        highest = max(one.last_number for one in own)
        up, down = rates.get(index, (None, None))
        rows.append(
            (
                index,
                min((one.state for one in own), key=_severity),
                format_seconds(round(min(one.silent_seconds for one in own), 1)),
                _span(lowest[index], highest),
                fastest - lowest[index],
                None if up is None else format_bytes(round(up)),
                None if down is None else format_bytes(round(down)),
            )
        )
    return rows


def _rates(
    now: Sequence[ServerSample], before: Sequence[ServerSample]
) -> dict[int, tuple[float, float]]:
    """Return the bytes per second up and down of each worker, over all servers."""
    earlier = {sample.address: sample.status for sample in before}
    rates: dict[int, tuple[float, float]] = {}
    for sample in now:
        status, old = sample.status, earlier.get(sample.address)
        if status is None or old is None:
            continue
        seconds = status.uptime_seconds - old.uptime_seconds
        old_workers = {one.worker: one for one in old.workers}
        for one in status.workers:
            first = old_workers.get(one.worker)
            if first is None or seconds <= 0 or one.pushed_bytes < first.pushed_bytes:
                # The server was started again, or has begun another job.
                continue
            up, down = rates.get(one.worker, (0.0, 0.0))
            rates[one.worker] = (
                up + (one.pushed_bytes - first.pushed_bytes) / seconds,
                down + max(0, one.pulled_bytes - first.pulled_bytes) / seconds,
            )
    return rates


def _server_row(sample: ServerSample) -> tuple[object, ...]:
    status = sample.status
    if status is None:
        return (None, _printable(sample.address), _printable(sample.error), *[None] * 6)
    has_job = bool(status.consistency)
    return (
        f"{status.server} of {status.servers}" if has_job else None,
        _printable(sample.address),
        _printable(status.consistency) if has_job else "no job",
        status.keys,
        format_bytes(status.parameter_bytes),
        _span(status.first_version, status.last_version),
        _snapshot(status),
        status.refused,
        format_seconds(round(status.uptime_seconds)),
    )


def _snapshot(status: ServerStatus) -> str:
    age = "none"
    if status.snapshot_seconds >= 0:
        age = f"{format_seconds(round(status.snapshot_seconds))} ago"
    return f"{age}; failed: {_printable(status.snapshot_error)}" if status.snapshot_error else age


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _severity(state: str) -> int:
    return _STATES.index(state) if state in _STATES else len(_STATES)


def _printable(text: str) -> str:
    """Return a server's text without control characters, shortened."""
    shortened = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."
    return "".join(char if char.isprintable() else "?" for char in shortened)
