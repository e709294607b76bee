"""Thread that updates layers beside backward."""

from __future__ import annotations

import threading

import pytest

from lightning_dlres.mirror.execute.update_thread import UpdateThread


def test_updates_run_in_the_order_of_their_start() -> None:
    updated: list[int] = []
    thread = UpdateThread(updated.append)
    for unit in (2, 0, 1):
        thread.start(unit)
    thread.wait()
    thread.close()
    assert updated == [2, 0, 1]


def test_no_update_runs_any_more_when_an_error_is_raised() -> None:
    ended: list[int] = []

    def update(unit: int) -> None:
        if unit == 0:
            raise RuntimeError("update 0 failed")
        # Longer than the way of the error to the caller. The test passes at any speed.
        threading.Event().wait(0.1)
        ended.append(unit)

    thread = UpdateThread(update)
    thread.start(0)
    thread.start(1)
    with pytest.raises(RuntimeError, match="update 0 failed"):
        thread.wait()
    assert ended == [1]
    thread.wait()
    thread.close()
