"""The pool's end of the one process that imports what ranks need, and of which ranks are forked.

Importing torch and Lightning costs a process 5 seconds of processor time, a fork of one that has
done so milliseconds. That counts where tests kill ranks: each has to be replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TypeAlias

Request: TypeAlias = tuple[str, str | int]
_POLL_SECONDS = 0.01


class NurseryError(Exception):
    """The nursery is dead or does not answer; the message has what it printed."""


class Nursery:
    """The pool's end of the process; it ends with this one, and the ranks end with it."""

    def __init__(self, log: Path, environ: dict[str, str], directory: Path) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "tests.nursery_process", "--fd", str(theirs.fileno())]
        if threading.current_thread() is threading.main_thread():
            # Linux sends the death signal when the starting *thread* ends, so only for this one.
            command += ["--parent", str(os.getpid())]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=environ,
                pass_fds=[theirs.fileno()],
                # ^C is for pytest alone.
                start_new_session=True,
            )
        theirs.close()

    def alive(self) -> bool:
        """Whether it can be asked; on Linux its ranks have ended with it otherwise."""
        return self._process.poll() is None

    def fork(self, end: Connection, log: Path, timeout: float) -> Forked:
        """Return a new rank that serves `end`, in a process group of its own; its output is
        appended to `log`."""
        return Forked(self, self.ask(("fork", str(log)), timeout, end))

    def ask(self, request: Request, timeout: float, end: Connection | None = None) -> int:
        """Return the answer to a request.

        Raises:
            NurseryError: none came within `timeout` seconds.
        """
        with self._lock:
            if not self.alive():
                raise NurseryError(f"it has ended:\n{self._log.read_text(errors='replace')}")
            try:
                self._connection.send(request)
                if end is not None:
                    reduction.send_handle(self._connection, end.fileno(), self._process.pid)
                if self._connection.poll(timeout):
                    answer: int = self._connection.recv()
                    return answer
            except (EOFError, OSError):
                pass
            self.close()
            raise NurseryError(
                f"no answer to {request} within {timeout:g} s:\n"
                f"{self._log.read_text(errors='replace')}"
            )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


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
