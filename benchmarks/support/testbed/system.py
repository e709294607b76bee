"""Namespaces, links and cgroups of testbeds, made and removed by commands of the system."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.support.testbed.hosts import RATE, Host, UnavailableError

# Period of a cgroup's CPU quota, in microseconds. A host that has used its share freezes until the
# period ends. These at most 10 ms are less than the time of a micro-batch, so the host looks like a
# slow device. With shorter periods hosts get less than their share: the kernel charges for CPU time
# at its clock ticks, 1 to 10 ms apart.
PERIOD_US = 10_000
# The kernel's smallest quota, in microseconds; smaller shares get a longer period.
MIN_QUOTA_US = 1_000
# Burst of a link, which it passes unshaped after a pause: the bytes that it carries in this many
# seconds, but at least this many bytes. A message has many more packets than a burst.
BURST_SECONDS, MIN_BURST_BYTES = 0.002, 8192
# Longest time that a packet waits for its link. A packet that would wait longer is dropped, as by
# a switch.
QUEUE = "50ms"
# Time limit for removing a testbed.
CLOSE_SECONDS = 20.0
# Process id, start time of the process, number of the testbed, part of the testbed.
_NAME = re.compile(r"dlres-bed-\d+-\d+-\d+-\w+")
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def shape_link(namespace: str, device: str, spec: Host) -> None:
    add = functools.partial(call, "tc", "-n", namespace, "qdisc", "add", "dev", device)
    at: tuple[str, ...] = ("root",)
    if spec.delay and re.search("[1-9]", spec.delay):
        add(*at, "handle", "1:", "netem", "delay", spec.delay, "limit", "100000")
        at = ("parent", "1:1")
    if spec.rate and (rate := RATE.fullmatch(spec.rate)):
        bytes_per_second = float(rate[1]) * _BITS[rate[2]] / 8
        burst = spec.burst or max(MIN_BURST_BYTES, round(bytes_per_second * BURST_SECONDS))
        add(*at, "handle", "2:", "tbf", "rate", spec.rate, "burst", str(burst), "latency", QUEUE)


def cgroup_root() -> tuple[Path, int]:
    """Return the path at which the machine's cpu cgroups are mounted, and their version."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options = line.split()[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(where), 1
        if kind == "cgroup2" and "cpu" in Path(where, "cgroup.controllers").read_text().split():
            return Path(where), 2
    raise UnavailableError(
        "cgroups of version 1 or 2 with the cpu controller must be in /proc/self/mounts, got none. "
        "Run `mount -t cgroup2 none /sys/fs/cgroup`, or leave the container."
    )


def make_cgroup(name: str, share: float | None) -> Path:
    root, version = cgroup_root()
    path = root / name
    try:
        children = root / "cgroup.subtree_control"
        if version == 2 and "cpu" not in children.read_text().split():
            children.write_text("+cpu")
        path.mkdir()
        if share is not None:
            set_cpu_share(path, share)
    except OSError as error:
        raise UnavailableError(
            f"{root} must be writable to make a cpu cgroup, got: {error}. Run outside the "
            "container, or in a privileged one that has the machine's cgroup namespace."
        ) from error
    return path


def set_cpu_share(cgroup: Path, share: float | None) -> None:
    """Set the CPU share of a cgroup, in cores; None lifts the limit."""
    period = PERIOD_US if share is None else max(PERIOD_US, round(MIN_QUOTA_US / share))
    quota = None if share is None else max(MIN_QUOTA_US, round(share * period))
    if (cgroup / "cpu.max").exists():
        (cgroup / "cpu.max").write_text(f"{'max' if quota is None else quota} {period}")
    else:
        # Lift the old quota first: with it, the kernel may refuse the new period.
        (cgroup / "cpu.cfs_quota_us").write_text("-1")
        (cgroup / "cpu.cfs_period_us").write_text(str(period))
        (cgroup / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))


def existing_names() -> set[str]:
    """Return the names of the namespaces and cgroups of all testbeds, of any process."""
    namespaces = (line.split()[0] for line in call("ip", "netns", "list").splitlines())
    groups = (path.name for path in cgroup_root()[0].iterdir())
    return {name for name in (*namespaces, *groups) if _NAME.fullmatch(name)}


def is_orphan(name: str) -> bool:
    pid, recorded_start = name.split("-")[2:4]
    return start_time(int(pid)) != recorded_start


def start_time(pid: int) -> str | None:
    """Return the start time of a process, in clock ticks since boot; None if it has ended."""
    try:
        # The command's name, in parentheses, may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def remove_parts(names: Iterator[str]) -> None:
    """Kill the processes of these namespaces and cgroups, and remove them.

    Another testbed may remove the same orphans at the same time.
    """
    root, remaining, deadline = cgroup_root()[0], set(names), time.monotonic() + CLOSE_SECONDS
    while remaining:
        for pid in set().union(*(_pids(root / name) for name in remaining)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in remaining:
            with contextlib.suppress(OSError):  # busy while a process in it is dying
                (root / name).rmdir()
            if not (root / name).exists():
                call("ip", "netns", "delete", name, check=False)
        if not (remaining := remaining & existing_names()):
            return
        if time.monotonic() > deadline:
            pids = {name: sorted(_pids(root / name)) for name in sorted(remaining)}
            raise RuntimeError(
                f"a testbed must be removed within {CLOSE_SECONDS:g} s, got these names and "
                f"process ids: {pids}. Run `ip netns delete NAME` and `rmdir {root}/NAME`."
            )
        time.sleep(0.005)


def _pids(group: Path) -> set[int]:
    """Return the processes in a cgroup and in the namespace of the same name.

    The namespace may hold processes that a user has started in it by hand.
    """
    listed = call("ip", "netns", "pids", group.name, check=False).split()
    with contextlib.suppress(OSError):
        listed += (group / "cgroup.procs").read_text().split()
    return set(map(int, listed))


def call(*argv: str, check: bool = True) -> str:
    # The command gets a new session, so that Ctrl-C does not interrupt the removal of a testbed.
    line = [find_tool(argv[0]), *argv[1:]]
    done = subprocess.run(line, capture_output=True, text=True, start_new_session=True)
    if check and done.returncode:
        raise UnavailableError(
            f"`{shlex.join(argv)}` failed: {done.stderr.strip().rstrip('.')}. It needs permission, "
            "and a kernel with network namespaces, veth, bridge, tbf and (for a delay) netem. Run "
            "outside the container, or run `modprobe -a sch_tbf sch_netem`."
        )
    return done.stdout


def find_tool(name: str, package: str = "iproute2") -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if path is None:
        raise UnavailableError(
            f"{name} must be installed, got no such program. Use `apt-get install {package}`."
        )
    return path
