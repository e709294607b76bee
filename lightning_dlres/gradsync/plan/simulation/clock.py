"""Virtual clock: actions at future times, in the order of time and then of their registration."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[Any], None]


class VirtualClock:
    """Clock that jumps from one action to the next.

    Attributes:
        now: Virtual time, in seconds.
        actions: Number of actions that have run.
    """

    def __init__(self) -> None:
        self.now, self.actions = 0.0, 0
        # The number keeps the order of actions at one time, and actions are never compared.
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._number = 0

    def at(self, time: float, action: Action, argument: Any) -> None:
        """Call `action(argument)` at a time, which must not lie in the past."""
        self._number += 1
        heappush(self._heap, (time, self._number, action, argument))

    def run_instant(self) -> bool:
        """Run all actions of the next time; return False if there are none."""
        heap = self._heap
        if not heap:
            return False
        now = self.now = heap[0][0]
        while heap and heap[0][0] == now:
            _, _, action, argument = heappop(heap)
            self.actions += 1
            action(argument)
        return True
