"""Command-line flags of the benchmarks, and the end of a benchmark on a testbed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.report import Check, conclude
from benchmarks.support.testbed import HostError, UnavailableError, reason_unavailable

# Checks, and raw figures for the line of JSON.
Figures = tuple[dict[str, Check], dict[str, Any]]


_TCP = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class FairnessError(RuntimeError):
    """The contenders did not do the same work, so their times cannot be compared."""


def flags(
    name: str,
    doc: str | None,
    argv: Sequence[str] | None,
    *,
    quick: str = "tiny sizes: the figures mean nothing",
    others: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """Return the parsed flags. Each is True or False, or the path of a file, or None.

    Args:
        name: Name of the benchmark's module.
        doc: Description of the benchmark, for `--help`.
        argv: Arguments; None for those of the process.
        quick: Help of the flag `--quick`.
        others: Further flags: name -> help.
        files: Options that take the path of a file: name -> help.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for flag, text in {"quick": quick, **(others or {})}.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    for option, text in (files or {}).items():
        parser.add_argument(f"--{option}", type=Path, metavar="FILE", help=text)
    return parser.parse_args(argv)


def conclude_on_testbed(name: str, measure: Callable[[], Figures]) -> int:
    """Measure on hosts of a testbed, and print the result.

    Returns:
        Exit status: 2 if this machine cannot run a testbed, 1 if the measurement failed, else 0.
    """
    if reason := reason_unavailable():
        print(f"cannot measure here: {reason}", file=sys.stderr)
        return 2
    try:
        checks, raw = measure()
    except (UnavailableError, HostError, FairnessError) as error:
        print(f"could not measure: {error}", file=sys.stderr)
        return 1
    # Hosts have the kernel's default, and links are shared as it says.
    conclude(name, checks, {**raw, "tcp": _TCP.read_text().strip() if _TCP.exists() else ""})
    return 0
