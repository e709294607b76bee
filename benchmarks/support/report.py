"""Report of a benchmark: its checks as text, and all figures as one line of JSON.

The module imports no torch, so that a benchmark can report before it has loaded torch.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """Figure of a benchmark with its target; `ok` is True if the figure meets it."""

    value: float
    target: float
    ok: bool


def at_least(value: float, target: float, *, noise: float = 0.0) -> Check:
    """Return the check that a figure plus its noise reaches the target."""
    return Check(round(value, 4), target, value + noise >= target)


def at_most(value: float, target: float) -> Check:
    """Return the check that a figure does not exceed its target."""
    return Check(round(value, 4), target, value <= target)


def conclude(bench: str, checks: Mapping[str, Check], raw: Mapping[str, Any]) -> None:
    """Print the checks, and then the line of JSON as the last line."""
    print()
    for name, check in checks.items():
        print(f"{'ok  ' if check.ok else 'MISS'} {name}: {check.value:g} (target {check.target:g})")
    line = {
        "bench": bench,
        "hardware": hardware(),
        "checks": {name: asdict(check) for name, check in checks.items()},
        "raw": dict(raw),
    }
    print(json.dumps(line), flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a text table of the rows; floats have four significant digits."""
    cells = [[f"{c:.4g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in (columns, rule, *cells)
    )


def hardware() -> str:
    """Return a description of this machine: usable cores, processor model and kernel."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} x {_processor()}, {platform.system()} {platform.release()}"


def versions() -> dict[str, str]:
    """Return the versions that the speed of kernels depends on."""
    names = ("torch", "numba", "llvmlite")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
