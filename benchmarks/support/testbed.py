"""Testbed of several hosts on one machine, with slow links and CPUs of different speed.

A host is a network namespace (its own interface, loopback and ports) and a cgroup (its CPU share).
A bridge in one more namespace connects the hosts, so the machine's own network does not change, and
testbeds that are open at the same time cannot reach each other. All names contain the pid of the
process that made them: the next testbed finds and removes the namespaces of killed processes.

Needs Linux, root and iproute2; `reason_unavailable` names a missing one. The module imports nothing
of the package, so that a benchmark can report this before it has loaded torch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn

# Period of a cgroup's CPU quota, in microseconds. A host that has used its share freezes until the
# period ends. These at most 10 ms are less than the time of a micro-batch, so the host looks like a
# slow device. With shorter periods hosts get less than their share: the kernel charges for CPU time
# at its clock ticks, 1 to 10 ms apart.
PERIOD_US = 10_000
# The kernel's smallest quota, in microseconds; smaller shares get a longer period.
MIN_QUOTA_US = 1_000
# Traffic that a link passes unshaped after a pause, as seconds at its rate and least bytes: some
# packets, small beside a message.
BURST_SECONDS, MIN_BURST_BYTES = 0.002, 8192
# Longest time that a packet waits for its link; later packets are dropped, as by a switch.
QUEUE = "50ms"
# Time limit for removing a testbed.
CLOSE_SECONDS = 20.0
# Number of lines of a failed command's stderr in its error.
STDERR_LINES = 20

# Process id, start time of the process, number of the testbed, part of the testbed.
_NAME = re.compile(r"dlres-bed-\d+-\d+-\d+-\w+")
_RATE = re.compile(r"(?=.*[1-9])(\d+(?:\.\d+)?)([kmg])bit")
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_serial = itertools.count()
_open: list[Testbed] = []


class UnavailableError(RuntimeError):
    """The machine cannot run a testbed; the message has the reason and a fix."""


class HostError(RuntimeError):
    """A command on a host failed; the message names the host and ends with its stderr."""


class HostTimeoutError(HostError, TimeoutError):
    """Commands did not end in time; the message names their hosts."""


@dataclass(frozen=True)
class Host:
    """Description of a host to build; None leaves a resource unlimited.

    Args:
        share: CPU time in cores: 0.8 is 80% of one core. Hosts whose shares add up to more than the
            machine has slow each other down.
        rate: Rate of the host's link in each direction, such as "200mbit".
        delay: Delay of the host's link in each direction, such as "5ms". A packet from host to host
            crosses two links.
        cpus: Cores that the host's processes may run on.
        burst: Bytes that the link passes at once. The kernel sends pieces of 64 KiB. If `burst` is
            smaller, the kernel cuts every piece into frames, which takes one core per 500 Mbit/s.

    Raises:
        ValueError: If an argument breaks its rule.
    """

    share: float | None = None
    rate: str | None = None
    delay: str | None = None
    cpus: Sequence[int] | None = None
    burst: int | None = None

    def __post_init__(self) -> None:
        if self.share is not None and not 0.001 <= self.share <= 1024:
            raise _invalid("share", self.share, "0.001 to 1024 cores", "0.8 for 80% of one core")
        if self.rate is not None and not _RATE.fullmatch(self.rate):
            raise _invalid("rate", self.rate, "a number with kbit, mbit or gbit", "'200mbit'")
        if self.delay is not None and not _DELAY.fullmatch(self.delay):
            raise _invalid("delay", self.delay, "a number with us, ms or s", "'5ms'")
        if self.cpus is not None and not set() < set(self.cpus) <= os.sched_getaffinity(0):
            cores = f"at least one of the cores {sorted(os.sched_getaffinity(0))}"
            raise _invalid("cpus", self.cpus, cores, "None for all of them")


@dataclass(frozen=True)
class Machine:
    """Host that was built: its address for other hosts, its network namespace and its cgroup."""

    spec: Host
    address: str
    namespace: str
    cgroup: Path


@dataclass(frozen=True)
class Command:
    """Process to run: index of its host, arguments, and additions to this process's environment."""

    host: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Testbed:
    """Context manager that builds hosts, and at its end removes them and kills their processes.

    `hosts` keep the order of the arguments. `hosts[0].address` serves as MASTER_ADDR, and
    `interface`, the same on all hosts, as GLOO_SOCKET_IFNAME. The hosts are also removed after an
    exception, SIGINT, SIGTERM or SIGHUP, unless the program has its own handler for the signal.
    """

    __test__ = False  # pytest would collect a class of this name
    interface = "eth0"

    def __init__(self, hosts: Sequence[Host]) -> None:
        if not 1 <= len(hosts) <= 254:
            raise _invalid("hosts", len(hosts), "1 to 254 hosts", "Testbed([Host(), Host()])")
        self._specs = tuple(hosts)
        self._owner = 0
        self._prefix = ""
        self._processes: list[subprocess.Popen[Any]] = []
        self.hosts: tuple[Machine, ...] = ()

    def __enter__(self) -> Testbed:
        """Build the hosts and their bridge.

        Raises:
            UnavailableError: If the machine does not allow it. All parts already built are removed.
        """
        if os.geteuid() != 0:
            raise UnavailableError(
                f"The testbed must run as root, got user id {os.geteuid()}. Use sudo."
            )
        _cgroup_root()
        _tool("tc")
        self._owner = os.getpid()
        self._prefix = f"dlres-bed-{self._owner}-{_started(self._owner)}-{next(_serial)}-"
        _open.append(self)
        try:
            _exit_on_stop_signals()
            _remove(filter(_is_orphan, _existing()))
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes on the hosts, and remove the hosts; a second call does nothing.

        Raises:
            RuntimeError: If a part could not be removed; the message names it.
        """
        if self not in _open or self._owner != os.getpid():
            return
        with _signals_deferred():
            for process in self._processes:
                process.kill()  # it may not have entered its cgroup yet
            # Found by name, because an interrupted build has no record of its parts.
            _remove(name for name in _existing() if name.startswith(self._prefix))
            for process in self._processes:
                process.wait()
            _open.remove(self)
            self.hosts = ()

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host; `options` go to `subprocess.Popen`.

        The pid of the process is that of the command itself. The command leads a new session, so
        that Ctrl-C reaches only the testbed's own process.

        Raises:
            ValueError: If there is no such host, or the testbed is not open.
        """
        if not 0 <= host < len(self.hosts):
            raise _invalid(
                "host", host, f"the index of one of {len(self.hosts)} hosts", "an open testbed"
            )
        machine, launcher = self.hosts[host], [_tool("ip"), "netns", "exec"]
        if machine.spec.cpus is not None:
            cores = ",".join(map(str, machine.spec.cpus))
            launcher = [_tool("taskset", "util-linux"), "-c", cores, *launcher]
        # The shell enters the cgroup first, because `ip netns exec` hides the machine's /sys.
        join = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{machine.cgroup}/cgroup.procs"]
        line = [*join, *launcher, machine.namespace, *argv]
        self._processes.append(subprocess.Popen(line, **{"start_new_session": True, **options}))
        return self._processes[-1]

    def run(self, commands: Sequence[Command], *, timeout: float) -> list[str]:
        """Run commands at the same time, and return the stdout of each; `timeout` is in seconds.

        A command ends when its first process ends. Other processes of its process group are then
        killed. All commands are killed before an error is raised.

        Raises:
            HostError: If a command failed.
            HostTimeoutError: If a command did not end in time.
        """
        deadline = time.monotonic() + timeout
        with contextlib.ExitStack() as stack:
            running: dict[int, _Run] = {}
            for command in commands:
                # Files, not pipes: a command would block on a full pipe that is not read.
                out, err = (stack.enter_context(TemporaryFile()) for _ in range(2))
                options = {"env": {**os.environ, **command.env}, "stdin": subprocess.DEVNULL}
                process = self.popen(command.host, command.argv, stdout=out, stderr=err, **options)
                stack.callback(_end, process)
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                running[descriptor] = _Run(command, process, out, err)
            runs = list(running.values())
            while running:
                ended = wait(list(running), max(0.0, deadline - time.monotonic()))
                if not ended:
                    late = "\n".join(run.report("still runs") for run in running.values())
                    raise HostTimeoutError(f"not every command ended in {timeout:g} s:\n{late}")
                for descriptor in set(running).intersection(ended):
                    run = running.pop(descriptor)
                    if status := _end(run.process):
                        how = f"exit code {status}" if status > 0 else f"killed by signal {-status}"
                        raise HostError(run.report(how))
            return [_text(run.out) for run in runs]

    def _build(self) -> None:
        bridge = f"{self._prefix}bridge"
        ip = functools.partial(_call, "ip")
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        # No IPv6 addresses: neighbour discovery would add traffic to the links.
        ip("-n", bridge, "link", "set", "bridge", "addrgenmode", "none", "up")
        machines = []
        for number, spec in enumerate(self._specs):
            name, port = f"{self._prefix}host{number}", f"port{number}"
            machine = Machine(spec, f"10.0.0.{number + 1}", name, _make_cgroup(name, spec.share))
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            peer = ("peer", "name", self.interface, "netns", name)
            ip("-n", bridge, "link", "add", port, "type", "veth", *peer)
            ip("-n", name, "address", "add", f"{machine.address}/24", "dev", self.interface)
            ip("-n", bridge, "link", "set", port, "master", "bridge")
            for namespace, device in ((bridge, port), (name, self.interface)):
                ip("-n", namespace, "link", "set", device, "addrgenmode", "none", "up")
                _shape(namespace, device, spec)
            machines.append(machine)
        self.hosts = tuple(machines)


@functools.cache
def reason_unavailable() -> str | None:
    """Build a small testbed; return the reason if this fails, else None."""
    try:
        with Testbed([Host(share=0.5, rate="1gbit")]) as bed:
            bed.run([Command(0, ["true"])], timeout=30.0)
    except (UnavailableError, HostError) as error:
        return str(error)
    return None


@dataclass
class _Run:
    command: Command
    process: subprocess.Popen[Any]
    out: IO[bytes]
    err: IO[bytes]

    def report(self, what: str) -> str:
        tail = "\n".join(_text(self.err).splitlines()[-STDERR_LINES:]) or "(nothing)"
        argv = shlex.join(self.command.argv)
        return f"host {self.command.host}: {what}: {argv}\nlast lines of its stderr:\n{tail}"


def _end(process: subprocess.Popen[Any]) -> int:
    """Kill a process and its process group, and return the exit status of the process."""
    if process.returncode is None:  # until it is reaped, the kernel does not reuse its number
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _shape(namespace: str, device: str, spec: Host) -> None:
    add = functools.partial(_call, "tc", "-n", namespace, "qdisc", "add", "dev", device)
    at: tuple[str, ...] = ("root",)
    if spec.delay and re.search("[1-9]", spec.delay):
        add(*at, "handle", "1:", "netem", "delay", spec.delay, "limit", "100000")
        at = ("parent", "1:1")
    if spec.rate and (rate := _RATE.fullmatch(spec.rate)):
        bytes_per_second = float(rate[1]) * _BITS[rate[2]] / 8
        burst = spec.burst or max(MIN_BURST_BYTES, round(bytes_per_second * BURST_SECONDS))
        add(*at, "handle", "2:", "tbf", "rate", spec.rate, "burst", str(burst), "latency", QUEUE)


def _cgroup_root() -> tuple[Path, int]:
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


def _make_cgroup(name: str, share: float | None) -> Path:
    root, version = _cgroup_root()
    path = root / name
    try:
        children = root / "cgroup.subtree_control"
        if version == 2 and "cpu" not in children.read_text().split():
            children.write_text("+cpu")
        path.mkdir()
        if share is not None:
            period = max(PERIOD_US, round(MIN_QUOTA_US / share))
            quota = max(MIN_QUOTA_US, round(share * period))
            if version == 2:
                (path / "cpu.max").write_text(f"{quota} {period}")
            else:
                (path / "cpu.cfs_period_us").write_text(str(period))
                (path / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError as error:
        raise UnavailableError(
            f"{root} must be writable to make a cpu cgroup, got: {error}. Run outside the "
            "container, or in a privileged one that has the machine's cgroup namespace."
        ) from error
    return path


def _existing() -> set[str]:
    """Return the names of the namespaces and cgroups of all testbeds, of any process."""
    namespaces = (line.split()[0] for line in _call("ip", "netns", "list").splitlines())
    groups = (path.name for path in _cgroup_root()[0].iterdir())
    return {name for name in (*namespaces, *groups) if _NAME.fullmatch(name)}


def _is_orphan(name: str) -> bool:
    pid, started = name.split("-")[2:4]
    return _started(int(pid)) != started


def _started(pid: int) -> str | None:
    """Return the start time of a process, in clock ticks since boot; None if it has ended."""
    try:
        # The command's name, in parentheses, may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _remove(names: Iterator[str]) -> None:
    """Kill the processes of these namespaces and cgroups, and remove them.

    Another testbed may remove the same orphans at the same time.
    """
    root, remaining, deadline = _cgroup_root()[0], set(names), time.monotonic() + CLOSE_SECONDS
    while remaining:
        for pid in set().union(*(_pids(root / name) for name in remaining)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in remaining:
            with contextlib.suppress(OSError):  # busy while a process in it is dying
                (root / name).rmdir()
            if not (root / name).exists():
                _call("ip", "netns", "delete", name, check=False)
        if not (remaining := remaining & _existing()):
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
    listed = _call("ip", "netns", "pids", group.name, check=False).split()
    with contextlib.suppress(OSError):
        listed += (group / "cgroup.procs").read_text().split()
    return set(map(int, listed))


def _call(*argv: str, check: bool = True) -> str:
    # The command gets a new session, so that Ctrl-C does not interrupt the removal of a testbed.
    line = [_tool(argv[0]), *argv[1:]]
    done = subprocess.run(line, capture_output=True, text=True, start_new_session=True)
    if check and done.returncode:
        raise UnavailableError(
            f"`{shlex.join(argv)}` failed: {done.stderr.strip().rstrip('.')}. It needs permission, "
            "and a kernel with network namespaces, veth, bridge, tbf and (for a delay) netem. Run "
            "outside the container, or run `modprobe -a sch_tbf sch_netem`."
        )
    return done.stdout


def _tool(name: str, package: str = "iproute2") -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if path is None:
        raise UnavailableError(
            f"{name} must be installed, got no such program. Use `apt-get install {package}`."
        )
    return path


def _exit_on_stop_signals() -> None:
    """Install handlers that unwind the stack while a testbed is open, and remove them after it.

    By default SIGTERM and SIGHUP end the process at once, without removing the testbed.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if _open and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _exit)
            elif not _open and signal.getsignal(number) is _exit:
                signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Context manager that delivers signals only at its end, after the testbed is removed.

    A second Ctrl-C thus cannot interrupt the removal that the first one started.
    """
    received: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if (
                signal.getsignal(number) is not None
            ):  # None: installed outside Python, which cannot restore it
                handlers[number] = signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for caught, handler in handlers.items():
            signal.signal(caught, handler)
        _exit_on_stop_signals()
        for caught in received:
            signal.raise_signal(caught)


@atexit.register
def _close_all() -> None:
    """Close testbeds at exit, if an interrupt came before the `with` block had begun."""
    for bed in list(_open):
        bed.close()


def _text(file: IO[bytes]) -> str:
    # `pread` does not move the file's position, which a process that still writes shares.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _invalid(argument: str, value: object, rule: str, fix: str) -> ValueError:
    return ValueError(f"{argument} must be {rule}, got {value!r}. Use {fix}.")
