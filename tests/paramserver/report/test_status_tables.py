"""Tables of the state of servers and workers."""

from __future__ import annotations

from typing import Any

from lightning_dlres.paramserver.execute.server.status import server_status
from lightning_dlres.paramserver.execute.status_client import ServerSample
from lightning_dlres.paramserver.protocol import ServerStatus, WorkerStatus
from lightning_dlres.paramserver.report.status_tables import status_tables, worker_rows
from tests.support.paramserver_shards import make_setup, push_of, small_keys, started_shard


def sample(uptime: float, *workers: tuple[int, int, int], **changes: Any) -> ServerSample:
    """Return the sample of a server; workers are index, number of pushes and pushed bytes."""
    fields: dict[str, Any] = {
        "address": "tcp://a:1",
        "server": 0,
        "servers": 2,
        "consistency": "ssp",
        "keys": 3,
        "parameter_bytes": 2048,
        "first_version": 4,
        "last_version": 6,
        "snapshot_seconds": -1.0,
        "snapshot_error": "",
        "refused": 7,
        "uptime_seconds": uptime,
    } | changes
    statuses = [
        WorkerStatus(
            worker=index,
            state="active",
            silent_seconds=0.04,
            first_number=number,
            last_number=number + 1,
            pushed_bytes=pushed,
            pulled_bytes=2 * pushed,
        )
        for index, number, pushed in workers
    ]
    status = ServerStatus(**fields, workers=statuses)
    return ServerSample(address=fields["address"], status=status)


def test_workers_have_staleness_and_rates_over_all_servers() -> None:
    before = [sample(10, (0, 4, 0), (1, 2, 0)), sample(20, (0, 5, 100), address="tcp://b:1")]
    now = [sample(12, (0, 9, 4096), (1, 2, 0)), sample(24, (0, 8, 4196), address="tcp://b:1")]
    rows = worker_rows(now, before)
    assert rows == [
        (0, "active", "0 s", "8 to 10", 0, "3 KiB", "6 KiB"),
        (1, "active", "0 s", "2 to 3", 6, "0 B", "0 B"),
    ]
    assert worker_rows(now)[0][-2:] == (None, None)


def test_a_server_that_was_started_again_has_no_rates() -> None:
    rows = worker_rows([sample(1, (0, 9, 10))], [sample(50, (0, 9, 4096))])
    assert rows[0][-2:] == (None, None)


def test_servers_that_disagree_about_a_worker_show_its_worst_state() -> None:
    good = sample(5, (0, 1, 0))
    assert good.status is not None
    (worker,) = good.status.workers
    fields = {name: getattr(worker, name) for name in worker.__struct_fields__}
    other = WorkerStatus(**(fields | {"state": "shut out"}))
    status = {name: getattr(good.status, name) for name in good.status.__struct_fields__}
    bad = ServerSample(address="tcp://b:1", status=ServerStatus(**(status | {"workers": [other]})))
    assert worker_rows([good, bad])[0][1] == "shut out"


def test_servers_have_a_row_each_also_without_an_answer_or_a_job() -> None:
    samples = [
        sample(90, snapshot_seconds=12.2, snapshot_error="no space\x1b[2J" + 100 * "x"),
        sample(1, consistency="", keys=0, address="tcp://b:1"),
        ServerSample(address="tcp://c:1", error="no answer within 3 s"),
    ]
    text = status_tables(samples)
    assert "0 of 2" in text
    assert "4 to 6" in text
    assert "12 s ago; failed: no space?[2J" in text
    assert "\x1b" not in text
    assert "no job" in text
    assert "no answer within 3 s" in text
    assert "No job." in text


def test_a_parameter_that_is_never_pushed_hides_no_staleness() -> None:
    setup = make_setup(small_keys([3, 3]), 2, consistency="asp")
    shard = started_shard(setup)
    for worker, pushes in ((0, 5), (1, 2)):
        for number in range(1, pushes + 1):
            shard.push(*push_of(setup.keys[0], worker, number, 1.0))
    status = server_status(
        shard,
        address="tcp://a:1",
        now=1.0,
        uptime=1.0,
        snapshot_seconds=-1.0,
        snapshot_error="",
        refused=0,
    )
    rows = worker_rows([ServerSample(address="tcp://a:1", status=status)])
    assert [row[3:5] for row in rows] == [("5", 0), ("2", 3)]
