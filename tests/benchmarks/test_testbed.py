"""Tests of the testbed: its hosts have their speed, reach only each other, and are removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.testbed import (
    Command,
    Host,
    HostError,
    HostTimeoutError,
    Machine,
    Testbed,
    UnavailableError,
    reason_unavailable,
    system,
    testbed,
)
from tests.support.scripts import StartScript
from tests.support.waiting import wait_until

PORT = "5000"
# Uses a core for a second, and prints the share that it got: CPU seconds per second.
USE_CPU = """
import time
start, used = time.monotonic(), time.process_time()
while time.monotonic() < start + 1.0:
    pass
print((time.process_time() - used) / (time.monotonic() - start))
"""
# Prints the seconds until the receiver had all of the bytes.
SEND = """
import socket, sys, time
address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
while True:
    try:
        connection = socket.create_connection((address, port))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
start = time.monotonic()
connection.sendall(bytes(count))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - start)
"""
# Prints the number of received bytes and the address of the sender.
RECEIVE = """
import socket, sys
connection, peer = socket.create_server(("", int(sys.argv[1]))).accept()
count = 0
while data := connection.recv(1 << 16):
    count += len(data)
connection.send(b"!")
print(count, peer[0])
"""
# Command that starts a second process in another session, as a daemon does.
COMMAND_WITH_DAEMON = ("sh", "-c", "setsid sleep 1000 & exec sleep 1000")
# Opens a testbed of two hosts, prints the names of each host, and waits for a signal.
SCRIPT_WITH_TESTBED = """
import signal
from benchmarks.support.testbed import Host, Testbed

with Testbed([Host(share=0.5, rate="100mbit"), Host()]) as bed:
    for host in range(2):
        bed.popen(host, ["sh", "-c", "setsid sleep 1000 & exec sleep 1000"])
    for machine in bed.hosts:
        while len((machine.cgroup / "cgroup.procs").read_text().split()) < 2:
            pass
        print("built", machine.namespace, machine.cgroup)
    signal.pause()
"""


def builds_hosts(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that builds hosts."""
    marked: Callable[..., None] = pytest.mark.root(
        pytest.mark.usefixtures("skip_where_unavailable")(test)
    )
    return marked


@pytest.fixture
def skip_where_unavailable() -> None:
    """Skip the test on machines that cannot build a testbed."""
    if reason := reason_unavailable():
        pytest.skip(reason)


def python_command(host: int, source: str, *argv: str) -> Command:
    return Command(host, [sys.executable, "-I", "-S", "-c", source, *argv])


def existing_names(machine: Machine | tuple[str, Path]) -> list[str]:
    """Return the names of the namespaces and cgroups that exist of the testbed of a host."""
    name, cgroup = (machine.namespace, machine.cgroup) if isinstance(machine, Machine) else machine
    prefix = name.rpartition("-")[0] + "-"
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    existing = [*listed.stdout.split(), *(path.name for path in cgroup.parent.iterdir())]
    return [item for item in existing if item.startswith(prefix)]


def processes(machine: Machine) -> list[int]:
    return [int(pid) for pid in (machine.cgroup / "cgroup.procs").read_text().split()]


def wait_for_processes(machine: Machine, count: int) -> None:
    wait_until(lambda: len(processes(machine)) == count, f"{count} processes are on a host")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def transfer_seconds(bed: Testbed, sender: int, receiver: int, count: int) -> float:
    """Send `count` bytes from one host to another; return the seconds that this took."""
    sent, received = bed.run(
        [
            python_command(sender, SEND, bed.hosts[receiver].address, PORT, str(count)),
            python_command(receiver, RECEIVE, PORT),
        ],
        timeout=60.0,
    )
    assert received.split() == [str(count), bed.hosts[sender].address]
    return float(sent)


@pytest.mark.parametrize(
    "arguments",
    [
        {"share": 0.0},
        {"share": -1.0},
        {"share": float("nan")},
        {"rate": "200"},
        {"rate": "0mbit"},
        {"rate": "200mbps"},
        {"delay": "5"},
        {"delay": "-5ms"},
        {"cpus": ()},
        {"cpus": (-1,)},
    ],
    ids=str,
)
def test_invalid_arguments_of_a_host_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(arguments))} must be .*, got .*\. Use "):
        Host(**arguments)


def test_a_testbed_without_hosts_and_a_process_without_a_testbed_are_refused() -> None:
    with pytest.raises(ValueError, match="hosts must be 1 to 254 hosts, got 0"):
        Testbed([])
    with pytest.raises(ValueError, match=r"host must be .*, got 0\. Use an open testbed"):
        Testbed([Host()]).popen(0, ["true"])


def test_the_reason_names_the_missing_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    uncached = reason_unavailable.__wrapped__
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert "apt-get install iproute2" in str(uncached())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert uncached() == "The testbed must run as root, got user id 1000. Use sudo."


@builds_hosts
def test_hosts_reach_each_other_and_have_separate_loopback_interfaces() -> None:
    with Testbed([Host(), Host()]) as bed:
        assert transfer_seconds(bed, 0, 1, 1000) > 0
        assert transfer_seconds(bed, 1, 0, 1000) > 0
        # The same port on each host, at the same time.
        both = [
            python_command(host, source, *argv)
            for host in range(2)
            for source, argv in ((SEND, ("127.0.0.1", PORT, "10")), (RECEIVE, (PORT,)))
        ]
        answers = bed.run(both, timeout=60.0)
        assert [answers[1].split(), answers[3].split()] == [["10", "127.0.0.1"]] * 2
        interfaces = bed.run([Command(0, ["ls", "/sys/class/net"])], timeout=60.0)[0].split()
        assert set(interfaces) >= {"lo", bed.interface}


@builds_hosts
def test_hosts_of_two_testbeds_do_not_reach_each_other() -> None:
    with Testbed([Host()]) as one, Testbed([Host()]) as other:
        one.popen(0, python_command(0, RECEIVE, PORT).argv, stdout=subprocess.DEVNULL)
        probe = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])))"
        reached = python_command(
            0,
            "import time\nwhile True:\n try:\n  " + probe + "\n  break\n"
            " except OSError: time.sleep(0.01)",
            one.hosts[0].address,
            PORT,
        )
        one.run([reached], timeout=60.0)
        with pytest.raises(HostError, match="ConnectionRefusedError"):
            other.run([python_command(0, probe, one.hosts[0].address, PORT)], timeout=60.0)


@builds_hosts
def test_the_processes_of_a_host_divide_its_cpu_share() -> None:
    with Testbed([Host(share=0.5), Host(share=0.1)]) as bed:
        shares = bed.run(
            [python_command(0, USE_CPU), python_command(0, USE_CPU), python_command(1, USE_CPU)],
            timeout=60.0,
        )
    half, tenth = float(shares[0]) + float(shares[1]), float(shares[2])
    # Upper bounds: the kernel accounts CPU time in clock ticks. Lower bounds: other processes use
    # this machine too.
    assert 0.2 < half < 0.65
    assert 0.04 < tenth < 0.15
    assert half > 2 * tenth


@builds_hosts
def test_a_small_cpu_share_gets_a_longer_period() -> None:
    with Testbed([Host(share=0.05)]) as bed:
        (share,) = bed.run([python_command(0, USE_CPU)], timeout=60.0)
    assert float(share) < 0.1


@builds_hosts
def test_a_rate_limits_a_link_in_both_directions() -> None:
    count, bits_per_second = 1_000_000, 20e6
    with Testbed([Host(rate="20mbit"), Host(), Host()]) as bed:
        out, back, beside = (
            transfer_seconds(bed, *pair, count) for pair in ((0, 1), (1, 0), (1, 2))
        )
    least_seconds = 0.95 * 8 * count / bits_per_second
    assert out > least_seconds
    assert back > least_seconds
    assert beside < least_seconds / 2, "a link without a rate limit is slowed"


@builds_hosts
def test_a_packet_is_delayed_on_each_link_that_it_crosses() -> None:
    bed = Testbed([Host(delay="30ms", rate="100mbit"), Host(delay="20ms")])
    try:
        bed.__enter__()
    except UnavailableError as error:
        if "netem" not in str(error):
            raise
        pytest.skip(f"this kernel has no netem: {error}")
    with contextlib.closing(bed):
        assert transfer_seconds(bed, 0, 1, 1) > 2 * (0.030 + 0.020)


@builds_hosts
def test_processes_of_a_host_run_on_its_cores_only() -> None:
    core = max(os.sched_getaffinity(0))
    with Testbed([Host(cpus=[core])]) as bed:
        show = python_command(0, "import os; print(*os.sched_getaffinity(0))")
        assert bed.run([show], timeout=60.0) == [f"{core}\n"]


@builds_hosts
def test_a_command_gets_its_variables_and_those_of_the_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OURS", "from us")
    with Testbed([Host(), Host()]) as bed:
        shows = [Command(i, ["sh", "-c", "echo $OURS $RANK"], {"RANK": str(i)}) for i in range(2)]
        assert bed.run(shows, timeout=60.0) == ["from us 0\n", "from us 1\n"]


@builds_hosts
def test_a_failed_command_stops_the_others_and_is_reported() -> None:
    with Testbed([Host(), Host()]) as bed:
        failing = Command(1, ["sh", "-c", "sleep 1000 & seq 100 >&2; echo the cause >&2; exit 3"])
        with pytest.raises(HostError) as caught:
            bed.run([Command(0, ["sh", "-c", "sleep 1000 & sleep 1000"]), failing], timeout=60.0)
        assert "host 1: exit code 3: sh -c" in str(caught.value)
        assert str(caught.value).endswith("99\n100\nthe cause")
        assert "\n50\n" not in str(caught.value), (
            "the message has more than the last lines of stderr"
        )
        for machine in bed.hosts:
            wait_for_processes(machine, 0)
        with pytest.raises(HostError, match="host 0: killed by signal 9"):
            bed.run([Command(0, ["sh", "-c", "kill -9 $$"])], timeout=60.0)
        with pytest.raises(HostError, match="No such file"):
            bed.run([Command(0, ["no-such-program"])], timeout=60.0)
        assert bed.run([Command(0, ["echo", "still there"])], timeout=60.0) == ["still there\n"]


@builds_hosts
def test_commands_that_run_past_the_timeout_are_killed_and_reported() -> None:
    with Testbed([Host(), Host()]) as bed:
        late = Command(1, ["sh", "-c", "echo waiting for something >&2; sleep 1000"])
        with pytest.raises(HostTimeoutError) as caught:
            bed.run([Command(0, ["true"]), late], timeout=0.5)
        assert "not every command ended in 0.5 s" in str(caught.value)
        assert "host 1: still runs" in str(caught.value)
        assert str(caught.value).endswith("waiting for something")
        assert "host 0" not in str(caught.value)
        wait_for_processes(bed.hosts[1], 0)


@builds_hosts
def test_an_exception_removes_hosts_and_processes() -> None:
    with pytest.raises(ZeroDivisionError), Testbed([Host(share=0.5), Host()]) as bed:  # noqa: PT012
        machines = bed.hosts
        for host, machine in enumerate(machines):
            bed.popen(host, COMMAND_WITH_DAEMON)
            wait_for_processes(machine, 2)
        pids = [pid for machine in machines for pid in processes(machine)]
        assert len(existing_names(machines[0])) == 5, (
            "a namespace and a cgroup per host, and the bridge"
        )
        _ = 1 / 0
    assert not existing_names(machines[0])
    assert not [pid for pid in pids if is_alive(pid)]


@builds_hosts
def test_a_failed_build_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Testbed([Host()]) as bed:
        machine = bed.hosts[0]
        monkeypatch.setattr(system, "QUEUE", "nonsense")
        with pytest.raises(UnavailableError, match="nonsense"):
            Testbed([Host(), Host(rate="1mbit")]).__enter__()
        open_names = (machine.namespace.rpartition("-")[0], machine.cgroup)
        assert len(existing_names(open_names)) == 3, "something is left of the failed build"


@builds_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_removes_hosts_and_processes(
    number: signal.Signals, start_script: StartScript
) -> None:
    script = start_script(SCRIPT_WITH_TESTBED)
    machines = [wait_for_host(script, host) for host in range(2)]
    assert len(existing_names(machines[0])) == 5
    os.kill(script.pid, number)
    assert script.wait() in (128 + number, -number)
    assert not existing_names(machines[0])
    script.wait_for_no_children()


@builds_hosts
def test_an_interrupt_during_removal_waits_until_all_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remove = testbed.remove_parts

    def remove_with_interrupt(names: Iterator[str]) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(names)

    bed = Testbed([Host()]).__enter__()
    machine = bed.hosts[0]
    monkeypatch.setattr(testbed, "remove_parts", remove_with_interrupt)
    with pytest.raises(KeyboardInterrupt):
        bed.close()
    assert not existing_names(machine)


@builds_hosts
def test_the_next_testbed_removes_the_hosts_of_a_killed_process(start_script: StartScript) -> None:
    script = start_script(SCRIPT_WITH_TESTBED)
    machine = wait_for_host(script, 1)
    os.kill(script.pid, signal.SIGKILL)
    script.wait()
    with Testbed([Host()]) as bed:
        assert not existing_names(machine)
        assert len(existing_names(bed.hosts[0])) == 3
    script.wait_for_no_children()


@builds_hosts
def test_hosts_of_a_dead_process_are_removed_although_its_pid_is_reused() -> None:
    with Testbed([Host()]) as bed:
        # The name of a testbed of another process: it had the pid of this one, and started earlier.
        name = f"dlres-bed-{os.getpid()}-1-0-host0"
        left = bed.hosts[0].cgroup.parent / name
        left.mkdir()
        subprocess.run(["ip", "netns", "add", name], check=True)
        with Testbed([Host()]):
            assert not existing_names((name, left))
        assert len(existing_names(bed.hosts[0])) == 3


@builds_hosts
def test_the_testbed_of_another_running_process_stays(start_script: StartScript) -> None:
    script = start_script(SCRIPT_WITH_TESTBED)
    machine = wait_for_host(script, 1)
    with Testbed([Host()]):
        assert len(existing_names(machine)) == 5
    assert len(existing_names(machine)) == 5
    os.kill(script.pid, signal.SIGINT)
    script.wait()


@builds_hosts
def test_the_last_testbed_restores_the_signal_handlers() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    outer, inner = Testbed([Host()]), Testbed([Host()])
    with outer, inner:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        outer.close()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        inner.close()
        assert {number: signal.getsignal(number) for number in before} == before


def wait_for_host(script: Any, host: int) -> tuple[str, Path]:
    """Wait until a script has built a host; return (namespace, cgroup)."""
    name, cgroup = script.wait_for_line(rf"built (\S+-host{host}) (\S+)").groups()
    return name, Path(cgroup)
