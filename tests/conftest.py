"""Fixtures for tests that need real processes, and the reasons for which such tests are skipped.

`pool` runs functions on ranks that the whole session shares. `run_script` and `start_script` run
programs of their own, for what a shared rank cannot show: launchers, commands, a killed rank. None
of them leaves a process behind.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.nursery import ADDRESSES
from tests.pool import NURSERIES, RankPool, python_environ, start_nursery
from tests.support.examples import examples

# In the environment of a script and so of all that it starts, orphans and new sessions included.
MARK = "DLRES_TEST_SCRIPT"
LINE_POLL_SECONDS = 0.05
# For one script: only a hang takes so long on a loaded machine, and a test may take 300 s.
SCRIPT_SECONDS = 240.0

# Threads of torch that wait for each other spin, beside other workers for most of their time. It
# has to be said before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whatever depends on seconds fails on a loaded machine.
settings.register_profile(
    "tests",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("tests")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and whatever these start inherits it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Start what ranks are forked of, once for all workers of xdist; each imports when it is first
    asked."""
    told = getattr(config, "workerinput", None)
    if told is not None:
        config.stash[ADDRESSES] = list(map(Path, told["nurseries"]))
        return
    # Not below the test's own directories: a socket's path must be short.
    directory = tempfile.TemporaryDirectory(prefix="dlres-tests-")
    config.add_cleanup(directory.cleanup)
    config.stash[ADDRESSES] = []
    for number in range(NURSERIES):
        nursery = start_nursery(Path(directory.name, str(number)))
        config.add_cleanup(nursery.close)
        config.stash[ADDRESSES].append(nursery.address)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist where they are."""
    node.workerinput["nurseries"] = list(map(str, node.config.stash[ADDRESSES]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect tests, and so import, without the garbage collector: it would take a fifth of the
    time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[object]:
    """Take what outlives a test, such as imported modules, out of the garbage collector's sight.

    To go through all of that takes up to half a second, and hundreds of cases collect garbage.
    """
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root: network namespaces, traffic control and cgroups")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")


@pytest.fixture(scope="session")
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankPool]:
    """The session's rank processes, which start when they are asked for."""
    ranks = RankPool(tmp_path_factory.mktemp("ranks"), nurseries=request.config.stash[ADDRESSES])
    ranks.start()
    yield ranks
    ranks.close()


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended, with its stdout and stderr as one text."""

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
        while True:
            children = self.children()
            ended = self._process.poll() is not None and not children
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
            running = [self.pid] if self.returncode is None else children[:1]
            _wait_for_exit(running, time.monotonic() + LINE_POLL_SECONDS)

    def children(self) -> list[int]:
        """The pids of all living descendants, orphans included."""
        parents, marked = _processes(f"{MARK}={self._mark}".encode())
        found = set(marked)
        family = {self.pid} | found
        while grown := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= grown
        return sorted(family & parents.keys() - {self.pid})

    def wait_for_no_children(self, timeout: float = SCRIPT_SECONDS) -> None:
        """Wait until every descendant has ended, for tests of who outlives whom."""
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
        # Popen's own method for the script, whose pid may be another's once it is reaped.
        self._process.send_signal(number)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


StartScript = Callable[..., ScriptHandle]
RunScript = Callable[..., ScriptResult]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread computes meanwhile."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[StartScript]:
    """`start_script(script, *argv, env=None, cwd=None, launcher=())`: a handle of a new process.

    `script` is a path, or a string with the source itself. `env` adds to this process's variables
    (None removes one), `cwd` is the test's `tmp_path` unless given, and `launcher` goes before the
    script, as in `("-m", "torch.distributed.run", "--nproc-per-node=2")`. Whatever still runs at
    the end of the test is killed.
    """
    handles: list[ScriptHandle] = []

    def start(
        script: Path | str,
        *argv: object,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        launcher: Sequence[str] = (),
    ) -> ScriptHandle:
        number = len(handles)
        if isinstance(script, str):
            source = textwrap.dedent(script)
            script = tmp_path / f"script{number}.py"
            script.write_text(source)
        variables: dict[str, str | None] = {
            **python_environ(tmp_path / "site"),
            **(env or {}),
        }
        handle = ScriptHandle(
            [sys.executable, *launcher, str(script), *map(str, argv)],
            tmp_path / f"script{number}.log",
            {name: value for name, value in variables.items() if value is not None},
            cwd or tmp_path,
        )
        handles.append(handle)
        return handle

    yield start
    for handle in handles:
        handle.kill_tree()


@pytest.fixture
def run_script(start_script: StartScript) -> RunScript:
    """`run_script(script, *argv, timeout=..., ...)`: a `ScriptResult`; see `start_script`.

    Raises `ScriptTimeout` past the deadline. Descendants that outlive the script are killed.
    """

    def run(
        script: Path | str,
        *argv: object,
        timeout: float = SCRIPT_SECONDS,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        launcher: Sequence[str] = (),
    ) -> ScriptResult:
        handle = start_script(script, *argv, env=env, cwd=cwd, launcher=launcher)
        returncode = handle.wait(timeout)
        handle.kill_tree()
        return ScriptResult(returncode, handle.output())

    return run


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
