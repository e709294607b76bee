"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.support.report import Check, conclude
from benchmarks.support.testbed import HostError, UnavailableError, reason_unavailable

Figures = tuple[dict[str, Check], dict[str, Any]]


class FairnessError(RuntimeError):
    """The two sides did not do the same work, so their times cannot be compared."""


def flags(
    name: str,
    doc: str | None,
    argv: Sequence[str] | None,
    *,
    quick: str = "tiny sizes: the figures mean nothing",
    others: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """Return which flags are set: `--quick`, and others with their help."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for flag, text in {"quick": quick, **(others or {})}.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    return parser.parse_args(argv)


def conclude_on_testbed(name: str, measure: Callable[[], Figures]) -> int:
    """Measure on hosts of a testbed, print, and return the exit status: 2 where there can be no
    testbed, 1 where something failed."""
    if reason := reason_unavailable():
        print(f"cannot measure here: {reason}", file=sys.stderr)
        return 2
    try:
        checks, raw = measure()
    except (UnavailableError, HostError, FairnessError) as error:
        print(f"could not measure: {error}", file=sys.stderr)
        return 1
    conclude(name, checks, raw)
    return 0
