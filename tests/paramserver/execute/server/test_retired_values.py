"""Memory of former values is used again, but not while ZeroMQ may send it."""

from __future__ import annotations

import torch
import zmq

from lightning_dlres.paramserver.execute.server.key_state import RetiredValues


class Tracker(zmq.MessageTracker):
    """Tracker that a test ends."""

    done = False


def test_memory_is_used_again_once_it_is_sent() -> None:
    retired, trackers = RetiredValues(), [Tracker(), Tracker()]
    first = torch.arange(4.0)
    second = retired.replace(first, trackers[:1])
    third = retired.replace(second, trackers[1:])
    assert len({one.data_ptr() for one in (first, second, third)}) == 3
    trackers[0].done = True
    fourth = retired.replace(third, [])
    assert fourth.data_ptr() == first.data_ptr()
    assert torch.equal(fourth, torch.arange(4.0))


def test_values_of_other_shapes_are_apart() -> None:
    retired, small = RetiredValues(), torch.zeros(2)
    retired.replace(small, [])
    assert retired.replace(torch.ones(3), []).shape == (3,)
    assert retired.replace(torch.ones(2, dtype=torch.float64), []).dtype == torch.float64
