"""How much memory this process could still take on its host: what is available there, and what its
control groups (containers, schedulers) leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_KIB = 1024
_CACHE = ("active_file", "inactive_file")
# Version 1 says so where there is no limit.
_NO_LIMIT = 1 << 60


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that could be taken now without swapping, the page cache given up; None
    where the system does not say (it is not Linux).

    Args:
        root: where `proc` and `sys` are mounted.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return max(0, min([int(free.split()[1]) * _KIB, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
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
        # Every ancestor limits, too. Inside a container the path may be the host's: only its root
        # is there then.
        for directory in (group, *group.parents):
            left = _left(root / mount / directory, limit, usage)
            if left is not None:
                yield left


def _left(group: Path, limit: str, usage: str) -> int | None:
    try:
        allowed, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        if allowed == "max" or int(allowed) >= _NO_LIMIT:
            return None
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # The page cache is given up before anything fails. Version 1 counts child groups apart.
    cache = [int(stat.get(f"total_{name}", stat.get(name, 0))) for name in _CACHE]
    return int(allowed) - used + sum(cache)
