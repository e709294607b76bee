"""Requests are sent again, but large answers on a slow link are waited for."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.worker.connection.pending_request import (
    PendingRequest,
    PendingRequests,
)

NEVER = float("-inf")


@pytest.mark.parametrize("kind", [protocol.HELLO, protocol.STATE, protocol.CONTENT])
def test_a_new_request_is_due_at_once(kind: str) -> None:
    assert PendingRequest(kind, b"").is_due(0.0, 1.0, NEVER)
    assert PendingRequest(kind, b"").is_due(5.0, 1.0, 5.0)


@pytest.mark.parametrize("tries", [1, 2, 30])
def test_a_small_answer_is_asked_for_again_and_again(tries: int) -> None:
    request = PendingRequest(protocol.HELLO, b"", sent=10.0, tries=tries)
    assert not request.is_due(10.9, 1.0, NEVER)
    assert request.is_due(11.0, 1.0, last_answer=11.0)


@pytest.mark.parametrize("kind", [protocol.STATE, protocol.CONTENT])
@pytest.mark.parametrize(("tries", "factor"), [(1, 1), (2, 2), (3, 4), (4, 8), (30, 8)])
def test_a_large_answer_may_be_behind_others(kind: str, tries: int, factor: int) -> None:
    request = PendingRequest(kind, b"", sent=10.0, tries=tries)
    assert not request.is_due(10.0 + 0.9 * factor, 1.0, NEVER)
    assert request.is_due(10.0 + factor, 1.0, NEVER)
    assert not request.is_due(10.0 + factor, 1.0, last_answer=10.5)
    assert request.is_due(10.5 + factor, 1.0, last_answer=10.5)


class Tracker:
    """ZeroMQ's use of a payload."""

    done = False


def test_a_large_request_is_not_repeated_while_it_is_being_sent() -> None:
    tracker: Any = Tracker()
    request = PendingRequest(protocol.LOAD, b"", sent=10.0, tries=1, tracker=tracker)
    assert not request.is_due(1000.0, 1.0, NEVER)
    tracker.done = True
    # Its time begins when it has left.
    assert not request.is_due(1001.0, 1.0, NEVER)
    assert not request.is_due(1001.9, 1.0, NEVER)
    assert request.is_due(1002.0, 1.0, NEVER)


def test_small_requests_do_not_wait_behind_large_ones() -> None:
    requests = PendingRequests()
    assert not requests
    for number in range(100):
        requests.add(number, PendingRequest(protocol.STATE, b""))
    requests.add(100, PendingRequest(protocol.VERSIONS, b""))
    requests.add(101, PendingRequest(protocol.LEAVE, b""))
    numbers = [number for number, _ in requests]
    assert numbers == [100, 101, *range(8)]
    # Further large requests follow as others are answered.
    requests.remove(3)
    requests.remove(100)
    assert [number for number, _ in requests] == [101, 0, 1, 2, 4, 5, 6, 7, 8]
    assert requests.get(3) is requests.get(100) is None
    assert requests.get(99) is not None
