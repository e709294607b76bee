"""Signals that Lightning answers with work of all ranks, such as the checkpoint of a SLURM job that
is queued again, put off to a place that all ranks reach together.

A signal interrupts a rank anywhere, and often only one of them. Lightning's handlers then wait for
the other ranks, which wait for this one.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_dlres.strategies.connection import Connection


class DeferredSignals:
    """The signals of one run: SIGTERM, and the one that announces a SLURM job's end.

    Args:
        environment: Lightning's cluster environment.
        connection: the ranks.
    """

    def __init__(self, environment: ClusterEnvironment, connection: Connection) -> None:
        self._connection = connection
        numbers: list[int] = [signal.SIGTERM]
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            numbers.append(environment.requeue_signal or signal.SIGUSR1)
        self._before = {number: signal.getsignal(number) for number in numbers}
        self._handlers: dict[int, Callable[..., Any]] = {}
        self._handled: dict[int, int] = {}

    def install(self) -> None:
        """Take the place of the handlers that Lightning has registered since this object was made.
        Lightning puts the former ones back at the end of the run."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            handler = signal.getsignal(number)
            if callable(handler) and handler is not before:
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def due(self) -> list[int]:
        """Return the signals that some rank has got and none has handled; called on rank 0, which
        tells the others."""
        counts = self._connection.noted_signals()
        return [n for n, count in counts.items() if count > self._handled.get(n, 0)]

    def handle(self, numbers: list[int]) -> None:
        """Run Lightning's handlers; called by all ranks at the same place."""
        # One preemption reaches the ranks one after the other: only a rank's second signal is new.
        counts = self._connection.noted_signals()
        for number in numbers:
            self._handled[number] = counts.get(number, 0)
            if number in self._handlers:
                self._handlers[number](number, inspect.currentframe())

    def ends_run(self) -> bool:
        """Return whether all ranks have handled SIGTERM, and so end together."""
        return signal.SIGTERM in self._handled

    def _note(self, number: int, frame: Any) -> None:
        self._connection.note_signal(number)
