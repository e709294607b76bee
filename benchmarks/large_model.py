"""Training of a model that no process may hold whole, under a limit of the kernel.

    python -m benchmarks.large_model        about 3 minutes

Each process has a control group with a memory limit from its start. Plain training is killed while
it builds the model. Three ranks with the same limit build it layer by layer, cut it into stages and
train it. Their initial weights must be those of a plain construction without a limit. The peak of
each rank is counted as in benchmarks/pipeline_memory.py. Needs root.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.command import flags
from benchmarks.support.memory_limit import MemoryGroup, memory_group
from benchmarks.support.report import Check, at_most, conclude, table

NAME = "large_model"
RANK = "benchmarks.support.large_model_rank"
KILLED = -9
_COLUMNS = (
    *("stage", "layers", "planned MiB", "counted MiB", "counted / planned"),
    "peak of the group MiB",
)


@dataclass(frozen=True)
class Settings:
    """Sizes of the training.

    Attributes:
        sizes: Width, blocks and context of the model, and samples of a batch.
        limit: Limit of each process, in bytes.
        memory_limit: Limit of the model on a rank; None for what the group has left.
        stages: Number of stages.
        microbatches: Micro-batches of a batch.
        steps: Number of steps.
        timeout: Time limit of a training, in seconds.
    """

    sizes: dict[str, int]
    limit: int
    memory_limit: str | None = None
    stages: int = 3
    microbatches: int = 6
    steps: int = 5
    timeout: float = 500.0


# Its 319 million parameters take 1.28 GB.
FULL = Settings(sizes={"width": 1024, "blocks": 24, "length": 32, "samples": 6}, limit=1450 << 20)
QUICK = Settings(sizes={"width": 256, "blocks": 6, "length": 16, "samples": 6}, limit=1450 << 20)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    chosen = flags(NAME, __doc__, argv)
    settings = QUICK if chosen.quick else FULL
    try:
        plain = run(settings, stages=1)[0]
        ranks = run(settings, stages=settings.stages)
    except OSError as error:
        print(f"cannot measure here: {error}", file=sys.stderr)
        return 2
    failed = [output for code, output, _ in ranks if code]
    if failed:
        print(f"could not measure: {failed[0][-4000:]}", file=sys.stderr)
        return 1
    whole = run(settings, stages=1, limited=False)[0]
    rows, is_same = compared(ranks, figures_of(whole[1]))
    print(table(_COLUMNS, [row_of(row) for row in rows]), flush=True)
    worst = max(abs(row["counted"] / row["planned"] - 1) for row in rows)
    checks = {
        "plain training is killed": Check(plain[0] == KILLED, 1, plain[0] == KILLED),
        "initial weights are those of plain construction": Check(is_same, 1, is_same),
        "largest difference from the plan": at_most(worst, 0.05),
    }
    conclude(NAME, checks, {"ranks": rows, "settings": asdict(settings)})
    return 0


Output = tuple[int, str, int | None]


def run(settings: Settings, *, stages: int, limited: bool = True) -> list[Output]:
    """Train; return exit status, output and the group's peak for each rank."""
    order = {
        "sizes": settings.sizes,
        "stages": stages,
        "microbatches": settings.microbatches,
        "steps": settings.steps if limited else 1,
        "memory_limit": settings.memory_limit,
    }
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with ExitStack() as stack:
        groups = [
            stack.enter_context(memory_group(settings.limit)) if limited else None
            for _ in range(stages)
        ]
        processes = [
            stack.enter_context(start(order, rank, stages, port, group))
            for rank, group in enumerate(groups)
        ]
        try:
            results = [process.communicate(timeout=settings.timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [
            (process.returncode, "".join(texts), group.peak_bytes if group else None)
            for process, texts, group in zip(processes, results, groups, strict=True)
        ]


def start(
    order: dict[str, Any], rank: int, world_size: int, port: int, group: MemoryGroup | None
) -> subprocess.Popen[str]:
    """Start a rank with the environment of torchrun, in a group if there is one."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GROUP_RANK": rank,
        "RANK": rank,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": 1,
        "TORCHELASTIC_RUN_ID": 0,
    }
    variables = {name: str(value) for name, value in environment.items()} if world_size > 1 else {}
    return subprocess.Popen(
        [*(group.command if group else []), sys.executable, "-m", RANK, json.dumps(order)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, **variables},
    )


def compared(ranks: Sequence[Output], whole: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Return figures of each stage, and True if all initial weights are those of `whole`."""
    rows, initial = [], {}
    for _, output, group_peak in ranks:
        figures = figures_of(output)
        initial |= figures.pop("initial")
        peaks = figures["peaks"]
        rows.append(figures | {"counted": statistics.median(peaks), "group_peak": group_peak})
    return sorted(rows, key=lambda row: int(row["stage"])), initial == whole["initial"]


def figures_of(output: str) -> dict[str, Any]:
    """Return the figures that a rank has printed among its messages."""
    (line,) = [line for line in output.splitlines() if line.startswith('{"seconds"')]
    figures: dict[str, Any] = json.loads(line)
    return figures


def row_of(row: dict[str, Any]) -> list[object]:
    """Return a row of the printed table."""
    mib = 2**20
    group_peak = "?" if row["group_peak"] is None else row["group_peak"] / mib
    counted = row["counted"]
    planned = row["planned"]
    return [
        row["stage"],
        row["layers"],
        planned / mib,
        counted / mib,
        counted / planned,
        group_peak,
    ]


if __name__ == "__main__":
    raise SystemExit(main())
