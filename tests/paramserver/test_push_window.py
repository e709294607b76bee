"""Window of a worker's pushes to one server."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dlres.paramserver.execute.worker.connection.push_window import PushWindow
from lightning_dlres.paramserver.execute.worker.state.push_lead import PushLead
from lightning_dlres.paramserver.execute.worker.state.push_log import LogEntry

MIB = 1 << 20
KEY = MIB
# Bytes of a key of which several fit into any window.
SMALL_KEY = KEY // 8


def entry_of(key: int, position: int, nbytes: int = KEY) -> LogEntry:
    """Return a push at a position in bytes."""
    payload = memoryview(bytes(nbytes))
    return LogEntry(key, 1, b"", payload, -1.0, key, 0, nbytes, position=position)


def tracker(*, done: bool = True) -> Any:
    return SimpleNamespace(done=done)


def new_window(
    *,
    is_synchronous: bool = True,
    lead: PushLead | None = None,
    server: int = 0,
    wake: Callable[[], None] = lambda: None,
) -> PushWindow:
    lead = lead or PushLead(1)
    return PushWindow(is_synchronous=is_synchronous, lead=lead, server=server, wake=wake)


def send(
    window: PushWindow, key: int, now: float, *, is_awaited: bool = True, nbytes: int = KEY
) -> None:
    """Send the key of a number, which all keys before it precede."""
    entry = entry_of(key, key * nbytes, nbytes)
    window.sent(entry, tracker(), now, is_awaited=is_awaited)
    window.collect()


def filled(window: PushWindow, now: float, first: int = 0, nbytes: int = KEY) -> int:
    """Send keys until the window is full or 64 were sent; return the number of the next one."""
    key = first
    while key < first + 64 and not window.is_full(now, key * nbytes):
        send(window, key, now, nbytes=nbytes)
        key += 1
    return key


def near_window() -> PushWindow:
    window = new_window()
    window.note_round_trip(0.0)
    return window


def test_a_worker_is_a_few_keys_ahead_of_the_answers() -> None:
    window = near_window()
    assert filled(window, 10.0, nbytes=SMALL_KEY) == 8
    window.answered(0, 10.1)
    assert filled(window, 10.1, 8, SMALL_KEY) == 9
    # A key that is sent again, and one that is answered twice, count once.
    send(window, 1, 10.1, nbytes=SMALL_KEY)
    window.answered(0, 10.1)
    window.answered(1, 10.1)
    assert filled(window, 10.1, 9, SMALL_KEY) == 10


def test_one_key_is_on_its_way_however_large_it_is() -> None:
    window = near_window()
    assert filled(window, 10.0, nbytes=4 * KEY) == 1
    window.answered(0, 10.1)
    assert filled(window, 10.1, 1, 4 * KEY) == 2


def test_a_late_worker_stops_nobody_for_long() -> None:
    window = near_window()
    key = filled(window, 10.0)
    for number in range(40):
        now = 10.0 + 0.03 * (number + 1)
        window.answered(number, now)
        key = filled(window, now, key)
    assert 0.05 <= window.wait(now, 0) <= 0.07
    assert window.is_full(now + 0.05, 0)
    # No answer for twice the interval: the rest goes out, until there is one again.
    assert filled(window, now + 0.07, key) == key + 64
    window.answered(40, now + 1.0)
    assert window.is_full(now + 1.0, 0)
    assert 0 < window.wait(now + 1.0, 0) <= 0.5


def test_the_window_is_larger_over_a_long_way() -> None:
    window = near_window()
    far = new_window()
    far.note_round_trip(0.1)
    far.note_round_trip(0.05)
    assert filled(far, 1.0) >= 4 * filled(window, 1.0)
    # Nothing is known before the first answer to a request.
    assert filled(new_window(), 1.0) == 64


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_pushes_in_memory_are_bounded(is_synchronous: bool) -> None:
    window = new_window(is_synchronous=is_synchronous)
    held = [tracker(done=False) for _ in range(2)]
    for key, one in enumerate(held):
        assert not window.is_full(1.0, 0)
        window.sent(entry_of(key, 0), one, 1.0, is_awaited=True)
    assert window.is_full(1.0, 0)
    assert not window.collect()
    held[0].done = True
    assert window.collect()
    assert not window.is_full(1.0, 0)


def test_pushes_without_an_answer_of_all_workers_do_not_wait() -> None:
    window = new_window(is_synchronous=False)
    window.note_round_trip(0.0)
    assert filled(window, 1.0) == 64
    window = near_window()
    for key in range(64):
        send(window, key, 1.0, is_awaited=False)
    assert not window.is_full(1.0, 0)


def slow_window(
    delay: float, notices: int = 60, window: PushWindow | None = None
) -> tuple[PushWindow, float]:
    """Return a window after keys whose values came so many seconds after their notices, and the
    time."""
    window, now = window or near_window(), 10.0
    for key in range(notices):
        send(window, key, now)
        now += 0.2
        window.merged(key, now)
        window.answered(key, now + delay)
    return window, now + delay


def test_fewer_keys_are_ahead_while_values_come_long_after_notices() -> None:
    window, now = slow_window(0.3)
    assert filled(window, now, 200, SMALL_KEY) == 206
    window, now = slow_window(0.01)
    assert filled(window, now, 200, SMALL_KEY) == 208
    window, now = slow_window(0.3)
    assert filled(window, now, 100) == 101
    window.merged(100, now + 0.1)
    assert not window.is_full(now + 0.1, 0)
    assert filled(window, now + 0.1, 101) == 102
    # Its value is no further answer.
    window.answered(100, now + 0.2)
    assert window.is_full(now + 0.2, 0)


def test_more_keys_are_ahead_if_notices_come_faster() -> None:
    window, now = near_window(), 10.0
    for key in range(400):
        send(window, key, now)
        now += 0.02
        window.merged(key, now)
        if key >= 20:
            window.answered(key - 20, now)
    assert filled(window, now, 500, SMALL_KEY) == 508


def test_a_lost_connection_for_notices_is_forgotten() -> None:
    window, now = slow_window(0.3)
    for key in range(100, 120):
        send(window, key, now)
        now += 0.2
        window.answered(key, now)
    assert filled(window, now, 200, SMALL_KEY) == 208


def test_a_notice_of_no_push_is_ignored() -> None:
    window = near_window()
    window.merged(7, 10.0)
    send(window, 7, 20.0)
    window.answered(7, 20.1)
    assert window._delay == 0.0


def windows_of_two_servers(delay: float) -> tuple[list[PushWindow], list[int], float]:
    """Return windows of a worker after keys like those of `slow_window`, a list of the servers
    whose windows were woken since, and the time."""
    lead, woken = PushLead(2), list[int]()
    windows = [
        new_window(lead=lead, server=server, wake=lambda server=server: woken.append(server))  # type: ignore[misc]
        for server in range(2)
    ]
    for window in windows:
        window.note_round_trip(0.0)
        now = slow_window(delay, window=window)[1]
    return windows, woken, now


def test_pushes_to_a_server_wait_for_those_to_another_one() -> None:
    (first, second), woken, now = windows_of_two_servers(0.3)
    send(first, 100, now)
    for key in (101, 102):
        assert not second.is_full(now, key * KEY)
        send(second, key, now)
        second.merged(key, now)
    # The second server has answered all, and the first one is more than two keys behind.
    assert second.is_full(now, 103 * KEY)
    assert not woken
    first.merged(100, now + 0.1)
    assert woken == [1]
    assert not second.is_full(now + 0.1, 103 * KEY)


def test_a_silent_server_stops_the_pushes_to_others_for_a_short_time_only() -> None:
    (first, second), _, now = windows_of_two_servers(0.3)
    send(first, 100, now)
    send(second, 101, now)
    second.merged(101, now)
    wait = second.wait(now, 103 * KEY)
    assert 0 < wait <= 0.5
    assert not second.is_full(now + wait, 103 * KEY)


def test_fast_links_do_not_wait_for_each_other() -> None:
    (first, second), _, now = windows_of_two_servers(0.01)
    send(first, 100, now)
    assert not second.is_full(now, 163 * KEY)
