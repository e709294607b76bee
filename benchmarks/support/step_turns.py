"""Trainings that take turns, a few steps each, so that all of them meet the same machine.

The speed of a shared machine drifts by several percent within seconds, more than the differences
that are measured. Each training has a thread of its own, and only one of them runs at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from lightning.pytorch import Callback, Trainer

# A turn that lasts longer hangs.
_TURN_SECONDS = 600.0


class StepClock(Callback):
    """Lets a training run only in its turns, and notes how long its steps last.

    Args:
        steps: optimizer steps of one turn.
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

    def wait(self) -> None:
        """Wait for the next turn, in the thread of the training."""
        self._may_run.acquire()
        self._seconds.clear()
        self._began = time.perf_counter()

    def give_up(self) -> None:
        """End the turn."""
        self._has_run.release()

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        self._seconds.append(now - self._began)
        self._began = now
        if len(self._seconds) == self._steps:
            self.give_up()
            self.wait()


def step_seconds(
    trainings: Mapping[str, Callable[[Callback], None]],
    orders: Iterable[Iterable[str]],
    steps: int,
    settling: int,
) -> dict[str, list[float]]:
    """Train in turns; return the median seconds of a step in each turn.

    Args:
        trainings: by name; each trains with a callback that it is given, for as many turns as
            there are orders, and `settling` more.
        orders: the names in the order of each round.
        steps: optimizer steps of a turn.
        settling: number of rounds before, that do not count.

    Raises:
        RuntimeError: If a training failed, or ended early.
        TimeoutError: If one hangs.
    """
    clocks = {name: StepClock(steps) for name in trainings}
    failures: dict[str, BaseException] = {}
    ended: set[str] = set()

    def run(name: str) -> None:
        clock = clocks[name]
        clock.wait()
        try:
            trainings[name](clock)
        except BaseException as error:
            failures[name] = error
        finally:
            ended.add(name)
            clock.give_up()

    def turn(name: str, *, is_last: bool = False) -> float:
        seconds = clocks[name].turn()
        if name in failures:
            raise RuntimeError(f"training {name!r} failed") from failures[name]
        if (name in ended) != is_last:
            raise RuntimeError(f"training {name!r} has {'more' if is_last else 'fewer'} turns")
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


class Switch(Callback):
    """Takes another callback out of the Trainer for every other turn, so that steps with it and
    without are compared in one training, with the same thread and the same memory.

    Args:
        callback: the other one, which is the Trainer's when training begins.
        steps: optimizer steps of one turn.
        settling: number of steps before, that do not count.

    Attributes:
        found: median seconds of the steps in each turn, with and without the callback.
    """

    def __init__(self, callback: Callback, steps: int, settling: int) -> None:
        self._callback, self._steps, self._settling = callback, steps, settling
        self._seconds = list[float]()
        self._began = 0.0
        self.found: tuple[list[float], list[float]] = [], []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._settling > 0:
            self._settling -= 1
        else:
            self._seconds.append(time.perf_counter() - self._began)
        if len(self._seconds) == self._steps:
            with_it, without = self.found
            is_there = self._callback in trainer.callbacks  # type: ignore[attr-defined]
            (with_it if is_there else without).append(median(self._seconds))
            self._seconds.clear()
            # With, without, without, with: neither is always the later one.
            if (len(with_it) + len(without)) % 2:
                self._switch(trainer, is_there)
        self._began = time.perf_counter()

    def _switch(self, trainer: Trainer, is_there: bool) -> None:
        others = [c for c in trainer.callbacks if c is not self._callback]  # type: ignore[attr-defined]
        trainer.callbacks = others if is_there else [self._callback, *others]  # type: ignore[attr-defined]
