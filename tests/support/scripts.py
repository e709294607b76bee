"""Scripts that tests start as processes of their own, with all descendants and their output."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

# In the environment of a script and so of all that it starts, orphans and new sessions included.
MARK = "DLRES_TEST_SCRIPT"
LINE_POLL_SECONDS = 0.05
# Deadline of one script. Longer than any script takes on a loaded machine, and below the 300 s of a
# test, so that a hang ends with the script's stacks.
SCRIPT_SECONDS = 240.0


@dataclass(frozen=True)
class ScriptResult:
    """Exit status of a script, and its stdout and stderr as one text."""

    returncode: int
    output: str


class ScriptTimeout(Exception):
    """A script overran its deadline and was killed; the message has its stacks and output."""


class ScriptHandle:
    """A running script, its descendants and its output."""

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str], cwd: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**env, MARK: self._mark},
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while the script runs."""
        return self._process.poll()

    def output(self) -> str:
        """Everything that the script and its descendants have printed until now."""
        return self._log.read_text(errors="replace")

    def wait(self, timeout: float = SCRIPT_SECONDS) -> int:
        """Wait for the script's own end; past the deadline kill its tree and show all stacks."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._dump_and_kill()
            raise ScriptTimeout(
                f"script still running after {timeout:g} s; its output and stacks:\n{self.output()}"
            ) from None

    def wait_for_line(self, regex: str, timeout: float = SCRIPT_SECONDS) -> re.Match[str]:
        """Wait until a whole line of the output contains `regex`; return the match."""
        deadline = time.monotonic() + timeout
        children: list[int] = []
        while True:
            has_exited = self.returncode is not None
            if has_exited:
                # Only now: `children` reads files of all processes of the machine.
                children = self.children()
            ended = has_exited and not children
            for line in self.output().splitlines(keepends=True):
                match = re.search(regex, line.rstrip("\n"))
                if match and (ended or line.endswith("\n")):
                    return match
            if ended:
                raise AssertionError(
                    f"script ended with status {self.returncode} and no line matched {regex!r}:\n"
                    f"{self.output()}"
                )
            if time.monotonic() > deadline:
                self._dump_and_kill()
                raise ScriptTimeout(
                    f"no line matched {regex!r} in {timeout:g} s; output and stacks:\n"
                    f"{self.output()}"
                )
            running = children[:1] if has_exited else [self.pid]
            _wait_for_exit(running, time.monotonic() + LINE_POLL_SECONDS)

    def children(self) -> list[int]:
        """The pids of all living descendants, orphans included."""
        parents, marked = _processes(f"{MARK}={self._mark}".encode())
        family = {self.pid, *marked}
        while grown := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= grown
        return sorted(family & parents.keys() - {self.pid})

    def wait_for_no_children(self, timeout: float = SCRIPT_SECONDS) -> None:
        """Wait until every descendant has ended."""
        deadline = time.monotonic() + timeout
        while children := self.children():
            _wait_for_exit(children, deadline)
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"descendants {self.children()} still run after {timeout:g} s:\n{self.output()}"
                )

    def kill_tree(self) -> None:
        """Kill the script and all descendants, and wait until they are gone."""
        deadline = time.monotonic() + 30.0
        while True:
            children = self.children()
            self._signal_all(children, signal.SIGKILL)
            self._process.wait()
            if not children or time.monotonic() > deadline:
                return
            _wait_for_exit(children, deadline)

    def _dump_and_kill(self) -> None:
        children, deadline = self.children(), time.monotonic() + 10.0
        # One after the other: stacks are written in small pieces, into one file.
        self._process.send_signal(signal.SIGUSR1)
        _wait_for_exit([self.pid], deadline)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
            _wait_for_exit([pid], deadline)
        self.kill_tree()

    def _signal_all(self, children: list[int], number: signal.Signals) -> None:
        # Popen's own method for the script, because the kernel may reuse its pid once it is reaped.
        self._process.send_signal(number)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


StartScript = Callable[..., ScriptHandle]
RunScript = Callable[..., ScriptResult]


def _processes(mark: bytes) -> tuple[dict[int, int], list[int]]:
    """The parent of each process that is not a zombie, and those whose environment has `mark`."""
    parents: dict[int, int] = {}
    marked: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            # The command's name, in parentheses, may itself contain spaces and parentheses.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            parents[pid] = int(parent)
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                marked.append(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return parents, marked


def _wait_for_exit(pids: Sequence[int], deadline: float) -> None:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            wait([descriptor], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(descriptor)
