"""The peak bytes of every stage: planned, and counted by the C library's allocator.

    python -m benchmarks.pipeline_memory            about 90 seconds
    python -m benchmarks.pipeline_memory --quick    one of the cases

Three ranks train a model with a large embedding, whose gradient is dense. Every block counts
that is large enough to be a mapping of its own, of whatever thread: tensors, messages, copies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.support.command import flags
from benchmarks.support.report import at_most, conclude, table

NAME = "pipeline_memory"
TARGET = 0.05
CASES: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "recompute": "never"},
    {"schedule": "1f1b", "recompute": "never", "split": [8, 1, 1]},
    {"schedule": "1f1b", "recompute": "never", "split": [1, 1, 8]},
    {"schedule": "1f1b", "recompute": "always"},
    {"schedule": "gpipe", "recompute": "never"},
    {"schedule": "gpipe", "recompute": "never", "split": [4, 2, 4]},
    {"schedule": "gpipe", "recompute": "auto", "memory_limit": "120MiB"},
)
# One step more than those in which the loss is checked.
QUICK = [{**case, "steps": 4} for case in CASES if case["recompute"] == "always"]
_DEADLINE_SECONDS = 120
_COLUMNS = ("stage", "layers", "recomputed", "planned MiB", "counted MiB", "counted / planned")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    cases = QUICK if flags(NAME, __doc__, argv, quick="one case only").quick else CASES
    if not sys.platform.startswith("linux"):
        print("cannot measure here: needs the allocator of Linux's C library", file=sys.stderr)
        return 2
    found = []
    for case, rows in zip(cases, measure(cases), strict=True):
        print(", ".join(f"{name} {value}" for name, value in case.items()))
        print(table(_COLUMNS, [_row(row) for row in rows]), flush=True)
        found.append({"options": case, "stages": rows})
    planned = [row for case in found if "split" not in case["options"] for row in case["stages"]]
    given = [row for case in found if "split" in case["options"] for row in case["stages"]]
    checks = {
        "largest difference from the plan": at_most(max(abs(_part(r) - 1) for r in planned), TARGET)
    }
    if given:
        # Messages that need not wait anywhere leave some of it free.
        most = max(map(_part, given))
        checks["counted over planned where the split is given"] = at_most(most, 1 + TARGET)
    conclude(NAME, checks, {"cases": found})
    return 0


def measure(cases: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Train with the options of the strategy of each case; return what each stage reports."""
    with TemporaryDirectory() as out:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                f"{__package__}.support.pipeline_memory_rank",
                out,
                json.dumps(cases),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[1],
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=_DEADLINE_SECONDS * len(cases))
        except BaseException:
            # The ranks that it has forked, too.
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.returncode:
            raise RuntimeError(f"the ranks could not train:\n{said}")
        found = [
            [json.loads(file.read_text()) for file in Path(out, str(number)).glob("[0-9].json")]
            for number in range(len(cases))
        ]
    return [sorted(rows, key=lambda row: int(row["stage"])) for rows in found]


def _part(row: dict[str, Any]) -> float:
    return float(row["measured"] / row["planned"])


def _row(row: dict[str, Any]) -> list[object]:
    planned, counted = row["planned"] / 2**20, row["measured"] / 2**20
    return [row["stage"], row["layers"], row["recomputed"], planned, counted, _part(row)]


if __name__ == "__main__":
    raise SystemExit(main())
