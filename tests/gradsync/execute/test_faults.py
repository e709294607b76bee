"""A rank that is killed, stopped or cut off ends the work of all others within the deadline, with
an error that names it."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from benchmarks.support.testbed import Host, Testbed, reason_unavailable
from lightning_dlres.codecs.gradient import State, ThresholdQuantisation
from lightning_dlres.core.comm.liveness import Watch
from lightning_dlres.core.comm.mailbox import Channel
from lightning_dlres.core.errors import PeerError
from lightning_dlres.gradsync.plan.plan import CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.support.gradient_sync import MODES, RecordingMailbox, open_sync, threads_of
from tests.support.rank_pool import RankContext, RankPool
from tests.support.waiting import wait_until

COUNTS = {"a": 20_000, "b": 9000, "c": 5000, "d": 300, "e": 12_000, "f": 100}
# Step of the fault. In the mode "replay", it repeats a plan.
FAULTY_STEP = 3
STEPS = 6
RANKS = 3
# Deadline in seconds: long enough that a busy machine does not silence a rank that runs.
DEADLINE = 4.0
# Seconds that tell a hang from an error, also on a busy machine.
HANG = 60.0
exhaustive = pytest.mark.exhaustive


class Mishap(ThresholdQuantisation):
    """Codec that runs an action in the second call of a step, between two units."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.action: Any = None

    @override
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        self.calls += 1
        if self.action is not None and self.calls == 2:
            self.action()
        super().compress(values, state, payload, scale=scale, seed=seed)


def plan_for(topology: str) -> SyncPlan:
    specs = [GradientSpec(name=key, count=count) for key, count in COUNTS.items()]
    choices = [CodecChoice(codec="tbq", partitions=1) for _ in specs]
    return make_plan(specs, choices, world_size=RANKS, topology=topology, alignment=4096)


def watch_of(context: RankContext, stack: ExitStack) -> Watch:
    """Return a watch over all ranks, which a strategy has as well."""
    quiet: dict[str, Any] = {"report": lambda text: None, "kill": lambda: None}
    invitation: list[Any] = [None]
    if context.rank == 0:
        names = [f"rank {rank}" for rank in range(context.world_size)]
        bind = context.environment.main_address
        watch = stack.enter_context(Watch.host(names, bind=bind, deadline=DEADLINE, **quiet))
        invitation[0] = watch.invitation
    dist.broadcast_object_list(invitation)
    if context.rank:
        watch = stack.enter_context(Watch.join(context.rank, invitation[0], **quiet))
    return watch


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def continue_rank(context: RankContext, victim: int, pid: int) -> None:
    """Continue a stopped rank when all others have an error, and wait until it has one, too."""

    def is_done(rank: int) -> bool:
        return Path(context.tmp, f"done{rank}").exists()

    def is_stopped() -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    others = [rank for rank in range(context.world_size) if rank != victim]
    wait_until(lambda: all(map(is_done, others)), "all other ranks have an error", HANG)
    # A signal to continue that comes first would have no effect.
    wait_until(lambda: is_stopped() or is_done(victim), "the rank has stopped", HANG)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: is_done(victim), "the stopped rank has an error, too", HANG)


def wait_for_cut(folder: Path) -> None:
    Path(folder, "in-step").touch()
    wait_until(lambda: Path(folder, "cut").exists(), "the test has cut the link", HANG)


def run_out_of_memory() -> None:
    raise MemoryError("no bytes are left")


def send_nonsense(mailbox: RecordingMailbox) -> None:
    for destination, channel in list(mailbox._sending_ends):
        if channel is Channel.GRADIENT_SYNC:
            mailbox.send(destination, channel, ("gradients",), [FAULTY_STEP, [[0, 0, -1]]])


def suffer(
    context: RankContext,
    topology: str,
    mode: str,
    victim: int,
    fault: str,
    is_watched: bool,
    transport: str = "gloo",
) -> tuple[str, float, list[str]]:
    """Return the error of this rank, the seconds from the fault's step on, and its threads."""
    before = threading.enumerate()
    context.init_process_group()
    pids: list[Any] = [None] * context.world_size
    dist.all_gather_object(pids, os.getpid())
    codec = Mishap()
    error, begin = "", 0.0
    with ExitStack() as stack:
        watch = watch_of(context, stack) if is_watched else None
        with open_sync(
            context,
            plan_for(topology),
            {"tbq": codec},
            mode=mode,
            transport=transport,
            check=watch.check if watch is not None else lambda: None,
        ) as opened:
            for step in range(STEPS):
                if step == FAULTY_STEP:
                    dist.barrier()
                    # Earlier steps load kernels and connect ranks. A watch is the first to notice.
                    is_deadline_needed = fault == "stop" and not is_watched
                    opened.mailbox.timeout = DEADLINE if is_deadline_needed else 3 * DEADLINE
                    begin, codec.calls = time.monotonic(), 0
                    if context.rank == victim:
                        codec.action = {
                            "stop": stop_this_process,
                            "kill": kill_this_process,
                            "cut": functools.partial(wait_for_cut, context.tmp),
                            "raise": run_out_of_memory,
                            "exit": functools.partial(sys.exit, "the codec ends it"),
                            "lie": functools.partial(send_nonsense, opened.mailbox),
                        }[fault]
                try:
                    opened.sync.run(step, {k: torch.ones(n) for k, n in COUNTS.items()})
                except (PeerError, MemoryError, SystemExit) as raised:
                    error = f"{type(raised).__name__}: {raised}"
                    break
            seconds = time.monotonic() - begin
            Path(context.tmp, f"done{context.rank}").touch()
            codec.action = None
            if fault == "stop" and context.rank != victim:
                continue_rank(context, victim, pids[victim])
    return error, seconds, threads_of(["dlres-sync-", "dlres-watch"], before)


def check_survivors(outcomes: list[Any], victim: int) -> None:
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.error_type is None, outcome.traceback
            error, seconds, threads = outcome.value
            assert f"rank {victim}" in error
            assert seconds < HANG
            assert threads == []


# Cases that run by default: each mode, topology and victim at least once.
KILLED = [
    ("ps", "none", 1, "gloo"),
    ("ring", "none", 0, "gloo"),
    ("ps", "always", 0, "gloo"),
    ("ring", "replay", 1, "gloo"),
    ("ps", "none", 1, "zmq"),
]
STOPPED = [
    ("ps", "none", 1, "gloo"),
    ("ring", "replay", 1, "gloo"),
    ("ps", "always", 0, "gloo"),
    ("ring", "none", 1, "zmq"),
]


def all_cases(default: list[tuple[str, str, int, str]]) -> list[Any]:
    """Return all cases of topology, mode, victim and transport; all but the given ones are
    exhaustive."""
    return [
        pytest.param(*case, marks=[] if case in default else exhaustive)
        for case in itertools.product(("ps", "ring"), MODES, (0, 1), ("gloo", "zmq"))
    ]


@pytest.mark.parametrize(("topology", "mode", "victim", "transport"), all_cases(KILLED))
def test_all_survivors_name_a_killed_rank(
    pool: RankPool, topology: str, mode: str, victim: int, transport: str
) -> None:
    """The coordinator runs on rank 0. Connections tell of the death, without a watch."""
    outcomes = pool.run_expecting_errors(
        suffer, RANKS, topology, mode, victim, "kill", False, transport, timeout=100, keep=True
    )
    assert outcomes[victim].error_type == "RankDied"
    check_survivors(outcomes, victim)


@pytest.mark.parametrize(("topology", "mode", "victim", "transport"), all_cases(STOPPED))
def test_all_survivors_name_a_stopped_rank_which_gets_an_error_when_it_continues(
    pool: RankPool, topology: str, mode: str, victim: int, transport: str
) -> None:
    outcomes = pool.run_expecting_errors(
        suffer, RANKS, topology, mode, victim, "stop", True, transport, timeout=100
    )
    check_survivors(outcomes, victim)
    error, _, threads = outcomes[victim].value
    assert "rank" in error
    assert threads == []


@pytest.mark.parametrize(
    ("topology", "mode"),
    [("ps", "none"), *(pytest.param("ps", m, marks=exhaustive) for m in ("always", "replay"))],
)
def test_without_a_watch_survivors_name_a_stopped_rank_among_the_late_ones(
    pool: RankPool, topology: str, mode: str
) -> None:
    """A rank that waits for the stopped one is late as well."""
    outcomes = pool.run_expecting_errors(
        suffer, RANKS, topology, mode, 1, "stop", False, timeout=100
    )
    check_survivors(outcomes, 1)
    assert "rank" in outcomes[1].value[0]


@pytest.mark.parametrize(
    ("topology", "mode", "fault", "transport"),
    [
        ("ps", "none", "raise", "gloo"),
        ("ring", "none", "lie", "gloo"),
        ("ring", "none", "exit", "gloo"),
        pytest.param("ps", "none", "raise", "zmq", marks=exhaustive),
        pytest.param("ring", "replay", "raise", "gloo", marks=exhaustive),
        pytest.param("ps", "always", "lie", "gloo", marks=exhaustive),
        pytest.param("ring", "none", "lie", "zmq", marks=exhaustive),
    ],
)
def test_all_ranks_learn_why_one_of_them_ended_the_work(
    pool: RankPool, topology: str, mode: str, fault: str, transport: str
) -> None:
    outcomes = pool.run(suffer, RANKS, topology, mode, 1, fault, False, transport, timeout=100)
    reason = {
        "raise": "no bytes are left",
        "exit": "the codec ends it",
        "lie": "rank 1 sent a malformed message",
    }[fault]
    for rank, (error, seconds, threads) in enumerate(outcomes):
        assert reason in error
        assert rank == 1 or "rank 1" in error
        assert seconds < HANG
        assert threads == []


def suffer_on_host(arguments: list[str]) -> None:
    """Run a rank of a testbed, print its result, and end the process as a script does."""
    rank, address, folder, *options = arguments
    environment = SimpleNamespace(main_address=address, main_port=29500)
    context = RankContext(int(rank), RANKS, 29500, cast(Any, environment), Path(folder))
    topology, mode, victim, transport = options
    result = suffer(context, topology, mode, int(victim), "cut", True, transport)
    print(json.dumps(result), flush=True)


def run_and_cut(
    folder: Path, topology: str, mode: str, victim: int, transport: str
) -> list[tuple[Any, int]]:
    """Run each rank on a host of its own, and cut off one host; return results and exit codes."""
    code = f"import sys; from {__name__} import suffer_on_host; suffer_on_host(sys.argv[1:])"
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": Testbed.interface, "OMP_NUM_THREADS": "1"}
    with Testbed([Host()] * RANKS) as bed, ExitStack() as stack:
        processes, outputs = [], []
        for rank in range(RANKS):
            outputs.append(stack.enter_context(open(Path(folder, f"{rank}.log"), "w+b")))
            arguments = [rank, bed.hosts[0].address, folder, topology, mode, victim, transport]
            argv = [sys.executable, "-c", code, *map(str, arguments)]
            options = {"stdout": outputs[-1], "stderr": subprocess.STDOUT, "env": environ}
            processes.append(bed.popen(rank, argv, **options))
        wait_until(
            lambda: (
                Path(folder, "in-step").exists() or any(p.poll() is not None for p in processes)
            ),
            "the rank is in the middle of a step",
            timeout=90.0,
        )
        bridge = bed.hosts[0].namespace.removesuffix("host0") + "bridge"
        cut = ["ip", "-n", bridge, "link", "set", f"port{victim}", "down"]
        subprocess.run(cut, check=True, timeout=20.0)
        Path(folder, "cut").touch()
        statuses = [process.wait(timeout=60.0) for process in processes]
    logs = [Path(folder, f"{rank}.log").read_text() for rank in range(RANKS)]
    return [(log, status) for log, status in zip(logs, statuses, strict=True)]


@pytest.mark.root
@exhaustive
@pytest.mark.parametrize(
    ("topology", "mode", "victim", "transport"),
    [
        ("ps", "none", 1, "gloo"),
        ("ps", "always", 0, "gloo"),
        ("ring", "replay", 2, "gloo"),
        ("ps", "none", 1, "zmq"),
    ],
)
def test_all_ranks_notice_that_a_host_is_cut_off_and_exit(
    tmp_path: Path, topology: str, mode: str, victim: int, transport: str
) -> None:
    """No connection closes then. Processes exit although threads of them wait for the lost host."""
    if reason := reason_unavailable():
        pytest.skip(reason)
    for rank, (log, status) in enumerate(run_and_cut(tmp_path, topology, mode, victim, transport)):
        lines = [line for line in log.splitlines() if line.startswith('["')]
        assert len(lines) == 1, log
        error, seconds, threads = json.loads(lines[0])
        assert f"rank {victim}" in error or (rank == victim and "rank" in error)
        assert seconds < HANG
        assert threads == []
        assert status in (0, 1), log
