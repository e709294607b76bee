"""The pool's ends of its rank processes: their answers, deaths and output."""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from benchmarks.support.forkserver import ForkServer
from tests.support.rank_messages import Clean, Job, Raised, Ready, Returned, Spent

# File descriptor of the pool's connection in a rank. The fork server uses lower ones.
_CONNECTION = 100
# Time in seconds in which a rank must restore its state after a job, or it is replaced.
CLEAN_SECONDS = 30.0
# Time in seconds that the other ranks of a failed job have to fail too, before they count as stuck.
GRACE_SECONDS = 5.0
# A forked child of a rank keeps the pipe open after the rank's death, so exits are polled as well.
POLL_SECONDS = 0.2
# Number of last lines of a rank's output that an error shows.
TAIL_LINES = 200


@dataclass
class RankOutcome:
    """Outcome of one rank: a value, or an error with its type's name and its message.

    Besides the exceptions of the function itself, `error_type` may be "RankDied" (the process
    ended) or "RankTimeout" (it had to be killed). `output` is the rank's stdout and stderr during
    the job.
    """

    rank: int
    value: Any = None
    error_type: str | None = None
    error_message: str = ""
    traceback: str = ""
    output: str = ""


class RankHandle:
    """The pool's end of one rank process.

    Args:
        index: Number of the rank.
        directory: Directory for the log.
        server: Fork server that forks the process.

    Attributes:
        process: The process.
        connection: Connection to it.
        ready: True once it has started.
    """

    def __init__(self, index: int, directory: Path, server: ForkServer) -> None:
        self.index = index
        self.ready = False
        self._log = directory / f"rank{index}.log"
        self._log.touch()
        self._offset = self._log.stat().st_size
        self.connection, theirs = Pipe()
        with self._log.open("ab") as log:
            self.process = server.start(
                "tests.support.rank_process:main",
                [str(_CONNECTION)],
                {1: log.fileno(), 2: log.fileno(), _CONNECTION: theirs.fileno()},
            )
        theirs.close()

    def alive(self) -> bool:
        return self.process.poll() is None and not self.connection.closed

    def begin(self, job: Job) -> None:
        self._offset = self._log.stat().st_size
        self.send(job)

    def send(self, message: object) -> None:
        # Ignore the error if the rank has died: `next_messages` reports the death.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message))

    def text(self) -> str:
        """Return the rank's output since its job began, or since the rank started."""
        with self._log.open("rb") as log:
            log.seek(self._offset)
            return log.read().decode(errors="replace")

    def exit_text(self) -> str:
        code = self.process.returncode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def dump_stacks(self) -> None:
        """Ask for all stacks in the log; the rank ends by itself once they are written."""
        self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        self.process.kill_group()
        self.connection.close()


def collect(ranks: list[RankHandle], timeout: float, grace: float) -> list[RankOutcome]:
    """Wait for the answers of all ranks of a job; return their outcomes by rank.

    Args:
        ranks: The ranks.
        timeout: Seconds after which ranks without an answer count as stuck, and are killed.
        grace: The same, after the failure of another rank.
    """
    outcomes: dict[int, RankOutcome] = {}
    pending = list(ranks)
    deadline = time.monotonic() + timeout
    stuck = f"still running after {timeout:g} s"
    while pending:
        events = next_messages(pending, deadline)
        if not events:
            break
        for rank, message in events:
            pending.remove(rank)
            outcome = outcomes[rank.index] = RankOutcome(rank.index)
            if isinstance(message, Returned):
                outcome.value = pickle.loads(message.value)
                continue
            if isinstance(message, Raised):
                outcome.error_type = message.error_type
                outcome.error_message = message.message
                outcome.traceback = message.traceback
            else:
                rank.kill()
                outcome.error_type = "RankDied"
                outcome.error_message = rank.exit_text()
            if time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                stuck = f"still running {grace:g} s after rank {rank.index} failed"
    if pending:
        dump_and_kill(ranks)
        for rank in pending:
            outcomes[rank.index] = RankOutcome(
                rank.index, error_type="RankTimeout", error_message=stuck
            )
    for rank in ranks:
        outcomes[rank.index].output = rank.text()
    return [outcomes[rank.index] for rank in ranks]


def clean(ranks: list[RankHandle]) -> None:
    """Let ranks drop the state of a job; kill those that cannot, so that others replace them."""
    for rank in ranks:
        rank.send(Clean())
    pending = list(ranks)
    deadline = time.monotonic() + CLEAN_SECONDS
    while pending:
        events = next_messages(pending, deadline)
        if not events:
            dump_and_kill(pending)
            events = [(rank, None) for rank in pending]
        for rank, message in events:
            pending.remove(rank)
            if message == Spent():
                rank.kill()
            elif message != Ready():
                rank.kill()
                reason = message.traceback if isinstance(message, Raised) else rank.exit_text()
                warnings.warn(
                    f"rank {rank.index} could not clean up after a job and is replaced: {reason}\n"
                    f"{tail(rank.text())}",
                    RuntimeWarning,
                    stacklevel=2,
                )


def dump_and_kill(ranks: list[RankHandle]) -> None:
    """Kill ranks after they have written the stacks of their threads to their logs."""
    # All signals go out first: a rank whose peer has gone would unwind before it shows its stack.
    for rank in ranks:
        rank.dump_stacks()
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(timeout=10.0)
        rank.kill()


def next_messages(pending: list[RankHandle], deadline: float) -> list[tuple[RankHandle, object]]:
    """Wait until ranks answer or die; return them with their messages.

    The message of a dead rank is None. At the deadline, the list is empty.
    """
    by_connection: dict[Connection, RankHandle] = {rank.connection: rank for rank in pending}
    while True:
        remaining = deadline - time.monotonic()
        events: list[tuple[RankHandle, object]] = []
        for connection in wait(list(by_connection), max(0.0, min(remaining, POLL_SECONDS))):
            assert isinstance(connection, Connection)
            try:
                message = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                message = None
            events.append((by_connection[connection], message))
        if not events:
            for rank in pending:
                if rank.process.poll() is not None and not rank.connection.poll():
                    events.append((rank, None))
        if events or remaining <= 0:
            return events


def tail(text: str) -> str:
    """Return the last `TAIL_LINES` lines of a text."""
    lines = text.rstrip().splitlines()
    if len(lines) > TAIL_LINES:
        lines = [f"({len(lines) - TAIL_LINES} lines left out)", *lines[-TAIL_LINES:]]
    return "\n".join(lines) or "(nothing)"
