"""Tests of the free memory of a host and its control groups, in both versions of their files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lightning_dlres.core.host.free_memory import available_bytes, limiting_group

MEMINFO = "MemTotal:  2000 kB\nMemFree:  300 kB\nMemAvailable:  1000 kB\n"


def write_files(root: Path, files: dict[str, str]) -> None:
    """Write a host's memory information and further files below a root directory."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def control_group(directory: str, allowed: str, used: int, cache: int) -> dict[str, str]:
    """Return the files of a control group of version 2, by path.

    Args:
        directory: Directory of the group, relative to the root of the test.
        allowed: Limit in bytes, or "max".
        used: Bytes in use, page cache included.
        cache: Bytes of the page cache that the system can free.
    """
    return {
        f"{directory}/memory.max": f"{allowed}\n",
        f"{directory}/memory.current": f"{used}\n",
        f"{directory}/memory.stat": f"anon 7\nactive_file 0\ninactive_file {cache}\n",
    }


def test_this_host_has_free_memory() -> None:
    free = available_bytes()
    if not sys.platform.startswith("linux"):
        assert free is None
    else:
        assert free is not None
        assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_host_without_control_groups_has_its_available_memory_free(tmp_path: Path) -> None:
    write_files(tmp_path, {})
    assert available_bytes(tmp_path) == 1000 * 1024


def test_a_system_without_meminfo_returns_none(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


@pytest.mark.parametrize(
    # Groups as (allowed, used, cache) in bytes; `slurm` is the parent of `job`.
    ("job", "slurm", "expected", "group"),
    [
        (("max", 10, 0), ("max", 10, 0), 1000 * 1024, ""),
        (("50000", 30000, 4000), ("max", 30000, 0), 24000, "slurm/job"),
        (("50000", 30000, 4000), ("40000", 35000, 1000), 6000, "slurm"),
        (("50000", 60000, 0), ("max", 60000, 0), 0, "slurm/job"),
    ],
)
def test_control_groups_of_version_2_limit_memory(
    tmp_path: Path,
    job: tuple[str, int, int],
    slurm: tuple[str, int, int],
    expected: int,
    group: str,
) -> None:
    files = {"proc/self/cgroup": "0::/slurm/job\n"}
    files |= control_group("sys/fs/cgroup/slurm/job", *job) | control_group(
        "sys/fs/cgroup/slurm", *slurm
    )
    write_files(tmp_path, files)
    assert available_bytes(tmp_path) == expected
    assert limiting_group(tmp_path) == group


def test_control_groups_of_version_1_limit_memory_in_a_container(tmp_path: Path) -> None:
    # The path is the host's. Inside the container the group is the root.
    directory = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n",
        f"{directory}/memory.limit_in_bytes": "9000\n",
        f"{directory}/memory.usage_in_bytes": "5000\n",
        f"{directory}/memory.stat": (
            "inactive_file 1\ntotal_inactive_file 500\nactive_file 2\ntotal_active_file 300\n"
        ),
    }
    write_files(tmp_path, files)
    assert available_bytes(tmp_path) == 4800
    (tmp_path / directory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_bytes(tmp_path) == 1000 * 1024
