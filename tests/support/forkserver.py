"""The process that imports what ranks need, and of which the ranks of all pools are forked.

Importing torch and Lightning costs a process 5 seconds of processor time, a fork of one that has
done so milliseconds. That counts where tests kill ranks: each has to be replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Client, Connection, Pipe
from pathlib import Path
from typing import TypeAlias

import pytest

# Where a session keeps the addresses of its own.
ADDRESSES = pytest.StashKey[list[Path]]()
_POLL_SECONDS = 0.01
_CALL_SECONDS = 180.0


@dataclass(frozen=True)
class Program:
    """What `Nursery.call` asks for, as it travels to the process."""

    function: str
    argv: list[str]
    descriptors: list[int]
    environ: dict[str, str]
    directory: str


Request: TypeAlias = tuple[str, str | int | Program]


class NurseryError(Exception):
    """The nursery is dead or does not answer; the message has what it printed."""


class NurseryProcess:
    """The process, which imports when somebody first connects. It ends with this one, and the ranks
    end with it."""

    def __init__(self, directory: Path, environ: dict[str, str], cwd: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.address, self._log = directory / "socket", directory / "log"
        self.address.unlink(missing_ok=True)
        self._lifeline, theirs = Pipe()
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as output:
            listener.bind(str(self.address))
            listener.listen()
            ends = [listener.fileno(), theirs.fileno()]
            command = [sys.executable, "-m", "tests.support.forkserver_process", *map(str, ends)]
            if threading.current_thread() is threading.main_thread():
                # Linux sends the death signal when the starting *thread* ends, so only for this.
                command += ["--parent", str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=environ,
                pass_fds=ends,
                # ^C is for pytest alone.
                start_new_session=True,
            )
        theirs.close()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._lifeline.close()


class Nursery:
    """One pool's connection to the process; the pool's ranks end with the connection.

    Args:
        address: of the process.

    Raises:
        NurseryError: there is none.
    """

    def __init__(self, address: Path) -> None:
        self._log = address.parent / "log"
        self._lock = threading.Lock()
        try:
            self._connection = Client(str(address), "AF_UNIX")
        except OSError as error:
            raise NurseryError(f"it cannot be reached ({error}):\n{self._said()}") from None

    def alive(self) -> bool:
        """Whether it can be asked; on Linux its ranks have ended with it otherwise."""
        # It speaks when asked: something to read is its end.
        return not self._connection.closed and not self._connection.poll()

    def fork(self, end: Connection, log: Path, timeout: float) -> Forked:
        """Return a new rank that serves `end`, in a process group of its own; its output is
        appended to `log`."""
        return Forked(self, self.ask(("fork", str(log)), timeout, [end.fileno()]))

    def call(
        self,
        function: str,
        arguments: Sequence[str],
        descriptors: Mapping[int, int],
        timeout: float = _CALL_SECONDS,
    ) -> Forked:
        """Return a new process that calls a function, such as "room.module:main", as a program of
        its own would: with arguments in `sys.argv[1:]`, and with this process's variables and
        directory. It lives on when this process has ended.

        Args:
            descriptors: those that it gets: number there -> number here.
        """
        program = Program(
            function, [function, *arguments], list(descriptors), dict(os.environ), os.getcwd()
        )
        pid = self.ask(("call", program), timeout, list(descriptors.values()))
        return Forked(self, pid)

    def ask(self, request: Request, timeout: float, descriptors: Sequence[int] = ()) -> int:
        """Return the answer to a request.

        Raises:
            NurseryError: none came within `timeout` seconds.
        """
        with self._lock:
            if not self.alive():
                raise NurseryError(f"it has ended:\n{self._said()}")
            try:
                self._connection.send(request)
                for descriptor in descriptors:
                    reduction.send_handle(self._connection, descriptor, None)
                if self._connection.poll(timeout):
                    answer: int = self._connection.recv()
                    return answer
            except (EOFError, OSError):
                pass
            self.close()
            raise NurseryError(f"no answer to {request} within {timeout:g} s:\n{self._said()}")

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else "(nothing)"


class Forked:
    """A forked rank, with the part of `subprocess.Popen` that the pool needs."""

    _TIMEOUT = 30.0

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None as long as it lives."""
        if self.returncode is None:
            try:
                status = self._nursery.ask(("poll", self.pid), self._TIMEOUT)
            except NurseryError:
                status = signal.SIGKILL
            self.returncode = None if status < 0 else os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = _TIMEOUT) -> int:
        """Return the exit status.

        Raises:
            TimeoutExpired: it lives longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(_POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill it with the processes that it started, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
