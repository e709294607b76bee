"""Thread that updates layers while backward goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor


class UpdateThread:
    """Updates of units in the order in which their gradients were complete.

    Args:
        update: Updates a unit.
    """

    def __init__(self, update: Callable[[int], None]) -> None:
        self._update = update
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="dlres-update")
        self._started: list[Future[None]] = []

    def start(self, unit: int) -> None:
        """Start to update a unit, after those that were started before."""
        self._started.append(self._executor.submit(self._update, unit))

    def wait(self) -> None:
        """Wait until all updates that were started have ended, even if some of them fail.

        Raises:
            Exception: The first exception of an update.
        """
        started, self._started = self._started, []
        futures.wait(started)
        for future in started:
            future.result()

    def close(self) -> None:
        """Wait for all updates, and end the thread."""
        self._executor.shutdown(wait=True)
