"""Peak bytes of every stage: the plan's prediction beside a count of the C library's allocator.

    python -m benchmarks.pipeline_memory            about 90 seconds
    python -m benchmarks.pipeline_memory --quick    one of the cases

Three ranks train a model with a large embedding, whose gradient is dense. The count includes every
block that is large enough to be a memory mapping of its own, in any thread: tensors, messages and
copies. The counted figure of a stage is the median of its steps' peaks.
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
# Largest relative difference between counted and planned bytes.
TARGET = 0.05
# Options of `HeteroPipeStrategy`. A case with a `split` uses the plan of the case before it.
CASES: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "recompute": "never"},
    {"schedule": "1f1b", "recompute": "never", "split": [8, 1, 1]},
    {"schedule": "1f1b", "recompute": "never", "split": [1, 1, 8]},
    {"schedule": "1f1b", "recompute": "always"},
    {"schedule": "gpipe", "recompute": "never"},
    {"schedule": "gpipe", "recompute": "never", "split": [4, 2, 4]},
    {"schedule": "gpipe", "recompute": "auto", "memory_limit": "120MiB"},
)
# `steps` is the number of steps, not an option of the strategy. Steps 0, 1 and 2 also check the
# loss; step 3 does not.
QUICK = [{**case, "steps": 4} for case in CASES if case["recompute"] == "always"]
# Time limit per case, in seconds. Only the sum over all cases is enforced.
_DEADLINE_SECONDS = 120
_COLUMNS = ("stage", "layers", "recomputed", "planned MiB", "counted MiB", "counted / planned")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    cases = QUICK if flags(NAME, __doc__, argv, quick="one case only").quick else CASES
    if not sys.platform.startswith("linux"):
        print("cannot measure here: needs the allocator of Linux's C library", file=sys.stderr)
        return 2
    results, planned_splits, given_splits = [], list[dict[str, Any]](), list[dict[str, Any]]()
    for case, rows in zip(cases, measure(cases), strict=True):
        print(", ".join(f"{name} {value}" for name, value in case.items()))
        print(table(_COLUMNS, [_row(row) for row in rows]), flush=True)
        results.append({"options": case, "stages": rows})
        (given_splits if "split" in case else planned_splits).extend(rows)
    largest = max(abs(_counted_over_planned(row) - 1) for row in planned_splits)
    checks = {"largest difference from the plan": at_most(largest, TARGET)}
    if given_splits:
        # With an unbalanced split some messages do not wait, so a stage may need less than planned.
        # Only an excess misses the target.
        largest = max(map(_counted_over_planned, given_splits))
        checks["counted over planned where the split is given"] = at_most(largest, 1 + TARGET)
    conclude(NAME, checks, {"cases": results})
    return 0


def measure(cases: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Train with the strategy's options of each case; return one row per stage and case."""
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
            output, _ = process.communicate(timeout=_DEADLINE_SECONDS * len(cases))
        except BaseException:
            # The process leads a session, so this also kills the ranks that it has forked.
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.returncode:
            raise RuntimeError(f"the ranks could not train:\n{output}")
        rows_by_case = [
            [json.loads(file.read_text()) for file in Path(out, str(number)).glob("[0-9].json")]
            for number in range(len(cases))
        ]
    return [sorted(rows, key=lambda row: int(row["stage"])) for rows in rows_by_case]


def _counted_over_planned(row: dict[str, Any]) -> float:
    return float(row["measured"] / row["planned"])


def _row(row: dict[str, Any]) -> list[object]:
    planned, counted = row["planned"] / 2**20, row["measured"] / 2**20
    return [
        row["stage"],
        row["layers"],
        row["recomputed"],
        planned,
        counted,
        _counted_over_planned(row),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
