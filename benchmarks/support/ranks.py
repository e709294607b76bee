"""Ranks on the hosts of a testbed that do one thing at a time, as they are told.

Two groups of ranks can so be alive on the same hosts and take turns: a group that is not told to go
on waits in a read. Orders and answers are lines of JSON over a rank's stdin and stdout.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from tempfile import TemporaryFile

from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.rpc import Message
from benchmarks.support.testbed import MIN_QUOTA_US, PERIOD_US, HostError, HostTimeoutError, Machine

_STDERR_LINES = 20


class Ranks:
    """One process on each of the first hosts; `hosts[0]` is rank 0's.

    Args:
        hosts: what forks them.
        module: its function `main` takes a `RankRpc`, and is what every rank runs.
        world_size: number of ranks.
        timeout: seconds that an answer may take.
    """

    def __init__(self, hosts: RankStarter, module: str, world_size: int, timeout: float) -> None:
        # The ranks end with what has started them.
        self._hosts, self._module, self._timeout = hosts, module, timeout
        self._errors = [TemporaryFile() for _ in range(world_size)]  # noqa: SIM115
        self._lines = [b""] * world_size
        meeting = {**hosts.meeting(), "WORLD_SIZE": str(world_size)}
        self._processes = [
            hosts.start(rank, module, {**meeting, **_torchrun(rank)}, errors)
            for rank, errors in enumerate(self._errors)
        ]

    def close(self) -> None:
        """Kill them."""
        for process in self._processes:
            process.kill()

    def ask(self, order: Message, *, only: int | None = None) -> list[Message]:
        """Give all ranks an order, and return their answers.

        Args:
            order: what to do.
            only: the one rank that is asked.

        Raises:
            HostError: a rank has failed; the message has the end of every rank's stderr.
            HostTimeoutError: a rank has not answered in time.
        """
        ranks = range(len(self._processes)) if only is None else [only]
        for rank in ranks:
            try:
                os.write(self._processes[rank].stdin, json.dumps(order).encode() + b"\n")
            except BrokenPipeError:
                raise HostError(self._report(f"rank {rank} has ended")) from None
        return self._hear(ranks)

    def _hear(self, ranks: Sequence[int]) -> list[Message]:
        deadline = time.monotonic() + self._timeout
        missing = {self._processes[rank].stdout: rank for rank in ranks}
        answers: dict[int, Message] = {}
        while missing:
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                what = f"ranks {sorted(missing.values())} were silent for {self._timeout:g} s"
                raise HostTimeoutError(self._report(what))
            for descriptor in set(missing).intersection(ready):
                rank = missing[descriptor]
                data = os.read(descriptor, 1 << 16)
                if not data:
                    raise HostError(self._report(f"rank {rank} ended without an answer"))
                self._lines[rank] += data
                line, newline, rest = self._lines[rank].partition(b"\n")
                if newline:
                    answers[rank], self._lines[rank] = json.loads(line), rest
                    del missing[descriptor]
        return [answers[rank] for rank in ranks]

    def _report(self, what: str) -> str:
        text = f"{self._module}: {what}."
        for rank, file in enumerate(self._errors):
            said = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(
                errors="replace"
            )
            tail = "\n".join(said.splitlines()[-_STDERR_LINES:]) or "(nothing)"
            text += f"\nlast lines of the stderr of rank {rank}:\n{tail}"
        return text


def limit(machine: Machine, share: float | None) -> None:
    """Give a host another CPU share, in cores; None lifts the limit, for what is not measured."""
    period = PERIOD_US if share is None else max(PERIOD_US, round(MIN_QUOTA_US / share))
    quota = None if share is None else max(MIN_QUOTA_US, round(share * period))
    if (machine.cgroup / "cpu.max").exists():
        (machine.cgroup / "cpu.max").write_text(f"{'max' if quota is None else quota} {period}")
    else:
        # Off first: the kernel refuses a quota that is out of bounds with the period of before.
        (machine.cgroup / "cpu.cfs_quota_us").write_text("-1")
        (machine.cgroup / "cpu.cfs_period_us").write_text(str(period))
        (machine.cgroup / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))


def _torchrun(rank: int) -> dict[str, str]:
    """Return what torchrun would tell this rank alone, with one rank on every host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "TORCHELASTIC_RUN_ID": "benchmark",
    }
