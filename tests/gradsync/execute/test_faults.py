"""A rank that is killed, stopped or cut off ends the work of all others within the deadline, with
an error that names it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.gradient import State, ThresholdQuantisation
from lightning_dlres.core.comm.liveness import Watch
from lightning_dlres.core.errors import PeerError
from lightning_dlres.gradsync.plan.plan import CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.support.gradient_sync import MODES, open_sync, threads_of
from tests.support.rank_pool import RankContext, RankPool
from tests.support.waiting import wait_until

COUNTS = {"a": 20_000, "b": 9000, "c": 5000, "d": 300, "e": 12_000, "f": 100}
# Step of the fault. In the mode "replay", it repeats a plan.
FAULTY_STEP = 3
STEPS = 6
RANKS = 3
# Deadline in seconds, and the share of a test's patience that tells an error from a hang.
DEADLINE, HANG = 1.5, 20.0
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
        watch = stack.enter_context(Watch.host(names, deadline=DEADLINE, **quiet))
        invitation[0] = watch.invitation
    dist.broadcast_object_list(invitation)
    if context.rank:
        watch = stack.enter_context(Watch.join(context.rank, invitation[0], **quiet))
    return watch


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def suffer(
    context: RankContext, topology: str, mode: str, victim: int, fault: str, is_watched: bool
) -> tuple[str, float, list[str]]:
    """Return the error of this rank, the seconds from the fault's step on, and its threads."""
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
            check=watch.check if watch is not None else lambda: None,
        ) as opened:
            for step in range(STEPS):
                if step == FAULTY_STEP:
                    dist.barrier()
                    # Earlier steps load kernels and connect ranks. A watch is the first to notice.
                    opened.mailbox.timeout = (4 if is_watched else 1) * DEADLINE
                    begin, codec.calls = time.monotonic(), 0
                    if context.rank == victim:
                        codec.action = {"stop": stop_this_process, "kill": kill_this_process}[fault]
                try:
                    opened.sync.run(step, {k: torch.ones(n) for k, n in COUNTS.items()})
                except PeerError as raised:
                    error = f"{type(raised).__name__}: {raised}"
                    break
            seconds = time.monotonic() - begin
            Path(context.tmp, f"done{context.rank}").touch()
            if fault == "stop" and context.rank != victim:
                others = [rank for rank in range(context.world_size) if rank != victim]
                wait_until(
                    lambda: all(Path(context.tmp, f"done{rank}").exists() for rank in others),
                    "all other ranks have an error",
                )
                with suppress(ProcessLookupError):
                    os.kill(pids[victim], signal.SIGCONT)
                wait_until(
                    lambda: Path(context.tmp, f"done{victim}").exists(),
                    "the stopped rank has an error, too",
                )
    return error, seconds, threads_of(["dlres-sync-", "dlres-watch"])


def check_survivors(outcomes: list[Any], victim: int) -> None:
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.error_type is None, outcome.traceback
            error, seconds, threads = outcome.value
            assert f"rank {victim}" in error
            assert seconds < HANG
            assert threads == []


@pytest.mark.parametrize("topology", ["ps", "ring"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 1])
def test_all_survivors_name_a_killed_rank(
    pool: RankPool, topology: str, mode: str, victim: int
) -> None:
    """The coordinator runs on rank 0. Connections tell of the death, without a watch."""
    outcomes = pool.run_expecting_errors(
        suffer, RANKS, topology, mode, victim, "kill", False, timeout=60, keep=True
    )
    assert outcomes[victim].error_type == "RankDied"
    check_survivors(outcomes, victim)


# One watched case per mode and per topology by default.
WATCHED = [("ps", "none", 1), ("ring", "replay", 1), ("ps", "always", 0)]
STOPPED = [
    pytest.param(*case, marks=[] if case in WATCHED else exhaustive)
    for topology in ("ps", "ring")
    for mode in MODES
    for victim in (0, 1)
    if (case := (topology, mode, victim))
]


@pytest.mark.parametrize(("topology", "mode", "victim"), STOPPED)
def test_all_survivors_name_a_stopped_rank_which_gets_an_error_when_it_continues(
    pool: RankPool, topology: str, mode: str, victim: int
) -> None:
    outcomes = pool.run_expecting_errors(
        suffer, RANKS, topology, mode, victim, "stop", True, timeout=60
    )
    check_survivors(outcomes, victim)
    error, _, threads = outcomes[victim].value
    assert "rank" in error
    assert threads == []


@pytest.mark.parametrize(
    ("topology", "mode"),
    [("ps", "none"), ("ps", "always"), pytest.param("ps", "replay", marks=exhaustive)],
)
def test_without_a_watch_survivors_name_a_stopped_rank_among_the_late_ones(
    pool: RankPool, topology: str, mode: str
) -> None:
    """A rank that waits for the stopped one is late as well."""
    outcomes = pool.run_expecting_errors(
        suffer, RANKS, topology, mode, 1, "stop", False, timeout=60
    )
    check_survivors(outcomes, 1)
    assert "rank" in outcomes[1].value[0]
