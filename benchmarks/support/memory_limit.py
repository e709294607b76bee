"""Control group that limits the memory of a process; needs root."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """A control group for memory.

    Attributes:
        path: Directory of the group.
        peak: File with the largest use so far, in bytes; it need not exist.
    """

    path: Path
    peak: Path

    @property
    def command(self) -> list[str]:
        """Start of a command that runs in the group."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"]

    @property
    def peak_bytes(self) -> int | None:
        """Largest use so far, in bytes, with page cache; None if the kernel does not say."""
        return int(self.peak.read_text()) if self.peak.exists() else None


@contextmanager
def memory_group(nbytes: int) -> Iterator[MemoryGroup]:
    """Context manager that makes a group without swap.

    The kernel kills a process that exceeds the limit. Page cache counts, but is freed first.

    Raises:
        OSError: If no group can be made.
    """
    is_unified = (_ROOT / "cgroup.controllers").exists()
    parent = _ROOT if is_unified else _ROOT / "memory"
    group = parent / f"dlres-test-{uuid.uuid4().hex}"
    group.mkdir()
    try:
        (group / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text(str(nbytes))
        swap = group / ("memory.swap.max" if is_unified else "memory.memsw.limit_in_bytes")
        if swap.exists():
            swap.write_text("0" if is_unified else str(nbytes))
        peak = "memory.peak" if is_unified else "memory.max_usage_in_bytes"
        yield MemoryGroup(group, group / peak)
    finally:
        group.rmdir()
