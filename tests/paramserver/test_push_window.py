"""Window of a worker's pushes to one server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dlres.paramserver.execute.worker.push_window import PushWindow

MIB = 1 << 20
KEY = MIB


def tracker(*, done: bool = True) -> Any:
    return SimpleNamespace(done=done)


def filled(window: PushWindow, now: float, first: int = 0) -> int:
    """Send keys until the window is full or 64 were sent; return the number of the next one."""
    key = first
    while key < first + 64 and not window.is_full(now):
        window.sent(key, KEY, tracker(), now, is_awaited=True)
        window.collect()
        key += 1
    return key


def near_window() -> PushWindow:
    window = PushWindow(is_synchronous=True)
    window.note_round_trip(0.0)
    return window


def test_a_worker_is_a_few_keys_ahead_of_the_answers() -> None:
    window = near_window()
    assert filled(window, 10.0) == 4
    window.answered(0, 10.1)
    assert filled(window, 10.1, 4) == 5
    # A key that is sent again, and one that is answered twice, count once.
    window.sent(1, KEY, tracker(), 10.1, is_awaited=True)
    window.answered(0, 10.1)
    window.answered(1, 10.1)
    assert filled(window, 10.1, 5) == 6


def test_a_late_worker_stops_nobody_for_long() -> None:
    window = near_window()
    key = filled(window, 10.0)
    for number in range(40):
        now = 10.0 + 0.03 * (number + 1)
        window.answered(number, now)
        key = filled(window, now, key)
    assert 0.05 <= window.wait(now) <= 0.07
    assert window.is_full(now + 0.05)
    # No answer for twice the interval: the rest goes out, until there is one again.
    assert filled(window, now + 0.07, key) == key + 64
    window.answered(40, now + 1.0)
    assert window.is_full(now + 1.0)
    assert 0 < window.wait(now + 1.0) <= 0.5


def test_the_window_is_larger_over_a_long_way() -> None:
    window = near_window()
    far = PushWindow(is_synchronous=True)
    far.note_round_trip(0.1)
    far.note_round_trip(0.05)
    assert filled(far, 1.0) >= 4 * filled(window, 1.0)
    # Nothing is known before the first answer to a request.
    assert filled(PushWindow(is_synchronous=True), 1.0) == 64


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_pushes_in_memory_are_bounded(is_synchronous: bool) -> None:
    window = PushWindow(is_synchronous=is_synchronous)
    held = [tracker(done=False) for _ in range(2)]
    for key, one in enumerate(held):
        assert not window.is_full(1.0)
        window.sent(key, KEY, one, 1.0, is_awaited=True)
    assert window.is_full(1.0)
    assert not window.collect()
    held[0].done = True
    assert window.collect()
    assert not window.is_full(1.0)


def test_pushes_without_an_answer_of_all_workers_do_not_wait() -> None:
    window = PushWindow(is_synchronous=False)
    window.note_round_trip(0.0)
    assert filled(window, 1.0) == 64
    window = near_window()
    for key in range(64):
        window.sent(key, KEY, tracker(), 1.0, is_awaited=False)
    window.collect()
    assert not window.is_full(1.0)


def slow_window(delay: float, notices: int = 60) -> tuple[PushWindow, float]:
    """Return a window after keys whose values came so many seconds after their notices, and the
    time."""
    window, now = near_window(), 10.0
    for key in range(notices):
        window.sent(key, KEY, tracker(), now, is_awaited=True)
        window.collect()
        now += 0.2
        window.merged(key, now)
        window.answered(key, now + delay)
    return window, now + delay


def test_fewer_keys_are_ahead_while_values_come_long_after_notices() -> None:
    window, now = slow_window(0.3)
    assert filled(window, now, 100) == 101
    window.merged(100, now + 0.1)
    assert not window.is_full(now + 0.1)
    # Its value is no further answer.
    window.answered(100, now + 0.4)
    assert filled(window, now + 0.4, 101) == 102
    window, now = slow_window(0.01)
    assert filled(window, now, 100) == 104


def test_more_keys_are_ahead_if_notices_come_faster() -> None:
    window, now = near_window(), 10.0
    for key in range(400):
        window.sent(key, KEY, tracker(), now, is_awaited=True)
        window.collect()
        now += 0.02
        window.merged(key, now)
        if key >= 20:
            window.answered(key - 20, now)
    assert filled(window, now, 500) == 503


def test_a_lost_connection_for_notices_is_forgotten() -> None:
    window, now = slow_window(0.3)
    for key in range(100, 120):
        window.sent(key, KEY, tracker(), now, is_awaited=True)
        window.collect()
        now += 0.2
        window.answered(key, now)
    assert filled(window, now, 200) == 204


def test_a_notice_of_no_push_is_ignored() -> None:
    window = near_window()
    window.merged(7, 10.0)
    window.sent(7, KEY, tracker(), 20.0, is_awaited=True)
    window.answered(7, 20.1)
    assert window._delay == 0.0
