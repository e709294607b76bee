"""Ranks on the hosts of a testbed that do one thing at a time, as they are told.

Two groups of ranks can so be alive on the same hosts and take turns: a group that is not told to go
on waits in a read. Orders and answers are lines of JSON over a rank's stdin and stdout. A rank
imports only this module before it has said that it is ready.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from benchmarks.testbed import (
    MIN_QUOTA_US,
    PERIOD_US,
    HostError,
    HostTimeoutError,
    Machine,
    Testbed,
)

Answer = dict[str, Any]

_ROOT = Path(__file__).parents[1]
_STDERR_LINES = 20


class Ranks:
    """One process on each of the first hosts; `hosts[0]` is rank 0's.

    Args:
        bed: the testbed, open.
        module: its function `main` takes a `Talk`, and is what every rank runs.
        world_size: number of ranks.
        port: where they meet; another one for every group on the same hosts.
        timeout: seconds that an answer may take.
    """

    def __init__(
        self, bed: Testbed, module: str, world_size: int, port: int, timeout: float
    ) -> None:
        self._module, self._timeout = module, timeout
        # Without the collector, which takes a fifth of the time of importing torch and Lightning.
        program = (
            f"import gc; gc.disable(); from {module} import main; gc.enable(); "
            "from benchmarks.ranks import Talk; main(Talk())"
        )
        self._errors = [TemporaryFile() for _ in range(world_size)]  # noqa: SIM115
        self._lines = [b""] * world_size
        self._processes = [
            bed.popen(
                rank,
                [sys.executable, "-c", program],
                stdin=-1,
                stdout=-1,
                stderr=self._errors[rank],
                cwd=_ROOT,
                env={**os.environ, **_torchrun(bed, rank, world_size, port)},
            )
            for rank in range(world_size)
        ]

    def ask(self, order: Answer, *, only: int | None = None) -> list[Answer]:
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
                os.write(self._input(rank), json.dumps(order).encode() + b"\n")
            except BrokenPipeError:
                raise HostError(self._report(f"rank {rank} has ended")) from None
        return self.hear(ranks)

    def hear(self, ranks: Sequence[int] | None = None) -> list[Answer]:
        """Return one answer of every rank, without an order; raises as `ask` does."""
        deadline = time.monotonic() + self._timeout
        ranks = range(len(self._processes)) if ranks is None else ranks
        missing = {self._output(rank): rank for rank in ranks}
        answers: dict[int, Answer] = {}
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

    def _input(self, rank: int) -> int:
        stdin = self._processes[rank].stdin
        assert stdin is not None
        return stdin.fileno()

    def _output(self, rank: int) -> int:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        return stdout.fileno()

    def _report(self, what: str) -> str:
        text = f"{self._module}: {what}."
        for rank, file in enumerate(self._errors):
            said = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(
                errors="replace"
            )
            tail = "\n".join(said.splitlines()[-_STDERR_LINES:]) or "(nothing)"
            text += f"\nlast lines of the stderr of rank {rank}:\n{tail}"
        return text


class Talk:
    """A rank's side: orders come in, answers go out, and whatever else is printed goes to
    stderr."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def say(self, answer: Mapping[str, Any]) -> None:
        """Answer the last order."""
        print(json.dumps(dict(answer)), file=self._answers, flush=True)

    def order(self) -> Answer:
        """Wait for the next order; ends the process if there will be none."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        return dict(json.loads(line))

    def orders(self) -> Iterator[Answer]:
        """Yield all orders to come, after having said that this rank is ready."""
        self.say({"ready": True})
        while True:
            yield self.order()


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


def _torchrun(bed: Testbed, rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun would set, with one rank on every host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "TORCHELASTIC_RUN_ID": "benchmark",
        "MASTER_ADDR": bed.hosts[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": bed.interface,
        "OMP_NUM_THREADS": "1",
    }
