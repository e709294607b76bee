"""Timing of functions that take turns, so that all run at the same machine speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def in_turns(
    ways: Sequence[Callable[[], Any]], repeats: int, on_gpu: bool = False
) -> list[list[float]]:
    """Run the functions in turns, in alternating order; return the seconds of each one's runs.

    The first turn is a warm-up and does not count.
    """
    seconds: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats + 1):
        places = range(len(ways)) if turn % 2 else reversed(range(len(ways)))
        for place in places:
            start = time.perf_counter()
            ways[place]()
            if on_gpu:
                torch.cuda.synchronize()
            if turn:
                seconds[place].append(time.perf_counter() - start)
    return seconds
