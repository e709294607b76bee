"""Client of the fork server, which tests and benchmarks share.

The fork server is a process that has imported torch, Lightning and this package. Importing them
costs a process 5 seconds of processor time; a fork of the server takes milliseconds. Tests kill
ranks and replace them, and benchmarks start groups of ranks again and again. `multiprocessing` has
a fork server, too, but its children cannot get descriptors, variables or a namespace of their own.
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
from multiprocessing.connection import Client, Pipe
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.01
# Imports take this long on a loaded machine; without a hang it is never reached.
START_SECONDS = 180.0


@dataclass(frozen=True)
class Place:
    """A host of a testbed, which a forked process enters before it calls its function.

    Attributes:
        namespace: file of the network namespace.
        cgroup: file that takes the process IDs of the control group's members.
        cpus: processors to run on; None for all.
    """

    namespace: str
    cgroup: str
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Program:
    """A process to fork, as it travels to the fork server.

    Attributes:
        function: "package.module:function", called without arguments.
        argv: `sys.argv` of the process.
        descriptors: numbers of the descriptors that travel with the request, in the process.
        environ: environment variables; None for the server's.
        directory: working directory; None for the server's.
        place: host of a testbed; None stays on this machine.
    """

    function: str
    argv: list[str]
    descriptors: list[int]
    environ: dict[str, str] | None = None
    directory: str | None = None
    place: Place | None = None


Request: TypeAlias = tuple[str, int | Program]


class ForkServerError(Exception):
    """The fork server is dead or does not answer; the message has its output."""


class ForkServerProcess:
    """The server's process. It imports when the first client connects, and ends with its owner.

    Args:
        directory: for its socket and log; the path must be short.
        modules: modules to import.
        environ: its environment variables.
    """

    def __init__(self, directory: Path, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.address, log = directory / "socket", directory / "log"
        self.address.unlink(missing_ok=True)
        self._lifeline, theirs = Pipe()
        with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as output:
            listener.bind(str(self.address))
            listener.listen()
            ends = [listener.fileno(), theirs.fileno()]
            module = f"{__name__}_process"
            command = [sys.executable, "-m", module, *map(str, ends), *modules]
            if threading.current_thread() is threading.main_thread():
                # Linux sends the death signal when the starting *thread* ends, so only for this.
                command += ["--parent", str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=dict(environ),
                pass_fds=ends,
                # Ctrl-C is for the owner alone.
                start_new_session=True,
            )
        theirs.close()

    def close(self) -> None:
        """End the server; what it has forked ends, too."""
        self._process.kill()
        self._process.wait()
        self._lifeline.close()


class ForkServer:
    """A client's connection to a fork server; what it has forked ends with the connection.

    Args:
        address: of the server's socket.

    Raises:
        ForkServerError: If there is no server.
    """

    def __init__(self, address: Path) -> None:
        self._log = address.parent / "log"
        self._lock = threading.Lock()
        try:
            self._connection = Client(str(address), "AF_UNIX")
        except OSError as error:
            raise ForkServerError(
                f"The fork server cannot be reached ({error}):\n{self._output()}"
            ) from None

    def alive(self) -> bool:
        """Return whether the server can be asked; if not, its forks have ended on Linux."""
        # The server speaks only when asked: readable bytes mean its end.
        return not self._connection.closed and not self._connection.poll()

    def start(
        self,
        function: str,
        arguments: Sequence[str],
        descriptors: Mapping[int, int],
        *,
        environ: Mapping[str, str] | None = None,
        directory: str | None = None,
        place: Place | None = None,
        timeout: float = START_SECONDS,
    ) -> ForkedProcess:
        """Return a new process, the leader of its own session, that calls a function as a program
        would: with arguments in `sys.argv[1:]`.

        Args:
            function: "package.module:function".
            arguments: texts.
            descriptors: number in the new process -> number in this one.
            environ: all of its environment variables; None for those of the server.
            directory: its working directory; None for that of the server.
            place: host of a testbed.
            timeout: seconds that the server may take; its imports count.

        Raises:
            ForkServerError: If the server does not answer in time.
        """
        program = Program(
            function,
            [function, *arguments],
            list(descriptors),
            None if environ is None else dict(environ),
            directory,
            place,
        )
        return ForkedProcess(
            self, self.ask(("start", program), timeout, list(descriptors.values()))
        )

    def ask(self, request: Request, timeout: float, descriptors: Sequence[int] = ()) -> int:
        """Return the answer to a request.

        Raises:
            ForkServerError: If none comes within `timeout` seconds.
        """
        with self._lock:
            if not self.alive():
                raise ForkServerError(f"The fork server has ended:\n{self._output()}")
            try:
                self._connection.send(request)
                for descriptor in descriptors:
                    reduction.send_handle(self._connection, descriptor, None)
                if self._connection.poll(timeout):
                    answer: int = self._connection.recv()
                    return answer
            except (EOFError, OSError):
                pass
            # A late answer must not be taken for that to another request.
            self.close()
            raise ForkServerError(
                f"The fork server has not answered {request} within {timeout:g} s:\n"
                f"{self._output()}"
            )

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else "(nothing)"


class ForkedProcess:
    """A forked process, with the part of `subprocess.Popen` that its users need."""

    _TIMEOUT = 30.0

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None as long as the process lives."""
        if self.returncode is None:
            try:
                status = self._server.ask(("poll", self.pid), self._TIMEOUT)
            except ForkServerError:
                status = signal.SIGKILL
            self.returncode = None if status < 0 else os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = _TIMEOUT) -> int:
        """Return the exit status.

        Raises:
            TimeoutExpired: If the process lives longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked process", timeout)
            time.sleep(_POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the process with its process group, and wait for its end."""
        # Its children may live on when it has died itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
