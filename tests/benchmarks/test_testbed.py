"""The testbed's hosts are as slow as they claim, reach each other only, and never outlive it."""

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

from benchmarks.support import testbed
from benchmarks.support.testbed import (
    Command,
    Host,
    HostError,
    HostTimeoutError,
    Machine,
    Testbed,
    UnavailableError,
    reason_unavailable,
)
from tests.support.scripts import StartScript
from tests.support.waiting import wait_until

PORT = "5000"
BUSY = """
import time
start, used = time.monotonic(), time.process_time()
while time.monotonic() < start + 1.0:
    pass
print((time.process_time() - used) / (time.monotonic() - start))
"""
# Says how long it took until the other side had all of the bytes.
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
RECEIVE = """
import socket, sys
connection, peer = socket.create_server(("", int(sys.argv[1]))).accept()
count = 0
while data := connection.recv(1 << 16):
    count += len(data)
connection.send(b"!")
print(count, peer[0])
"""
# A process, and another that has left its session, as a daemon does.
FAMILY = ("sh", "-c", "setsid sleep 1000 & exec sleep 1000")
SCRIPT = """
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


def real(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that builds hosts."""
    marked: Callable[..., None] = pytest.mark.root(pytest.mark.usefixtures("available")(test))
    return marked


@pytest.fixture
def available() -> None:
    if reason := reason_unavailable():
        pytest.skip(reason)


def python(host: int, source: str, *argv: str) -> Command:
    return Command(host, [sys.executable, "-I", "-S", "-c", source, *argv])


def traces(machine: Machine | tuple[str, Path]) -> list[str]:
    """What is left of the testbed of one of its hosts: namespaces, cgroups, processes."""
    name, cgroup = (machine.namespace, machine.cgroup) if isinstance(machine, Machine) else machine
    prefix = name.rpartition("-")[0] + "-"
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    found = [*listed.stdout.split(), *(path.name for path in cgroup.parent.iterdir())]
    return [each for each in found if each.startswith(prefix)]


def processes(machine: Machine) -> list[int]:
    return [int(pid) for pid in (machine.cgroup / "cgroup.procs").read_text().split()]


def wait_for_processes(machine: Machine, count: int) -> None:
    wait_until(lambda: len(processes(machine)) == count, f"{count} processes are on a host")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def seconds(bed: Testbed, sender: int, receiver: int, count: int) -> float:
    sent, received = bed.run(
        [
            python(sender, SEND, bed.hosts[receiver].address, PORT, str(count)),
            python(receiver, RECEIVE, PORT),
        ],
        timeout=60.0,
    )
    assert received.split() == [str(count), bed.hosts[sender].address]
    return float(sent)


@pytest.mark.parametrize(
    "wrong",
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
def test_a_host_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))}: got .*, expected .*\. Try "):
        Host(**wrong)


def test_a_testbed_needs_hosts_and_a_process_an_open_testbed() -> None:
    with pytest.raises(ValueError, match="hosts: got 0, expected 1 to 254"):
        Testbed([])
    with pytest.raises(ValueError, match=r"host: got 0, expected .* inside `with`"):
        Testbed([Host()]).popen(0, ["true"])


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    uncached = reason_unavailable.__wrapped__
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert "expected iproute2" in str(uncached())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert uncached() == "needs root: got user id 1000, expected 0. Try sudo."


@real
def test_hosts_have_their_own_loopback_and_reach_each_other() -> None:
    with Testbed([Host(), Host()]) as bed:
        assert seconds(bed, 0, 1, 1000) > 0
        assert seconds(bed, 1, 0, 1000) > 0
        # The same port on each host, at the same time.
        both = [
            python(host, source, *argv)
            for host in range(2)
            for source, argv in ((SEND, ("127.0.0.1", PORT, "10")), (RECEIVE, (PORT,)))
        ]
        answers = bed.run(both, timeout=60.0)
        assert [answers[1].split(), answers[3].split()] == [["10", "127.0.0.1"]] * 2
        interfaces = bed.run([Command(0, ["ls", "/sys/class/net"])], timeout=60.0)[0].split()
        assert set(interfaces) >= {"lo", bed.interface}


@real
def test_two_testbeds_do_not_meet() -> None:
    with Testbed([Host()]) as one, Testbed([Host()]) as other:
        one.popen(0, python(0, RECEIVE, PORT).argv, stdout=subprocess.DEVNULL)
        probe = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])))"
        reached = python(
            0,
            "import time\nwhile True:\n try:\n  " + probe + "\n  break\n"
            " except OSError: time.sleep(0.01)",
            one.hosts[0].address,
            PORT,
        )
        one.run([reached], timeout=60.0)
        with pytest.raises(HostError, match="ConnectionRefusedError"):
            other.run([python(0, probe, one.hosts[0].address, PORT)], timeout=60.0)


@real
def test_a_share_holds_for_all_processes_of_a_host_together() -> None:
    with Testbed([Host(share=0.5), Host(share=0.1)]) as bed:
        shares = bed.run([python(0, BUSY), python(0, BUSY), python(1, BUSY)], timeout=60.0)
    half, tenth = float(shares[0]) + float(shares[1]), float(shares[2])
    # Above: what the kernel's clock allows. Below: other work on this machine takes time too.
    assert 0.2 < half < 0.65
    assert 0.04 < tenth < 0.15
    assert half > 2 * tenth


@real
def test_a_share_too_small_for_the_period_gets_a_longer_one() -> None:
    with Testbed([Host(share=0.05)]) as bed:
        (share,) = bed.run([python(0, BUSY)], timeout=60.0)
    assert float(share) < 0.1


@real
def test_a_link_is_shaped_in_both_directions() -> None:
    count, bits_per_second = 1_000_000, 20e6
    with Testbed([Host(rate="20mbit"), Host(), Host()]) as bed:
        out, back, beside = (seconds(bed, *pair, count) for pair in ((0, 1), (1, 0), (1, 2)))
    at_least = 0.95 * 8 * count / bits_per_second
    assert out > at_least
    assert back > at_least
    assert beside < at_least / 2, "a link with no rate is slowed"


@real
def test_a_delay_counts_once_for_each_link_crossed() -> None:
    bed = Testbed([Host(delay="30ms", rate="100mbit"), Host(delay="20ms")])
    try:
        bed.__enter__()
    except UnavailableError as error:
        if "netem" not in str(error):
            raise
        pytest.skip(f"this kernel has no netem: {error}")
    with contextlib.closing(bed):
        assert seconds(bed, 0, 1, 1) > 2 * (0.030 + 0.020)


@real
def test_a_host_stays_on_its_cores() -> None:
    core = max(os.sched_getaffinity(0))
    with Testbed([Host(cpus=[core])]) as bed:
        show = python(0, "import os; print(*os.sched_getaffinity(0))")
        assert bed.run([show], timeout=60.0) == [f"{core}\n"]


@real
def test_a_command_gets_its_variables_and_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "from us")
    with Testbed([Host(), Host()]) as bed:
        shows = [Command(i, ["sh", "-c", "echo $OURS $RANK"], {"RANK": str(i)}) for i in range(2)]
        assert bed.run(shows, timeout=60.0) == ["from us 0\n", "from us 1\n"]


@real
def test_a_failure_stops_the_others_and_is_told() -> None:
    with Testbed([Host(), Host()]) as bed:
        failing = Command(1, ["sh", "-c", "sleep 1000 & seq 100 >&2; echo the cause >&2; exit 3"])
        with pytest.raises(HostError) as caught:
            bed.run([Command(0, ["sh", "-c", "sleep 1000 & sleep 1000"]), failing], timeout=60.0)
        assert "host 1: exit code 3: sh -c" in str(caught.value)
        assert str(caught.value).endswith("99\n100\nthe cause")
        assert "\n50\n" not in str(caught.value), "more than the last lines"
        for machine in bed.hosts:
            wait_for_processes(machine, 0)
        with pytest.raises(HostError, match="host 0: killed by signal 9"):
            bed.run([Command(0, ["sh", "-c", "kill -9 $$"])], timeout=60.0)
        with pytest.raises(HostError, match="No such file"):
            bed.run([Command(0, ["no-such-program"])], timeout=60.0)
        assert bed.run([Command(0, ["echo", "still there"])], timeout=60.0) == ["still there\n"]


@real
def test_waiting_has_an_end() -> None:
    with Testbed([Host(), Host()]) as bed:
        late = Command(1, ["sh", "-c", "echo waiting for something >&2; sleep 1000"])
        with pytest.raises(HostTimeoutError) as caught:
            bed.run([Command(0, ["true"]), late], timeout=0.5)
        assert "not every command ended in 0.5 s" in str(caught.value)
        assert "host 1: still runs" in str(caught.value)
        assert str(caught.value).endswith("waiting for something")
        assert "host 0" not in str(caught.value)
        wait_for_processes(bed.hosts[1], 0)


@real
def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), Testbed([Host(share=0.5), Host()]) as bed:  # noqa: PT012
        machines = bed.hosts
        for host, machine in enumerate(machines):
            bed.popen(host, FAMILY)
            wait_for_processes(machine, 2)
        pids = [pid for machine in machines for pid in processes(machine)]
        assert len(traces(machines[0])) == 5, "two hosts, each twice, and the bridge"
        _ = 1 / 0
    assert not traces(machines[0])
    assert not [pid for pid in pids if alive(pid)]


@real
def test_nothing_is_left_of_an_attempt_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with Testbed([Host()]) as bed:
        machine = bed.hosts[0]
        monkeypatch.setattr(testbed, "QUEUE", "nonsense")
        with pytest.raises(UnavailableError, match="nonsense"):
            Testbed([Host(), Host(rate="1mbit")]).__enter__()
        ours = (machine.namespace.rpartition("-")[0], machine.cgroup)
        assert len(traces(ours)) == 3, "more than the testbed that is open"


@real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(number: signal.Signals, start_script: StartScript) -> None:
    script = start_script(SCRIPT)
    machines = [built(script, host) for host in range(2)]
    assert len(traces(machines[0])) == 5
    os.kill(script.pid, number)
    assert script.wait() in (128 + number, -number)
    assert not traces(machines[0])
    script.wait_for_no_children()


@real
def test_a_second_interrupt_waits_until_all_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = testbed._remove

    def interrupted(names: Iterator[str]) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(names)

    bed = Testbed([Host()]).__enter__()
    machine = bed.hosts[0]
    monkeypatch.setattr(testbed, "_remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bed.close()
    assert not traces(machine)


@real
def test_the_next_testbed_removes_what_a_killed_one_left(start_script: StartScript) -> None:
    script = start_script(SCRIPT)
    machine = built(script, 1)
    os.kill(script.pid, signal.SIGKILL)
    script.wait()
    with Testbed([Host()]) as bed:
        assert not traces(machine)
        assert len(traces(bed.hosts[0])) == 3
    script.wait_for_no_children()


@real
def test_a_pid_that_another_process_has_got_since_does_not_protect_leftovers() -> None:
    with Testbed([Host()]) as bed:
        # As a process with this one's number would have left it that started at another time.
        name = f"dlres-bed-{os.getpid()}-1-0-host0"
        left = bed.hosts[0].cgroup.parent / name
        left.mkdir()
        subprocess.run(["ip", "netns", "add", name], check=True)
        with Testbed([Host()]):
            assert not traces((name, left))
        assert len(traces(bed.hosts[0])) == 3


@real
def test_a_living_testbed_of_another_process_is_left_alone(start_script: StartScript) -> None:
    script = start_script(SCRIPT)
    machine = built(script, 1)
    with Testbed([Host()]):
        assert len(traces(machine)) == 5
    assert len(traces(machine)) == 5
    os.kill(script.pid, signal.SIGINT)
    script.wait()


@real
def test_the_handling_of_signals_is_restored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    outer, inner = Testbed([Host()]), Testbed([Host()])
    with outer, inner:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        outer.close()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        inner.close()
        assert {number: signal.getsignal(number) for number in before} == before


def built(script: Any, host: int) -> tuple[str, Path]:
    """Wait until a script has built a host; return its names."""
    name, cgroup = script.wait_for_line(rf"built (\S+-host{host}) (\S+)").groups()
    return name, Path(cgroup)
