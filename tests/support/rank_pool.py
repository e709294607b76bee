"""Rank processes that live as long as the pytest session.

Starting a process with torch and Lightning costs seconds. A test with several real ranks sends a
function to this pool instead of starting processes of its own. The ranks restore their state after
each job. The report of a rank that fails, hangs or dies has its traceback, stacks and output.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.support.forkserver import (
    ROOT,
    START_SECONDS,
    ForkServer,
    ForkServerError,
    ForkServerProcess,
)

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment

# Ranks of one fork server have the same hash seed. Neighbouring ranks come from different servers,
# so that code that depends on the order of a set does not agree by accident.
FORK_SERVERS = 2
# Modules that a fork server imports. They import Lightning, the whole package, and the modules that
# test modules import.
MODULES = (
    "hypothesis",
    "pytest",
    "tests.support.parity",
    "tests.support.training_cases",
    "lightning_dlres.prefetch.cache.host",
)
# Where a pytest session keeps the addresses of its fork servers.
ADDRESSES = pytest.StashKey[list[Path]]()
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


def python_environ() -> dict[str, str]:
    """Return the variables for a Python process that imports our packages, and whose first module
    is tests/support/site/sitecustomize.py."""
    path = [str(ROOT / "tests" / "support" / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # A killed process would take the last lines of a buffer along.
        "PYTHONUNBUFFERED": "1",
    }


def start_forkserver(directory: Path) -> ForkServerProcess:
    """Start a process of which pools may fork their ranks; `directory` is for its files."""
    environ = python_environ()
    if sys.platform == "linux":
        # Otherwise gloo resolves the host's name, which is slow or fails on some machines.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return ForkServerProcess(directory, MODULES, environ)


@dataclass(frozen=True)
class RankContext:
    """First argument of a job's function on each rank."""

    rank: int
    world_size: int
    port: int
    environment: ClusterEnvironment
    tmp: Path
    """Working directory of all ranks of the job; deleted after the job."""

    def init_process_group(self, backend: str = "gloo", timeout: float = 30.0) -> None:
        """Join the job's default process group; the pool destroys it after the job."""
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group(
            backend,
            init_method=f"tcp://{self.environment.main_address}:{self.environment.main_port}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout),
        )


@dataclass(frozen=True)
class Job:
    """One rank's share of a job, as it travels to the rank."""

    module: str
    qualname: str
    rank: int
    world_size: int
    port: int
    tmp: str
    # Pickled apart, so that a failure to unpickle it in the rank is a failure of the job.
    arguments: bytes


@dataclass(frozen=True)
class Clean:
    """Tells a rank that every rank has reported, so that it may drop the job's state."""


@dataclass(frozen=True)
class Ready:
    """A rank's answer: it is started, or clean again."""


@dataclass(frozen=True)
class Spent:
    """A rank's answer instead of `Ready`: threads of the job still run, for example one that waits
    for a dead peer. Another process must take this one's place, or later tests find the threads.
    """


@dataclass(frozen=True)
class Returned:
    """A rank's answer: the function's result, pickled."""

    value: bytes


@dataclass(frozen=True)
class Raised:
    """A rank's answer: the function, or the cleaning after it, raised."""

    error_type: str
    message: str
    traceback: str


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


class RankFailure(Exception):
    """Some ranks of a job failed; `errors` maps each of them to (type name, message)."""

    def __init__(self, message: str, errors: dict[int, tuple[str, str]]) -> None:
        super().__init__(message)
        self.errors = errors


class RankPool:
    """Starts ranks when a job needs them and keeps them for the next one; see `run`.

    The ranks have the environment variables of the fork servers, which inherit them when they
    start. Variables that a test has patched do not reach the ranks.

    Args:
        directory: Directory for logs and for the working directories of jobs.
        max_ranks: Maximum number of ranks of a job.
        fork_servers: Addresses of running fork servers; the pool starts those that are missing.
    """

    def __init__(
        self, directory: Path, max_ranks: int = 4, fork_servers: Sequence[Path] = ()
    ) -> None:
        self._directory = directory
        self._max_ranks = max_ranks
        self._ranks: list[_Rank] = []
        # Addresses of servers that were running before, by number, until the pool connects to them.
        self._addresses = dict(enumerate(fork_servers))
        self._own_processes: list[ForkServerProcess] = []
        self._fork_servers: dict[int, ForkServer] = {}
        self._jobs = 0

    def start(self, ranks: int = FORK_SERVERS) -> None:
        """Start the imports of the fork servers for this number of ranks, without waiting."""
        for number in range(min(ranks, FORK_SERVERS)):
            fork_server = self._fork_servers.get(number)
            if fork_server is None or not fork_server.alive():
                self._fork_servers[number] = self._connected(number)

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 120.0,
        keep: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(rank_context, *args, **kwargs)` on each rank and return the results by rank.

        Each rank begins a job with its random generators seeded by its rank. The ranks of a failed
        job are replaced.

        Args:
            fn: Function at the top level of an importable module.
            world_size: Number of ranks.
            args: Further arguments of the function.
            timeout: Time limit in seconds.
            keep: True to keep the ranks of a failed job that are still alive.
            kwargs: Further keyword arguments of the function.

        Raises:
            RankFailure: If a rank raises, dies or exceeds the time limit.
        """
        outcomes = self._run(fn, world_size, args, kwargs, timeout, keep, GRACE_SECONDS)
        if any(outcome.error_type for outcome in outcomes):
            raise _failure(fn, outcomes)
        return [outcome.value for outcome in outcomes]

    def run_expecting_errors(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 120.0,
        keep: bool = False,
        **kwargs: Any,
    ) -> list[RankOutcome]:
        """Like `run`, but errors and deaths are outcomes, and each rank has the whole `timeout`.

        A rank that does not end within it still raises `RankFailure`.
        """
        outcomes = self._run(fn, world_size, args, kwargs, timeout, keep, timeout)
        if any(outcome.error_type == "RankTimeout" for outcome in outcomes):
            raise _failure(fn, outcomes)
        return outcomes

    def close(self) -> None:
        """Kill every rank, with the processes that it started."""
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()
        for fork_server in self._fork_servers.values():
            fork_server.close()
        self._fork_servers.clear()
        for process in self._own_processes:
            process.close()
        self._own_processes.clear()

    def _connected(self, number: int) -> ForkServer:
        if number in self._addresses:
            # A server that cannot be reached is not tried again: the pool starts one of its own.
            with contextlib.suppress(ForkServerError):
                return ForkServer(self._addresses.pop(number))
        process = start_forkserver(self._directory / f"fork_server{number}")
        self._own_processes.append(process)
        return ForkServer(process.address)

    def _run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float,
        keep: bool,
        grace: float,
    ) -> list[RankOutcome]:
        if not 1 <= world_size <= self._max_ranks:
            raise ValueError(
                f"world_size must be 1 to {self._max_ranks}, got {world_size}. "
                "Use fewer ranks, or a pool with a larger max_ranks."
            )
        if "<" in fn.__qualname__ or fn.__module__ == "__main__":
            raise ValueError(
                f"fn must be a function that a rank can import, got {fn.__module__}."
                f"{fn.__qualname__}. Move it to the top level of the test module."
            )
        arguments = pickle.dumps((args, kwargs))
        outcomes = self._attempt(fn, world_size, arguments, timeout, keep, grace)
        if any(_address_in_use(outcome) for outcome in outcomes):
            # The port was free when the job was made, but another process has taken it since.
            outcomes = self._attempt(fn, world_size, arguments, timeout, keep, grace)
        return outcomes

    def _attempt(
        self,
        fn: Callable[..., Any],
        world_size: int,
        arguments: bytes,
        timeout: float,
        keep: bool,
        grace: float,
    ) -> list[RankOutcome]:
        ranks = self._ready_ranks(world_size)
        self._jobs += 1
        tmp = self._directory / f"job-{self._jobs}"
        tmp.mkdir()
        port = _free_port()
        try:
            for rank in ranks:
                rank.begin(
                    Job(
                        fn.__module__,
                        fn.__qualname__,
                        rank.index,
                        world_size,
                        port,
                        str(tmp),
                        arguments,
                    )
                )
            outcomes = _collect(ranks, timeout, grace)
            if keep or not any(outcome.error_type for outcome in outcomes):
                _clean([rank for rank in ranks if rank.alive()])
            else:
                for rank in ranks:
                    rank.kill()
        except BaseException:
            # Ranks in the middle of a job would answer the next one with this one's results.
            for rank in ranks:
                rank.kill()
            raise
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
        return outcomes

    def _ready_ranks(self, count: int) -> list[_Rank]:
        self.start(count)
        for index in range(count):
            if index == len(self._ranks):
                self._ranks.append(self._new_rank(index))
            elif not self._ranks[index].alive():
                self._ranks[index].kill()
                self._ranks[index] = self._new_rank(index)
        ranks = self._ranks[:count]
        waiting = [rank for rank in ranks if not rank.ready]
        deadline = time.monotonic() + START_SECONDS
        while waiting:
            events = _next_messages(waiting, deadline)
            if not events:
                _dump_and_kill(waiting)
            for rank, message in events:
                if message == Ready():
                    rank.ready = True
                    waiting.remove(rank)
                else:
                    rank.kill()
            failed = [rank for rank in ranks if not rank.alive()]
            if failed:
                raise RankFailure(
                    "\n".join(
                        f"rank {rank.index} did not start: {rank.exit_text()}\n{_tail(rank.text())}"
                        for rank in failed
                    ),
                    {rank.index: ("RankDied", rank.exit_text()) for rank in failed},
                )
        return ranks

    def _new_rank(self, index: int) -> _Rank:
        return _Rank(index, self._directory, self._fork_servers[index % FORK_SERVERS])


class _Rank:
    """The pool's end of one rank process."""

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
        # Ignore the error if the rank has died: `_next_messages` reports the death.
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


def _collect(ranks: list[_Rank], timeout: float, grace: float) -> list[RankOutcome]:
    outcomes: dict[int, RankOutcome] = {}
    pending = list(ranks)
    deadline = time.monotonic() + timeout
    stuck = f"still running after {timeout:g} s"
    while pending:
        events = _next_messages(pending, deadline)
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
        _dump_and_kill(ranks)
        for rank in pending:
            outcomes[rank.index] = RankOutcome(
                rank.index, error_type="RankTimeout", error_message=stuck
            )
    for rank in ranks:
        outcomes[rank.index].output = rank.text()
    return [outcomes[rank.index] for rank in ranks]


def _clean(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.send(Clean())
    pending = list(ranks)
    deadline = time.monotonic() + CLEAN_SECONDS
    while pending:
        events = _next_messages(pending, deadline)
        if not events:
            _dump_and_kill(pending)
            events = [(rank, None) for rank in pending]
        for rank, message in events:
            pending.remove(rank)
            if message == Spent():
                rank.kill()
            elif message != Ready():
                rank.kill()
                why = message.traceback if isinstance(message, Raised) else rank.exit_text()
                warnings.warn(
                    f"rank {rank.index} could not clean up after a job and is replaced: {why}\n"
                    f"{_tail(rank.text())}",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _dump_and_kill(ranks: list[_Rank]) -> None:
    # All signals go out first: a rank whose peer has gone would unwind before it shows its stack.
    for rank in ranks:
        rank.dump_stacks()
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(timeout=10.0)
        rank.kill()


def _next_messages(pending: list[_Rank], deadline: float) -> list[tuple[_Rank, object]]:
    """Wait until a rank answers or dies (its message is then None); nothing at the deadline."""
    by_connection: dict[Connection, _Rank] = {rank.connection: rank for rank in pending}
    while True:
        remaining = deadline - time.monotonic()
        events: list[tuple[_Rank, object]] = []
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


def _failure(fn: Callable[..., Any], outcomes: list[RankOutcome]) -> RankFailure:
    errors = {
        outcome.rank: (outcome.error_type, outcome.error_message)
        for outcome in outcomes
        if outcome.error_type
    }
    timed_out = any(kind == "RankTimeout" for kind, _ in errors.values())
    lines = [
        f"{len(errors)} of {len(outcomes)} ranks failed in {fn.__module__}.{fn.__qualname__}: "
        + ", ".join(f"rank {rank} ({kind})" for rank, (kind, _) in errors.items())
    ]
    for outcome in outcomes:
        if outcome.error_type:
            lines.append(f"--- rank {outcome.rank}: {outcome.error_type}: {outcome.error_message}")
            lines.append(outcome.traceback.rstrip())
        elif timed_out:
            lines.append(f"--- rank {outcome.rank}: returned a value")
        else:
            continue
        lines.append(f"--- output of rank {outcome.rank}:")
        lines.append(_tail(outcome.output))
    return RankFailure("\n".join(filter(None, lines)), errors)


def _address_in_use(outcome: RankOutcome) -> bool:
    message = outcome.error_message.lower()
    return "eaddrinuse" in message or "address already in use" in message


def _tail(text: str) -> str:
    lines = text.rstrip().splitlines()
    if len(lines) > TAIL_LINES:
        lines = [f"({len(lines) - TAIL_LINES} lines left out)", *lines[-TAIL_LINES:]]
    return "\n".join(lines) or "(nothing)"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
