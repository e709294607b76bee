"""Timing of trainings that take turns of a few steps, so that all run at the same machine speed.

The speed of a shared machine drifts by several percent within seconds, more than the differences
to be measured. Each training has its own thread, and only one thread runs at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from lightning.pytorch import Callback, Trainer

# Time limit of a turn, in seconds; a longer turn counts as hanging.
_TURN_SECONDS = 600.0


class StepClock(Callback):
    """Callback that lets a training run only in its turns, and measures its steps.

    Args:
        steps: Optimizer steps of one turn.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._seconds = steps, list[float]()
        self._may_run, self._has_run = threading.Semaphore(0), threading.Semaphore(0)
        self._began = 0.0

    def turn(self) -> float:
        """Let the training run for one turn; return the median seconds of its steps.

        Raises:
            TimeoutError: If the turn does not end.
        """
        self._may_run.release()
        if not self._has_run.acquire(timeout=_TURN_SECONDS):
            raise TimeoutError(f"steps did not end within {_TURN_SECONDS:g} s")
        return median(self._seconds) if self._seconds else 0.0

    def wait_for_turn(self) -> None:
        """Wait for the next turn, in the thread of the training."""
        self._may_run.acquire()
        self._seconds.clear()
        self._began = time.perf_counter()

    def end_turn(self) -> None:
        """End the turn."""
        self._has_run.release()

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        self._seconds.append(now - self._began)
        self._began = now
        if len(self._seconds) == self._steps:
            self.end_turn()
            self.wait_for_turn()


def step_seconds(
    trainings: Mapping[str, Callable[[Callback], None]],
    orders: Iterable[Iterable[str]],
    steps: int,
    settling: int,
) -> dict[str, list[float]]:
    """Train in turns; return the median seconds of a step in each turn.

    Args:
        trainings: Functions that train with a given callback, by name. Each must last for one turn
            per order, plus `settling` turns.
        orders: Names of the trainings in the order of their turns, for each round.
        steps: Optimizer steps of a turn.
        settling: Number of warm-up rounds before the first order; they do not count.

    Raises:
        RuntimeError: If a training failed, or has another number of steps.
        TimeoutError: If a turn does not end.
    """
    clocks = {name: StepClock(steps) for name in trainings}
    failures: dict[str, BaseException] = {}
    ended: set[str] = set()

    def run(name: str) -> None:
        clock = clocks[name]
        clock.wait_for_turn()
        try:
            trainings[name](clock)
        except BaseException as error:
            failures[name] = error
        finally:
            ended.add(name)
            clock.end_turn()

    def turn(name: str, *, is_last: bool = False) -> float:
        seconds = clocks[name].turn()
        if name in failures:
            raise RuntimeError(f"training {name!r} failed") from failures[name]
        if (name in ended) != is_last:
            got = "more" if is_last else "fewer"
            raise RuntimeError(f"training {name!r} must have one turn per round, got {got}")
        return seconds

    for name in trainings:
        threading.Thread(target=run, args=(name,), name=name, daemon=True).start()
    for _ in range(settling):
        for name in trainings:
            turn(name)
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for order in orders:
        for name in order:
            seconds[name].append(turn(name))
    for name in trainings:
        turn(name, is_last=True)
    return seconds


class CallbackToggle(Callback):
    """Callback that takes another callback out of the Trainer for two of every four turns.

    Steps with and without the other callback are thus compared in one training, with the same
    thread and the same memory.

    Args:
        callback: The other callback; the Trainer must have it when training begins.
        steps: Optimizer steps of one turn.
        settling: Number of warm-up steps that do not count.

    Attributes:
        medians: Median step seconds of each turn: a list with the callback, and one without.
    """

    def __init__(self, callback: Callback, steps: int, settling: int) -> None:
        self._callback, self._steps, self._settling = callback, steps, settling
        self._seconds = list[float]()
        self._began = 0.0
        self.medians: tuple[list[float], list[float]] = [], []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._settling > 0:
            self._settling -= 1
        else:
            self._seconds.append(time.perf_counter() - self._began)
        if len(self._seconds) == self._steps:
            with_it, without = self.medians
            is_there = self._callback in trainer.callbacks  # type: ignore[attr-defined]
            (with_it if is_there else without).append(median(self._seconds))
            self._seconds.clear()
            # Order of turns: with, without, without, with. A drift thus affects both alike.
            if (len(with_it) + len(without)) % 2:
                self._toggle(trainer, is_there)
        self._began = time.perf_counter()

    def _toggle(self, trainer: Trainer, is_there: bool) -> None:
        others = [c for c in trainer.callbacks if c is not self._callback]  # type: ignore[attr-defined]
        trainer.callbacks = others if is_there else [self._callback, *others]  # type: ignore[attr-defined]
