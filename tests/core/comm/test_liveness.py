"""The watch detects and names a lost rank, and does not blame a busy or leaving one.

Most tests run all ranks as watches of this process. Tests that kill or stop a process start one
that loads only the watch, without Lightning and torch, so that it starts fast.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

import lightning_dlres.core as core
from lightning_dlres.core.comm import heartbeat, liveness
from lightning_dlres.core.comm.liveness import RankFailure, Watch
from lightning_dlres.core.errors import ConfigError, PeerLostError, ProtocolError
from lightning_dlres.core.wire.endpoint import Client
from tests.support.scripts import ScriptHandle, StartScript
from tests.support.waiting import wait_until

# Deadline of a wait, in seconds. Only a failing test waits so long.
SECONDS = 20.0
# A deadline that no test reaches, so that silence is not the failure that it detects.
NEVER = 120.0
NAMES = [f"stage {rank} of replica 0 (rank {rank})" for rank in range(3)]
PACKAGE = os.path.dirname(os.path.dirname(core.__file__))

# Program of a rank. Its arguments are "host" or the number of the rank, the names, the invitation,
# the deadline and the grace. Empty modules take the place of packages that import Lightning.
RANK = f"""
    import signal, sys, threading, types
    for name, folder in (("", ""), (".core", "/core")):
        module = types.ModuleType("lightning_dlres" + name)
        module.__path__ = [{PACKAGE!r} + folder]
        sys.modules["lightning_dlres" + name] = module
    from lightning_dlres.core.comm.liveness import Watch

    role, names, invitation, deadline, grace = sys.argv[1:]
    options = dict(deadline=float(deadline), grace=float(grace))
    if role == "host":
        watch = Watch.host(names.split(","), **options)
    else:
        watch = Watch.join(int(role), bytes.fromhex(invitation), **options)
    returning = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: returning.set())
    print("invitation", watch.invitation.hex(), flush=True)
    returning.wait(120)
"""


@dataclass
class Group:
    """Watches of one run in this process, with their reports by rank.

    A watch sets the event in `killed` where it would end its process.
    """

    stack: ExitStack
    watches: list[Watch] = field(default_factory=list)
    reports: dict[int, list[str]] = field(default_factory=dict)
    killed: dict[int, threading.Event] = field(default_factory=dict)

    def host(self, ranks: int = 3, **options: Any) -> Watch:
        return self._add(0, functools.partial(Watch.host, NAMES[:ranks]), options)

    def join(self, rank: int, **options: Any) -> Watch:
        invitation = options.pop("invitation", None) or self.watches[0].invitation
        return self._add(rank, functools.partial(Watch.join, rank, invitation), options)

    def start(self, ranks: int = 3, **options: Any) -> list[Watch]:
        self.host(ranks, **options)
        for rank in range(1, ranks):
            self.join(rank, **options)
        return self.watches

    def _add(self, rank: int, make: Callable[..., Watch], options: dict[str, Any]) -> Watch:
        self.reports[rank] = []
        self.killed[rank] = threading.Event()
        defaults = {
            "deadline": NEVER,
            "grace": NEVER,
            "report": self.reports[rank].append,
            "kill": self.killed[rank].set,
        }
        watch = self.stack.enter_context(closing(make(**{**defaults, **options})))
        self.watches.append(watch)
        return watch


@pytest.fixture
def group() -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(stack)


def start_rank(
    start_script: StartScript,
    role: str,
    invitation: bytes = b"",
    *,
    names: str = "-",
    deadline: float = NEVER,
    grace: float = 0.2,
) -> tuple[ScriptHandle, bytes]:
    """Start a rank in a process of its own; return it and its invitation."""
    script = start_script(RANK, role, names, invitation.hex() or "-", deadline, grace)
    return script, bytes.fromhex(script.wait_for_line(r"^invitation (\w+)", SECONDS)[1])


def failure_of(watch: Watch) -> RankFailure:
    """Return the failure that a watch detects, which `check` then raises."""
    assert watch.failed.wait(SECONDS), f"{watch.names[watch.rank]} has detected no failure"
    assert watch.failure is not None
    with pytest.raises(PeerLostError) as raised:
        watch.check()
    assert str(raised.value) == watch.failure.message
    return watch.failure


@pytest.mark.parametrize("speaker", [0, 1, 2])
def test_all_other_ranks_learn_an_announced_failure(group: Group, speaker: int) -> None:
    watches = group.start()
    watches[speaker].announce("CUDA out of memory")
    message = f"{NAMES[speaker]} gave up: CUDA out of memory"
    for rank in {0, 1, 2} - {speaker}:
        assert failure_of(watches[rank]) == RankFailure(speaker, message)
        assert group.reports[rank] == [message]
    watches[speaker].close()
    assert watches[speaker].failure is None
    assert group.reports[speaker] == []


def test_an_announcement_of_another_rank_is_passed_on_as_it_is(group: Group) -> None:
    one, other = group.start(2)
    one.announce("no such sample")
    failure_of(other)
    with pytest.raises(PeerLostError) as raised:
        other.check()
    # A rank of another run, which knows of no failure.
    first, second = Group(group.stack).start(2)
    second.announce(raised.value)
    assert failure_of(first).message == f"{NAMES[0]} gave up: no such sample"


class InterruptedPayload:
    """A heartbeat of rank 1. The hub receives a signal while its watch reads it."""

    sender, origin, reason, confirms = 1, 0, "", ""

    def __init__(self, hub: Watch) -> None:
        self._hub = hub

    @property
    def signals(self) -> dict[int, int]:
        self._hub.count_signal(signal.SIGTERM)
        return {}


def test_a_signal_during_a_heartbeat_is_counted(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, _ = group.host(2), group.join(1)
    monkeypatch.setattr(hub._endpoint, "_decode", lambda *_: InterruptedPayload(hub))
    wait_until(lambda: hub.signal_counts().get(signal.SIGTERM), "the hub has counted the signal")


def test_a_reason_that_is_not_utf8_reaches_the_others(group: Group) -> None:
    watches = group.start()
    watches[1].announce("no file \udcff")
    assert failure_of(watches[2]).message.endswith(r"gave up: no file \udcff")
    assert watches[1].failure is None


def test_only_the_first_failure_counts(group: Group) -> None:
    watches = group.start()
    watches[1].announce("first")
    for other in (watches[0], watches[2]):
        failure_of(other)
    watches[2].announce("second")
    watches[0].announce("third")
    for watch in watches:
        watch.close()
    assert [len(group.reports[rank]) for rank in range(3)] == [1, 0, 1]
    assert watches[1].failure is None


def test_a_failure_is_reported_before_it_is_visible(group: Group) -> None:
    seen: list[tuple[bool, RankFailure | None]] = []

    def report(message: str) -> None:
        seen.append((hub.failed.is_set(), hub.failure))

    hub = group.host(2, report=report)
    group.join(1).announce("x")
    failure_of(hub)
    assert seen == [(False, None)]


def test_a_report_that_raises_does_not_stop_the_watch(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    def report(message: str) -> None:
        raise OSError("no space left")

    hub = group.host(2, report=report)
    group.join(1).announce("x")
    failure_of(hub)
    assert "no space left" in caplog.text


def test_a_rank_that_joins_late_learns_of_the_failure(group: Group) -> None:
    hub = group.host(2)
    hub.announce("bad configuration")
    assert failure_of(group.join(1)).message == f"{NAMES[0]} gave up: bad configuration"


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_goodbye_is_no_failure(group: Group, leaver: int) -> None:
    watches = group.start(2, deadline=0.4)
    watches[leaver].close()
    stayer = watches[1 - leaver]
    assert not stayer.failed.wait(1.0)
    stayer.check()


def test_close_can_be_repeated_and_ends_check(group: Group) -> None:
    watches = group.start(2)
    watches[1].announce("x")
    failure_of(watches[0])
    for watch in (*watches, *watches):
        watch.close()
        watch.check()
    watches[0].announce("after the end")


def test_the_context_manager_ends_the_watch() -> None:
    with Watch.host(["alone"]) as watch:
        watch.check()
    assert "dlres-watch" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_that_does_not_end_is_killed(
    group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = group.host(2, grace=0.1)
    group.join(1).announce("x")
    assert group.killed[0].wait(SECONDS)
    assert f"dlres: {NAMES[0]} did not end within 100 ms" in capsys.readouterr().err
    assert failure_of(hub).origin == 1


def test_a_rank_that_closes_in_time_is_not_killed(group: Group) -> None:
    hub = group.host(2, grace=0.5)
    member = group.join(1)
    member.announce("x")
    hub.failed.wait(SECONDS)
    hub.close()
    assert not group.killed[0].wait(0.7)
    assert not group.killed[1].is_set()


def test_an_error_in_the_watch_is_a_failure(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = group.host(2, grace=0.0)

    def fail(*_: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(hub._endpoint, "update_connections", fail)
    assert "KeyError('bug')" in failure_of(hub).message
    assert group.killed[0].wait(SECONDS)


def test_messages_of_other_runs_are_refused_with_a_warning(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    hub = group.host(2)
    invited = msgspec.msgpack.decode(hub.invitation, type=heartbeat.Invitation)
    wrong_token = msgspec.msgpack.encode(heartbeat.WatchPayload(b"guess", 1, 1, "false alarm"))
    unknown_rank = msgspec.msgpack.encode(heartbeat.WatchPayload(invited.token, 7))
    with caplog.at_level(logging.WARNING), closing(Client("x", invited.address)) as stranger:
        stranger.send("abort", wrong_token)
        stranger.send("abort", b"no payload")
        stranger.send("abort", unknown_rank)
        stranger.send("dance", msgspec.msgpack.encode(heartbeat.WatchPayload(invited.token, 1)))
        wait_until(lambda: len(caplog.records) >= 4, "the hub has warned of four messages")
    assert "must send the token of this run, got another one" in caplog.text
    assert invited.token.hex() not in caplog.text
    assert hub.failure is None
    group.join(1).announce("true alarm")
    assert "true alarm" in failure_of(hub).message


def test_beyond_this_host_messages_need_the_keys(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(liveness, "is_loopback", lambda address: False)
    hub = group.host(2)
    invited = msgspec.msgpack.decode(hub.invitation, type=heartbeat.Invitation)
    assert invited.server_key
    assert invited.client_secret
    payload = msgspec.msgpack.encode(heartbeat.WatchPayload(invited.token, 1, 1, "intruder"))
    with closing(Client("x", invited.address)) as intruder:
        intruder.send("abort", payload)
        group.join(1).announce("friend")
        assert failure_of(hub).message == f"{NAMES[1]} gave up: friend"


def test_a_lost_parent_is_a_lost_hub(group: Group) -> None:
    group.host(2)
    # A process id that is not the parent's, as if the parent had ended.
    orphan = group.join(1, watch_parent=os.getppid() + 1, deadline=1.0)
    assert failure_of(orphan).origin == 0
    assert "parent" in group.reports[1][0]


def test_bad_arguments_are_refused(group: Group) -> None:
    with pytest.raises(ConfigError, match="names"):
        Watch.host([])
    with pytest.raises(ConfigError, match="bind"):
        Watch.host(NAMES, bind="0.0.0.0")
    with pytest.raises(ConfigError, match="deadline"):
        Watch.host(NAMES, deadline=0.0)
    hub = group.host(2)
    with pytest.raises(ConfigError, match=r", got 2"):
        Watch.join(2, hub.invitation)
    with pytest.raises(ConfigError, match="grace"):
        Watch.join(1, hub.invitation, grace=float("nan"))
    with pytest.raises(ProtocolError, match="invitation"):
        Watch.join(1, b"nonsense")


# --- Processes that are killed and stopped.


def test_a_killed_rank_is_detected_before_the_deadline_but_no_stopped_one(
    group: Group, start_script: StartScript
) -> None:
    hub = group.host(3)
    stopped, _ = start_rank(start_script, "1", hub.invitation)
    killed, _ = start_rank(start_script, "2", hub.invitation)
    wait_until(lambda: all(peer.joined for peer in hub._endpoint.peers), "both ranks have joined")
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(killed.pid, signal.SIGKILL)
    assert failure_of(hub) == RankFailure(
        2, f"{NAMES[2]} is gone: its connection closed without a goodbye (killed or crashed)"
    )


def test_a_stopped_rank_is_detected_and_ends_when_it_continues(
    group: Group, start_script: StartScript
) -> None:
    hub = group.host(2, deadline=2.0)
    stopped, _ = start_rank(start_script, "1", hub.invitation)
    wait_until(lambda: all(peer.joined for peer in hub._endpoint.peers), "the rank has joined")
    os.kill(stopped.pid, signal.SIGSTOP)
    message = f"{NAMES[1]} has not been heard from for 2 s: it was killed or hangs"
    assert failure_of(hub) == RankFailure(1, message)
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(SECONDS) == 1
    assert f"dlres: the other ranks gave up on this one: {message}" in stopped.output()


def test_other_ranks_report_and_end_if_rank_0_is_killed(
    group: Group, start_script: StartScript
) -> None:
    host, invitation = start_rank(start_script, "host", names=",".join(NAMES[:2]))
    hanging, _ = start_rank(start_script, "1", invitation)
    os.kill(host.pid, signal.SIGKILL)
    assert hanging.wait(SECONDS) == 1
    lines = [line for line in hanging.output().splitlines() if line.startswith("dlres: ")]
    assert len(lines) == 2
    assert lines[0].startswith(f"dlres: {NAMES[0]}")
    assert "did not end within 200 ms" in lines[1]


def test_other_ranks_detect_that_rank_0_is_stopped(group: Group, start_script: StartScript) -> None:
    host, invitation = start_rank(start_script, "host", names=",".join(NAMES[:2]))
    member = group.join(1, invitation=invitation, deadline=1.0)
    joined = member._endpoint.peers[0].last_heard
    wait_until(lambda: member._endpoint.peers[0].last_heard > joined, "the hub has answered")
    os.kill(host.pid, signal.SIGSTOP)
    assert failure_of(member) == RankFailure(
        0, f"{NAMES[0]} has not been heard from for 1 s: it was killed or hangs"
    )


def test_a_rank_that_exits_without_close_counts_as_lost(
    group: Group, start_script: StartScript
) -> None:
    hub = group.host(2)
    script, _ = start_rank(start_script, "1", hub.invitation)
    wait_until(lambda: hub._endpoint.peers[0].joined, "the rank has joined")
    os.kill(script.pid, signal.SIGTERM)
    assert script.wait(SECONDS) == 0, script.output()
    assert failure_of(hub).origin == 1
