"""Deferral of signals, so that all ranks run their handlers at the same place in the program.

Lightning answers SIGTERM, and the signal before the end of a requeued SLURM job, with collective
work such as a checkpoint. A signal may interrupt one rank alone, at any place. If that rank ran
Lightning's handler at once, the run would deadlock: the rank would wait for the others in the
handler, and they would wait for it elsewhere.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer

from lightning_dlres._compat import note_sigterm, replace_sigterm_broadcast
from lightning_dlres.strategies.connection import Connection


class DeferredSignals:
    """Deferred signals of one run: SIGTERM, and the signal that announces a SLURM job's end.

    Args:
        environment: Lightning's cluster environment.
        connection: Connection to the other ranks.
    """

    def __init__(self, environment: ClusterEnvironment, connection: Connection) -> None:
        self._connection = connection
        numbers: list[int] = [signal.SIGTERM]
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            numbers.append(environment.requeue_signal or signal.SIGUSR1)
        # Handlers from before the run, by signal number.
        self._handlers_before = {number: signal.getsignal(number) for number in numbers}
        # Lightning's handlers, by signal number.
        self._handlers: dict[int, Callable[..., Any]] = {}
        # Each signal's count in `signal_counts` when it was last handled, by signal number.
        self._handled_counts: dict[int, int] = {}

    def install(self, *, only_sigterm: bool = False) -> None:
        """Defer the signals that got a handler of Lightning since this object was made.

        From then on, such a signal is only counted, and `handle` runs Lightning's handler. At the
        run's end, Lightning restores the handlers from before the run. Only the main thread can
        replace handlers, so in another thread this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._handlers_before.items():
            if only_sigterm and number != signal.SIGTERM:
                continue
            handler = signal.getsignal(number)
            if callable(handler) and handler is not before:
                self._handlers[number] = handler
                signal.signal(number, self._count)

    def due(self) -> list[int]:
        """Return the signals that a rank has received and this one has not handled.

        Ranks that must handle them at the same place ask rank 0, which sends the result.
        """
        counts = self._connection.signal_counts()
        return [n for n, count in counts.items() if count > self._handled_counts.get(n, 0)]

    def handle(self, numbers: list[int]) -> None:
        """Run Lightning's handlers; called by all ranks, at a place where they may wait for each
        other."""
        # A preemption signals every rank once, at different times. `signal_counts` has the largest
        # count of any rank, so the handlers run once for it. They run again only if a rank gets
        # the signal a second time.
        counts = self._connection.signal_counts()
        for number in numbers:
            self._handled_counts[number] = counts.get(number, 0)
            if number in self._handlers:
                self._handlers[number](number, inspect.currentframe())

    def handle_together(self) -> None:
        """Run Lightning's handlers of the signals that are due on rank 0; called by all ranks."""
        due = self.due()
        flags = self._connection.broadcast_flags([n in due for n in self._handlers_before], 0)
        self.handle([n for n, flag in zip(self._handlers_before, flags, strict=True) if flag])

    def handle_sigterm_alone(self, trainer: Trainer) -> None:
        """Let Lightning end this rank if a rank has received SIGTERM.

        Lightning's handler does not run: in it all ranks wait for each other.
        """
        number = int(signal.SIGTERM)
        if number not in self.due():
            return
        self._handled_counts[number] = self._connection.signal_counts()[number]
        note_sigterm(trainer)
        before = self._handlers_before[number]
        if callable(before):
            before(number, inspect.currentframe())

    def ends_run(self) -> bool:
        """Return True if all ranks have handled SIGTERM, and so end the run together."""
        return signal.SIGTERM in self._handled_counts

    def _count(self, number: int, frame: Any) -> None:
        self._connection.count_signal(number)


def handle_before_batches(
    trainer: Trainer, signals: DeferredSignals, *, together: bool
) -> Callable[[], None]:
    """Let deferred signals be handled before each training batch; return the undo function.

    This takes the place of Lightning's own broadcast, for which all ranks wait.

    Args:
        trainer: Trainer of the run.
        signals: Signals that were deferred.
        together: Handle them before the same batch on all ranks, which wait for rank 0. False: each
            rank ends when it learns of a SIGTERM, and waits for no other.
    """

    def handle_alone() -> None:
        signals.handle_sigterm_alone(trainer)

    return replace_sigterm_broadcast(trainer, signals.handle_together if together else handle_alone)
