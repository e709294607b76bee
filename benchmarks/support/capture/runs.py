"""Processes that train a case, each group with a deadline of its own."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO

from benchmarks.support.capture.rank_report import DONE, RankReport
from benchmarks.support.capture.task import Task
from benchmarks.support.forkserver import ForkedProcess, ForkServer, ForkServerProcess

PLAIN, OURS, PEER = "plain", "ours", "peer"
_MODULES = [f"benchmarks.support.capture.{name}" for name in ("preloaded", PLAIN, OURS, PEER)]
# Interval at which the processes are polled, in seconds.
_POLL_SECONDS = 0.02
# Time that the other ranks get after one has failed, in seconds.
_AFTER_FAILURE_SECONDS = 15.0
# Length of a process's output in a report, in characters.
_OUTPUT_CHARACTERS = 2000


class Run:
    """Result of a group of processes.

    Attributes:
        reports: Report of each process.
        is_late: True if the deadline ended the processes.
        exits: Exit status of each process.
        outputs: End of what each process printed.
        weights: Paths of the saved weights.
    """

    def __init__(
        self,
        reports: Sequence[RankReport],
        *,
        is_late: bool = False,
        exits: Sequence[int | None] = (),
        outputs: Sequence[str] = (),
        weights: Sequence[Path] = (),
    ) -> None:
        self.reports, self.is_late = list(reports), is_late
        self.exits, self.outputs, self.weights = list(exits), list(outputs), list(weights)

    @property
    def losses(self) -> list[float]:
        """Losses of the rank that has most of them."""
        return max((report.losses for report in self.reports), key=len)

    @property
    def is_done(self) -> bool:
        """True if all processes have trained to the end."""
        return all(report.phase == DONE for report in self.reports)


class Runner:
    """Starter of the processes, which fork from a server that has imported all libraries."""

    def __init__(self) -> None:
        with ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlres-bench-"))
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            self._environ = environ
            process = ForkServerProcess(Path(directory), _MODULES, environ)
            stack.callback(process.close)
            self._server = ForkServer(process.address)
            stack.callback(self._server.close)
            # The answer to the first request comes after the imports.
            self._server.start("os:getpid", [], {}).wait()
            self._stack = stack.pop_all()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(self, contender: str, task: Task, world_size: int, seconds: float) -> Run:
        """Train a case, and return what its processes report.

        Args:
            contender: "plain", "ours" or "peer".
            task: The training.
            world_size: Number of processes.
            seconds: Deadline.
        """
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(world_size)]
            port = free_port()
            processes = [
                self._start(contender, task, rank, world_size, port, file)
                for rank, file in enumerate(files)
            ]
            try:
                is_late = _wait(processes, seconds)
            finally:
                for process in processes:
                    process.kill_group()
            paths = [Path(task.directory, f"{contender}-{rank}") for rank in range(world_size)]
            weights = [Path(f"{path}.pt") for path in paths]
            return Run(
                [RankReport.read(path) for path in paths],
                is_late=is_late,
                exits=[process.returncode for process in processes],
                outputs=[_end_of(file) for file in files],
                weights=[path for path in weights if path.exists()],
            )

    def _start(
        self, contender: str, task: Task, rank: int, world_size: int, port: int, file: IO[bytes]
    ) -> ForkedProcess:
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "benchmark",
        }
        return self._server.start(
            f"benchmarks.support.capture.{contender}:main",
            [task.json()],
            {1: file.fileno(), 2: file.fileno()},
            environ={**self._environ, **(variables if contender != PLAIN else {})},
            directory=task.directory,
        )


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait(processes: Sequence[ForkedProcess], seconds: float) -> bool:
    """Wait until all processes end, or too long after one has failed; return True if late."""
    deadline = time.monotonic() + seconds
    after_failure = float("inf")
    while None in (statuses := [process.poll() for process in processes]):
        now = time.monotonic()
        if any(status for status in statuses):
            after_failure = min(after_failure, now + _AFTER_FAILURE_SECONDS)
        if now > after_failure:
            return False
        if now > deadline:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _end_of(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    start = max(0, size - _OUTPUT_CHARACTERS)
    return os.pread(file.fileno(), _OUTPUT_CHARACTERS, start).decode(errors="replace")
