"""Fixtures for tests that need real processes, and the reasons for which such tests are skipped.

`pool` runs functions on ranks that the whole session shares. `run_script` and `start_script` run
programs of their own, for what a shared rank cannot show: launchers, commands, a killed rank. None
of them leaves a process behind.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.examples import examples
from tests.support.rank_pool import (
    ADDRESSES,
    FORK_SERVERS,
    RankPool,
    python_environ,
    start_forkserver,
)
from tests.support.scripts import (
    SCRIPT_SECONDS,
    RunScript,
    ScriptHandle,
    ScriptResult,
    StartScript,
)

# Torch's threads spin while they wait for each other, and so take the cores of other test workers.
# Torch reads the variable when it is imported, so set it before.
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
    # A shell starts background jobs with SIGINT ignored, and their child processes inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Start the fork servers once for all workers of xdist.

    Each server imports its modules at the first request.
    """
    worker_input = getattr(config, "workerinput", None)
    if worker_input is not None:
        config.stash[ADDRESSES] = list(map(Path, worker_input["fork_servers"]))
        return
    # Not below the test's own directories: a socket's path must be short.
    directory = tempfile.TemporaryDirectory(prefix="dlres-tests-")
    config.add_cleanup(directory.cleanup)
    config.stash[ADDRESSES] = []
    for number in range(FORK_SERVERS):
        fork_server = start_forkserver(Path(directory.name, str(number)))
        config.add_cleanup(fork_server.close)
        config.stash[ADDRESSES].append(fork_server.address)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the addresses of the fork servers to a worker of xdist."""
    node.workerinput["fork_servers"] = list(map(str, node.config.stash[ADDRESSES]))


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

    Each collection would take up to half a second to go through them, and every test collects.
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
    ranks = RankPool(tmp_path_factory.mktemp("ranks"), fork_servers=request.config.stash[ADDRESSES])
    ranks.start()
    yield ranks
    ranks.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Fixture that closes at the end of the test what the test has entered into it."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Fixture that limits torch to one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def short_link_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixture that shortens the measurements of memory links; they are then less exact."""
    monkeypatch.setattr("lightning_dlres.memory.profile.links._UNCACHED_BYTES", 4 << 20)


@pytest.fixture
def own_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory for the sockets and locks of this test. Its path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="dl") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield Path(short)


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
            **python_environ(),
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
