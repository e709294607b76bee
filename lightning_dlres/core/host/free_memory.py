"""Memory that this process can still allocate on its host.

The host's available memory limits it. So do the control groups of containers and schedulers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_KIB = 1024
# Counters of the page cache in `memory.stat`.
_CACHE = ("active_file", "inactive_file")
# Version 1 of control groups reports at least this many bytes if there is no limit.
_NO_LIMIT = 1 << 60


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated now without swapping, or None outside of Linux.

    The page cache counts as available.

    Args:
        root: Directory in which `proc` and `sys` are mounted.
    """
    tightest = _tightest_limit(root)
    return None if tightest is None else tightest[0]


def limiting_group(root: Path = Path("/")) -> str:
    """Return the control group whose limit is the reason for the number of available bytes.

    Returns:
        The directory of the group; "" if it is the host's memory that limits.
    """
    tightest = _tightest_limit(root)
    return "" if tightest is None else tightest[1]


def _tightest_limit(root: Path) -> tuple[int, str] | None:
    """Return the available bytes, and the directory of the group that limits them."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    limits = [(int(available.split()[1]) * _KIB, ""), *_left_in_groups(root)]
    left, group = min(limits, key=lambda limit: limit[0])
    return max(0, left), group


def _left_in_groups(root: Path) -> Iterator[tuple[int, str]]:
    """Yield the bytes that each limited control group of this process has left, and its
    directory."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, limit, usage = "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        # The limits of all ancestors apply, too. Inside a container the path may be the host's, and
        # then only the root group exists here.
        for directory in (group, *group.parents):
            left = _left(root / mount / directory, limit, usage)
            if left is not None:
                yield left, str(directory)


def _left(group: Path, limit: str, usage: str) -> int | None:
    """Return the bytes that one group has left, or None if it has no limit or no files."""
    try:
        allowed, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        if allowed == "max" or int(allowed) >= _NO_LIMIT:
            return None
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # The kernel frees the page cache before an allocation fails. Version 1 has separate counters
    # that include child groups (`total_...`).
    cache = [int(stat.get(f"total_{name}", stat.get(name, 0))) for name in _CACHE]
    return int(allowed) - used + sum(cache)
