"""Rank processes that live as long as the pytest session.

Starting a process with torch and Lightning costs seconds. A test with several real ranks sends a
function to this pool instead of starting processes of its own. The ranks restore their state after
each job. If a rank fails, hangs or dies, the error shows its traceback, stacks and output.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from tests.support.rank_handles import (
    GRACE_SECONDS,
    RankHandle,
    RankOutcome,
    clean,
    collect,
    dump_and_kill,
    next_messages,
    tail,
)
from tests.support.rank_messages import Job, Ready

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment

# Ranks of one fork server have the same hash seed. Neighbouring ranks come from different servers,
# so that code that depends on the order of a set does not agree by accident.
FORK_SERVERS = 2
# Modules that a fork server imports. They bring Lightning, the whole package, Numba's registries,
# and what test modules import.
MODULES = (
    "hypothesis",
    "pytest",
    "tests.support.numba_registries",
    "tests.support.parity",
    "tests.support.training_cases",
    "lightning_dlres.prefetch.cache.host",
)
# Key of the fork servers' addresses in the stash of a pytest session.
ADDRESSES = pytest.StashKey[list[Path]]()


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
    """Start a fork server, from which pools fork their ranks; `directory` is for its files."""
    environ = python_environ()
    if sys.platform == "linux":
        # Otherwise gloo resolves the host's name, which is slow or fails on some machines.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return ForkServerProcess(directory, MODULES, environ)


@dataclass(frozen=True)
class RankContext:
    """First argument of a job's function on each rank.

    Attributes:
        rank: This rank.
        world_size: Number of ranks of the job.
        port: Port of rank 0's process group, which was free when the job began.
        environment: Lightning's cluster environment, with this rank and port.
        tmp: Working directory of all ranks of the job; deleted after the job.
    """

    rank: int
    world_size: int
    port: int
    environment: ClusterEnvironment
    tmp: Path

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
        self._ranks: list[RankHandle] = []
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
            ValueError: If the pool has too few ranks, or ranks cannot import the function.
        """
        outcomes = self._run(
            fn, world_size, args, kwargs, timeout=timeout, keep=keep, grace=GRACE_SECONDS
        )
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
        outcomes = self._run(
            fn, world_size, args, kwargs, timeout=timeout, keep=keep, grace=timeout
        )
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
        *,
        timeout: float,
        keep: bool,
        grace: float,
    ) -> list[RankOutcome]:
        """Run a job; for `grace` see `collect`, for the other arguments `run`."""
        if not 1 <= world_size <= self._max_ranks:
            raise ValueError(
                f"world_size must be 1 to {self._max_ranks}, got {world_size}. "
                "Use fewer ranks, or a pool with a larger max_ranks."
            )
        # The name of a nested function or a lambda has "<locals>" or "<lambda>" in it.
        if "<" in fn.__qualname__ or fn.__module__ == "__main__":
            raise ValueError(
                f"fn must be a function that a rank can import, got {fn.__module__}."
                f"{fn.__qualname__}. Move it to the top level of the test module."
            )
        arguments = pickle.dumps((args, kwargs))
        limits: dict[str, Any] = {"timeout": timeout, "keep": keep, "grace": grace}
        outcomes = self._attempt(fn, world_size, arguments, **limits)
        if any(_address_in_use(outcome) for outcome in outcomes):
            # The port was free when the job was made, but another process has taken it since.
            outcomes = self._attempt(fn, world_size, arguments, **limits)
        return outcomes

    def _attempt(
        self,
        fn: Callable[..., Any],
        world_size: int,
        arguments: bytes,
        *,
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
                        module=fn.__module__,
                        qualname=fn.__qualname__,
                        rank=rank.index,
                        world_size=world_size,
                        port=port,
                        tmp=str(tmp),
                        arguments=arguments,
                    )
                )
            outcomes = collect(ranks, timeout, grace)
            if keep or not any(outcome.error_type for outcome in outcomes):
                clean([rank for rank in ranks if rank.alive()])
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

    def _ready_ranks(self, count: int) -> list[RankHandle]:
        """Return the first ranks, and start those that are missing or dead.

        Raises:
            RankFailure: If a rank does not start.
        """
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
            events = next_messages(waiting, deadline)
            if not events:
                dump_and_kill(waiting)
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
                        f"rank {rank.index} did not start: {rank.exit_text()}\n{tail(rank.text())}"
                        for rank in failed
                    ),
                    {rank.index: ("RankDied", rank.exit_text()) for rank in failed},
                )
        return ranks

    def _new_rank(self, index: int) -> RankHandle:
        return RankHandle(index, self._directory, self._fork_servers[index % FORK_SERVERS])


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
        lines.append(tail(outcome.output))
    return RankFailure("\n".join(filter(None, lines)), errors)


def _address_in_use(outcome: RankOutcome) -> bool:
    message = outcome.error_message.lower()
    return "eaddrinuse" in message or "address already in use" in message


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
