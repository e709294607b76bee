"""Jobs of a parameter server whose workers are threads of this process."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.parameter_server.jobs import open_session
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from lightning_dlres.paramserver.execute.worker.session import WorkerSession

# Longest wait of a worker's session for servers and other workers, in seconds.
_TIMEOUT = 60.0
# Largest number of bytes of a key: small, so that small models have several.
_KEY_BYTES = 16 << 10


class ThreadJob:
    """Job whose workers are threads.

    Args:
        servers: Addresses of the servers.
        workers: Number of workers.
        options: Options of `Job`, such as `consistency`.
        seconds: Longest life of the job, in seconds.
    """

    def __init__(
        self, servers: Sequence[str], workers: int, *, seconds: float = 120.0, **options: Any
    ) -> None:
        self.workers = workers
        self._servers, self._options, self._seconds = servers, options, seconds
        self._token = secrets.token_bytes(16)
        self._all_pushed = threading.Barrier(workers)

    def join(
        self, worker: int, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> WorkerSession:
        """Let a worker take part; return its session. Worker 0 starts the job."""
        return open_session(
            parameters,
            optimizer,
            token=self._token,
            worker=worker,
            workers=self.workers,
            servers=self._servers,
            key_bytes=_KEY_BYTES,
            timeout=_TIMEOUT,
            **{"retry_seconds": 0.2, **self._options},
        )

    def land_final(self, session: WorkerSession, options: bytes) -> None:
        """Wait until all workers have pushed for the last time, and land the final parameters.

        Under "asp" a worker that ends early would otherwise miss many updates of the others.
        """
        self._all_pushed.wait(self._seconds)
        for one in session.exchange.keys:
            # A push without a gradient changes nothing, and is answered by the newest value.
            session.push(one.key.index, None, options)
        session.wait()
        session.land()

    def run(self, work: Callable[[int], None]) -> None:
        """Run `work` for each worker in a thread of its own; raise the first error of one.

        Raises:
            TimeoutError: If the workers do not end in time.
        """
        errors: list[BaseException] = []

        def guarded(worker: int) -> None:
            try:
                work(worker)
            except BaseException as error:
                errors.append(error)
                # No worker waits in `land_final` for one that failed.
                self._all_pushed.abort()

        threads = [
            threading.Thread(target=guarded, args=(worker,), daemon=True)
            for worker in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self._seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"the workers did not end within {self._seconds:g} s")


@contextmanager
def open_servers(count: int) -> Iterator[list[str]]:
    """Context manager that runs servers, and gives their addresses."""
    servers = [ParameterServer() for _ in range(count)]
    try:
        yield [server.address for server in servers]
    finally:
        for server in servers:
            server.close()
