"""Group of ranks on the hosts of a testbed, which follow orders one at a time.

Two groups on the same hosts can take turns, because a group without an order waits in a read.
Orders and answers are lines of JSON over a rank's stdin and stdout.
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
from benchmarks.support.testbed import HostError, HostTimeoutError, Machine, set_cpu_share

# Number of lines of each rank's stderr in an error.
_STDERR_LINES = 20


class Ranks:
    """Group of ranks; rank n runs on host n.

    Args:
        starter: Starter that forks the ranks.
        module: Module whose function `main` every rank runs, with a `RankRpc` as argument.
        world_size: Number of ranks.
        timeout: Time limit of an answer, in seconds.
    """

    def __init__(self, starter: RankStarter, module: str, world_size: int, timeout: float) -> None:
        # The starter is held because the ranks end with it.
        self._starter, self._module, self._timeout = starter, module, timeout
        self._errors = [TemporaryFile() for _ in range(world_size)]  # noqa: SIM115
        # Bytes of each rank's stdout that are not yet a whole line.
        self._partial_lines = [b""] * world_size
        common = {**starter.rendezvous(), "WORLD_SIZE": str(world_size)}
        self._processes = [
            starter.start(rank, module, {**common, **_torchrun_variables(rank)}, errors)
            for rank, errors in enumerate(self._errors)
        ]

    def close(self) -> None:
        """Kill the ranks."""
        for process in self._processes:
            process.kill()

    def ask(self, order: Message, *, only: int | None = None) -> list[Message]:
        """Send an order to all ranks, and return their answers in the order of the ranks.

        Args:
            order: Message for the function `main` of the ranks.
            only: Rank that alone gets the order; None for all ranks.

        Raises:
            HostError: If a rank has ended. The message has the last lines of every rank's stderr.
            HostTimeoutError: If a rank does not answer in time.
        """
        ranks = range(len(self._processes)) if only is None else [only]
        for rank in ranks:
            try:
                os.write(self._processes[rank].stdin, json.dumps(order).encode() + b"\n")
            except BrokenPipeError:
                raise HostError(self._report(f"rank {rank} has ended")) from None
        return self._collect(ranks)

    def _collect(self, ranks: Sequence[int]) -> list[Message]:
        deadline = time.monotonic() + self._timeout
        missing = {self._processes[rank].stdout: rank for rank in ranks}
        answers: dict[int, Message] = {}
        while missing:
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = f"ranks {sorted(missing.values())} did not answer in {self._timeout:g} s"
                raise HostTimeoutError(self._report(late))
            for descriptor in set(missing).intersection(ready):
                rank = missing[descriptor]
                data = os.read(descriptor, 1 << 16)
                if not data:
                    raise HostError(self._report(f"rank {rank} ended without an answer"))
                self._partial_lines[rank] += data
                line, newline, rest = self._partial_lines[rank].partition(b"\n")
                if newline:
                    answers[rank], self._partial_lines[rank] = json.loads(line), rest
                    del missing[descriptor]
        return [answers[rank] for rank in ranks]

    def _report(self, failure: str) -> str:
        text = f"{self._module}: {failure}."
        for rank, file in enumerate(self._errors):
            stderr = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(
                errors="replace"
            )
            tail = "\n".join(stderr.splitlines()[-_STDERR_LINES:]) or "(nothing)"
            text += f"\nlast lines of the stderr of rank {rank}:\n{tail}"
        return text


def set_share(machine: Machine, share: float | None) -> None:
    """Set the CPU share of a host, in cores; None lifts the limit, for unmeasured work."""
    set_cpu_share(machine.cgroup, share)


def _torchrun_variables(rank: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank, with one rank per host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "TORCHELASTIC_RUN_ID": "benchmark",
    }
