"""Several hosts on one machine, for benchmarks of distributed training: slow links, unlike CPUs.

A host is a network namespace (its own interface, loopback and ports) and a cgroup (its CPU share).
The hosts hang on a bridge in a namespace of its own: nothing changes in the machine's own network,
and testbeds at the same time never meet. All names carry the process that made them, so that the
next testbed finds and removes what a killed process has left behind.

Needs Linux, root and iproute2; `reason_unavailable` says what is missing. It imports nothing of the
package, so that a benchmark can say "not here" before it has loaded torch.
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

# A host that has used its share freezes until the period ends: some 10 ms, less than a stage takes
# for a micro-batch, so it looks like a slow device. With shorter periods hosts get less than their
# share: the kernel charges for CPU time at its clock ticks, 1 to 10 ms apart.
PERIOD_US = 10_000
MIN_QUOTA_US = 1_000  # the kernel's own limit; smaller shares get a longer period
# What a link lets through at once after a pause: some packets, little against a message.
BURST_SECONDS, MIN_BURST_BYTES = 0.002, 8192
QUEUE = "50ms"  # a longer queue drops packets, as a switch does
CLOSE_SECONDS = 20.0
STDERR_LINES = 20

_NAME = re.compile(r"dlres-bed-\d+-\d+-\d+-\w+")  # pid, when it started, testbed, part
_RATE = re.compile(r"(?=.*[1-9])(\d+(?:\.\d+)?)([kmg])bit")
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_serial = itertools.count()
_open: list[Testbed] = []


class UnavailableError(RuntimeError):
    """This machine cannot hold a testbed; the message says why and what to do."""


class HostError(RuntimeError):
    """A command on a host failed; the message names the host and ends with its stderr."""


class HostTimeoutError(HostError, TimeoutError):
    """Commands did not end in time; the message names their hosts."""


@dataclass(frozen=True)
class Host:
    """What to build; None leaves a resource unlimited.

    `share` is CPU time in cores: 0.8 is 80% of one core. Hosts whose shares add up to more than the
    machine has slow each other. `rate` ("200mbit") shapes the host's link in each direction, and
    `delay` ("5ms") is one way over this link: a packet from host to host crosses two links. `cpus`
    are the cores that its processes may run on. `burst` is what the link lets through at once, in
    bytes; less than the 64 KiB that the kernel sends in one piece has it cut every piece into
    frames, which costs a core for every 500 Mbit/s.

    Raises:
        ValueError: a value that cannot be.
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
    """A host as built: where others reach it, and where it lives in the kernel."""

    spec: Host
    address: str
    namespace: str
    cgroup: Path


@dataclass(frozen=True)
class Command:
    """A process to run: the number of its host, its arguments, and variables added to ours."""

    host: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Testbed:
    """Builds its hosts on entry and removes them, and every process on them, on exit.

    `hosts` are numbered as given; `hosts[0].address` serves as MASTER_ADDR and `interface`, the
    same on all, as GLOO_SOCKET_IFNAME. Exceptions, SIGINT, SIGTERM and SIGHUP end in a clean
    machine too, but for a SIGTERM or SIGHUP that the program handles itself.
    """

    __test__ = False  # its name looks like a test's to pytest
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
        """Build everything.

        Raises:
            UnavailableError: this machine does not allow it; nothing is left of the attempt.
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
        """Kill all processes on the hosts, and remove the hosts; may be called again.

        Raises:
            RuntimeError: something could not be removed; the message names it.
        """
        if self not in _open or self._owner != os.getpid():
            return
        with _signals_deferred():
            for process in self._processes:
                process.kill()  # one that has not reached its cgroup yet
            # By name: an interrupted build has not recorded what it made.
            _remove(name for name in _existing() if name.startswith(self._prefix))
            for process in self._processes:
                process.wait()
            _open.remove(self)
            self.hosts = ()

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host; `options` go to `subprocess.Popen`.

        Its pid is that of the command itself, which leads a session of its own: Ctrl-C reaches the
        testbed only.

        Raises:
            ValueError: no such host, or the testbed is not entered.
        """
        if not 0 <= host < len(self.hosts):
            raise _invalid(
                "host", host, f"the index of one of {len(self.hosts)} hosts", "an open testbed"
            )
        machine, launcher = self.hosts[host], [_tool("ip"), "netns", "exec"]
        if machine.spec.cpus is not None:
            cores = ",".join(map(str, machine.spec.cpus))
            launcher = [_tool("taskset", "util-linux"), "-c", cores, *launcher]
        # Into the cgroup first: `ip netns exec` hides the machine's /sys.
        join = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{machine.cgroup}/cgroup.procs"]
        line = [*join, *launcher, machine.namespace, *argv]
        self._processes.append(subprocess.Popen(line, **{"start_new_session": True, **options}))
        return self._processes[-1]

    def run(self, commands: Sequence[Command], *, timeout: float) -> list[str]:
        """Run commands at the same time, and return the stdout of each; `timeout` is in seconds.

        A command ends with its first process; what that left running in its process group is
        killed. After an error no command runs any more.

        Raises:
            HostError: a command failed.
            HostTimeoutError: some did not end in time.
        """
        deadline = time.monotonic() + timeout
        with contextlib.ExitStack() as stack:
            running: dict[int, _Run] = {}
            for command in commands:
                # Files, not pipes: nobody must read them for the commands to go on.
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
        # No IPv6 addresses: their neighbour discovery would be traffic of its own.
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
    """Return why no testbed can be built here, or None: found by building a small one."""
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
    """Kill what is left of a process and its group, and return its status."""
    if process.returncode is None:  # not reaped, so that the number is still its group's
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
    """Return where the machine's cpu cgroups are mounted, and their version."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options = line.split()[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(where), 1
        if kind == "cgroup2" and "cpu" in Path(where, "cgroup.controllers").read_text().split():
            return Path(where), 2
    raise UnavailableError(
        "no cpu cgroup: expected one of version 1 or 2 in /proc/self/mounts, with the cpu "
        "controller. Try `mount -t cgroup2 none /sys/fs/cgroup`, or leave the container."
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
            f"no cpu cgroup can be made: {error}. Expected a writable {root}. Try outside the "
            "container, or in one that is privileged and has the machine's cgroup namespace."
        ) from error
    return path


def _existing() -> set[str]:
    """Return the names of all testbeds' namespaces and cgroups, whoever made them."""
    namespaces = (line.split()[0] for line in _call("ip", "netns", "list").splitlines())
    groups = (path.name for path in _cgroup_root()[0].iterdir())
    return {name for name in (*namespaces, *groups) if _NAME.fullmatch(name)}


def _is_orphan(name: str) -> bool:
    pid, started = name.split("-")[2:4]
    return _started(int(pid)) != started


def _started(pid: int) -> str | None:
    """Return when a process started, in ticks since boot; None if it is dead."""
    try:
        # The command's name, in parentheses, may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _remove(names: Iterator[str]) -> None:
    """Kill what runs under the names and remove them; another testbed may do so too."""
    root, doomed, deadline = _cgroup_root()[0], set(names), time.monotonic() + CLOSE_SECONDS
    while doomed:
        for pid in set().union(*(_pids(root / name) for name in doomed)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in doomed:
            with contextlib.suppress(OSError):  # busy while a process in it is dying
                (root / name).rmdir()
            if not (root / name).exists():
                _call("ip", "netns", "delete", name, check=False)
        if not (doomed := doomed & _existing()):
            return
        if time.monotonic() > deadline:
            left = {name: sorted(_pids(root / name)) for name in sorted(doomed)}
            raise RuntimeError(
                f"a testbed could not be removed in {CLOSE_SECONDS:g} s: got these names and "
                f"processes: {left}. Try `ip netns delete NAME` and `rmdir {root}/NAME`."
            )
        time.sleep(0.005)


def _pids(group: Path) -> set[int]:
    """Return what runs in a cgroup and in the namespace of that name, entered by hand included."""
    listed = _call("ip", "netns", "pids", group.name, check=False).split()
    with contextlib.suppress(OSError):
        listed += (group / "cgroup.procs").read_text().split()
    return set(map(int, listed))


def _call(*argv: str, check: bool = True) -> str:
    # In a session of its own, so that Ctrl-C does not stop the cleaning up halfway.
    line = [_tool(argv[0]), *argv[1:]]
    done = subprocess.run(line, capture_output=True, text=True, start_new_session=True)
    if check and done.returncode:
        raise UnavailableError(
            f"`{shlex.join(argv)}` failed: {done.stderr.strip().rstrip('.')}. Expected a kernel "
            "with network namespaces, veth, bridge, tbf and (for a delay) netem, and leave to use "
            "them. Try outside the container, or `modprobe -a sch_tbf sch_netem`."
        )
    return done.stdout


def _tool(name: str, package: str = "iproute2") -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        raise UnavailableError(
            f"{name} must be installed, got no such program. Use `apt-get install {package}`."
        )
    return found


def _exit_on_stop_signals() -> None:
    """While a testbed is open, unwind the stack on signals whose default is to die at once."""
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
    """Let a second Ctrl-C wait until the cleaning up after the first is done."""
    came: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not None:  # None: not Python's, so not ours to restore
                handlers[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for caught, handler in handlers.items():
            signal.signal(caught, handler)
        _exit_on_stop_signals()
        for caught in came:
            signal.raise_signal(caught)


@atexit.register
def _close_all() -> None:
    """For an interrupt where `with` does not hold a testbed yet."""
    for bed in list(_open):
        bed.close()


def _text(file: IO[bytes]) -> str:
    # Not by reading on: a process that still writes shares the position.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _invalid(argument: str, value: object, rule: str, fix: str) -> ValueError:
    return ValueError(f"{argument} must be {rule}, got {value!r}. Use {fix}.")
