"""The peak bytes of every stage: planned, and counted by the C library's allocator.

    python -m benchmarks.pipeline_memory            about 2 minutes
    python -m benchmarks.pipeline_memory --quick    one of the cases

Three ranks train a model with a large embedding, whose gradient is dense. Every block counts
that is large enough to be a mapping of its own, of whatever thread: tensors, messages, copies.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.command import flags
from benchmarks.report import at_most, conclude, table

NAME = "pipeline_memory"
TARGET = 0.05
CASES: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "recompute": "never"},
    {"schedule": "1f1b", "recompute": "always"},
    {"schedule": "gpipe", "recompute": "never"},
    {"schedule": "gpipe", "memory_limit": "120MiB"},
)
_DEADLINE_SECONDS = 240
_COLUMNS = ("stage", "layers", "recomputed", "planned MiB", "counted MiB", "counted / planned")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    cases = CASES[1:2] if flags(NAME, __doc__, argv, quick="one case only").quick else CASES
    if not sys.platform.startswith("linux"):
        print("cannot measure here: needs the allocator of Linux's C library", file=sys.stderr)
        return 2
    found = []
    for options in cases:
        rows = measure(options)
        print(", ".join(f"{name} {value}" for name, value in options.items()))
        print(table(_COLUMNS, [_row(row) for row in rows]), flush=True)
        found.append({"options": options, "stages": rows})
    errors = [abs(r["measured"] / r["planned"] - 1) for case in found for r in case["stages"]]
    checks = {"largest difference from the plan": at_most(max(errors), TARGET)}
    conclude(NAME, checks, {"cases": found})
    return 0


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with these options of the strategy; return what each stage reports."""
    with TemporaryDirectory() as out:
        subprocess.run(
            [sys.executable, "-m", f"{__package__}.pipeline_memory_rank", out, json.dumps(options)],
            check=True,
            capture_output=True,
            cwd=Path(__file__).parents[1],
            timeout=_DEADLINE_SECONDS,
        )
        rows = [json.loads(file.read_text()) for file in Path(out).glob("*.json")]
    return sorted(rows, key=lambda row: int(row["stage"]))


def _row(row: dict[str, Any]) -> list[object]:
    planned, counted = row["planned"] / 2**20, row["measured"] / 2**20
    return [row["stage"], row["layers"], row["recomputed"], planned, counted, counted / planned]


if __name__ == "__main__":
    raise SystemExit(main())
