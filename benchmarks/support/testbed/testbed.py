"""Context manager that builds the hosts of a testbed and runs commands on them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn

from benchmarks.support.testbed.hosts import (
    Command,
    Host,
    HostError,
    HostTimeoutError,
    Machine,
    UnavailableError,
    invalid_argument,
)
from benchmarks.support.testbed.system import (
    call,
    cgroup_root,
    existing_names,
    find_tool,
    is_orphan,
    make_cgroup,
    remove_parts,
    shape_link,
    start_time,
)

# Number of lines of a failed command's stderr in its error.
STDERR_LINES = 20
_serial = itertools.count()
_open: list[Testbed] = []


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
            raise invalid_argument(
                "hosts", len(hosts), "1 to 254 hosts", "Testbed([Host(), Host()])"
            )
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
        cgroup_root()
        find_tool("tc")
        self._owner = os.getpid()
        self._prefix = f"dlres-bed-{self._owner}-{start_time(self._owner)}-{next(_serial)}-"
        _open.append(self)
        try:
            _exit_on_stop_signals()
            remove_parts(filter(is_orphan, existing_names()))
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
            remove_parts(name for name in existing_names() if name.startswith(self._prefix))
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
            raise invalid_argument(
                "host", host, f"the index of one of {len(self.hosts)} hosts", "an open testbed"
            )
        machine, launcher = self.hosts[host], [find_tool("ip"), "netns", "exec"]
        if machine.spec.cpus is not None:
            cores = ",".join(map(str, machine.spec.cpus))
            launcher = [find_tool("taskset", "util-linux"), "-c", cores, *launcher]
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
        ip = functools.partial(call, "ip")
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        # No IPv6 addresses: neighbour discovery would add traffic to the links.
        ip("-n", bridge, "link", "set", "bridge", "addrgenmode", "none", "up")
        machines = []
        for number, spec in enumerate(self._specs):
            name, port = f"{self._prefix}host{number}", f"port{number}"
            machine = Machine(spec, f"10.0.0.{number + 1}", name, make_cgroup(name, spec.share))
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            peer = ("peer", "name", self.interface, "netns", name)
            ip("-n", bridge, "link", "add", port, "type", "veth", *peer)
            ip("-n", name, "address", "add", f"{machine.address}/24", "dev", self.interface)
            ip("-n", bridge, "link", "set", port, "master", "bridge")
            for namespace, device in ((bridge, port), (name, self.interface)):
                ip("-n", namespace, "link", "set", device, "addrgenmode", "none", "up")
                shape_link(namespace, device, spec)
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
    if process.returncode is None:  # until it is reaped, the kernel does not reuse its pid
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


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
            # None: the handler was not installed by Python, which cannot restore it.
            if signal.getsignal(number) is not None:
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
