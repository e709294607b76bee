"""A lost rank is noticed and named, a busy or leaving one is not, and nobody waits for ever.

Most tests run all ranks as watches of this process. Those that need a process to kill or stop start
one that loads the watch alone, without Lightning and torch, so that it is there in a moment.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

import lightning_dlres.core as core
from lightning_dlres.core.errors import ConfigError, PeerLostError, ProtocolError
from lightning_dlres.core.wire.frames import Message
from lightning_dlres.core.wire.net import Client, ConnectionEvent, Server
from lightning_dlres.pipeline.comm import heartbeat, liveness
from lightning_dlres.pipeline.comm.liveness import RankFailure, Watch
from tests.support.scripts import ScriptHandle, StartScript
from tests.support.waiting import wait_until

SECONDS = 20.0
# So long that silence cannot be what a test has noticed.
NEVER = 120.0
NAMES = [f"stage {rank} of replica 0 (rank {rank})" for rank in range(3)]
PACKAGE = os.path.dirname(os.path.dirname(core.__file__))

RANK = f"""
    import signal, sys, threading, types
    for name, folder in (("", ""), (".core", "/core"), (".pipeline", "/pipeline")):
        module = types.ModuleType("lightning_dlres" + name)
        module.__path__ = [{PACKAGE!r} + folder]
        sys.modules["lightning_dlres" + name] = module
    from lightning_dlres.pipeline.comm.liveness import Watch

    what, names, invitation, deadline, grace = sys.argv[1:]
    options = dict(deadline=float(deadline), grace=float(grace))
    if what == "host":
        watch = Watch.host(names.split(","), **options)
    else:
        watch = Watch.join(int(what), bytes.fromhex(invitation), **options)
    returning = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: returning.set())
    print("invitation", watch.invitation.hex(), flush=True)
    returning.wait(120)
"""


@dataclass
class Group:
    """Watches of one run in this process, with what each has reported and whether it was killed."""

    stack: ExitStack
    watches: list[Watch] = field(default_factory=list)
    reports: dict[int, list[str]] = field(default_factory=dict)
    killed: dict[int, threading.Event] = field(default_factory=dict)

    def host(self, ranks: int = 3, **options: Any) -> Watch:
        return self._add(0, lambda **own: Watch.host(NAMES[:ranks], **own), options)

    def join(self, rank: int, **options: Any) -> Watch:
        invitation = options.pop("invitation", None) or self.watches[0].invitation
        return self._add(rank, lambda **own: Watch.join(rank, invitation, **own), options)

    def start(self, ranks: int = 3, **options: Any) -> list[Watch]:
        self.host(ranks, **options)
        for rank in range(1, ranks):
            self.join(rank, **options)
        return self.watches

    def _add(self, rank: int, make: Callable[..., Watch], options: dict[str, Any]) -> Watch:
        self.reports[rank] = []
        self.killed[rank] = threading.Event()
        own = {
            "deadline": NEVER,
            "grace": NEVER,
            "report": self.reports[rank].append,
            "kill": self.killed[rank].set,
        }
        watch = self.stack.enter_context(closing(make(**{**own, **options})))
        self.watches.append(watch)
        return watch


@pytest.fixture
def group() -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(stack)


def start_rank(
    start_script: StartScript,
    what: str,
    invitation: bytes = b"",
    *,
    names: str = "-",
    deadline: float = NEVER,
    grace: float = 0.2,
) -> tuple[ScriptHandle, bytes]:
    """Start a rank of its own process; return it and the invitation that it holds."""
    script = start_script(RANK, what, names, invitation.hex() or "-", deadline, grace)
    return script, bytes.fromhex(script.wait_for_line(r"^invitation (\w+)", SECONDS)[1])


def failure_of(watch: Watch) -> RankFailure:
    assert watch.failed.wait(SECONDS), f"{watch.names[watch.rank]} has noticed nothing"
    assert watch.failure is not None
    with pytest.raises(PeerLostError) as raised:
        watch.check()
    assert str(raised.value) == watch.failure.message
    return watch.failure


@pytest.mark.parametrize("speaker", [0, 1, 2])
def test_what_one_rank_announces_all_others_learn(group: Group, speaker: int) -> None:
    watches = group.start()
    watches[speaker].announce("CUDA out of memory")
    message = f"{NAMES[speaker]} gave up: CUDA out of memory"
    for rank in {0, 1, 2} - {speaker}:
        assert failure_of(watches[rank]) == RankFailure(speaker, message)
        assert group.reports[rank] == [message]
    watches[speaker].close()
    assert watches[speaker].failure is None
    assert group.reports[speaker] == []


class InterruptedNote:
    """A heartbeat of rank 1; a signal comes to the hub while its watch reads it."""

    sender, origin, reason, confirms = 1, 0, "", ""

    def __init__(self, hub: Watch) -> None:
        self._hub = hub

    @property
    def signals(self) -> dict[int, int]:
        self._hub.note_signal(signal.SIGTERM)
        return {}


def test_a_signal_that_interrupts_a_heartbeat_counts(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, _ = group.host(2), group.join(1)
    monkeypatch.setattr(hub._side, "_read", lambda *_: InterruptedNote(hub))
    wait_until(lambda: hub.noted_signals().get(signal.SIGTERM), "the hub has counted the signal")


def test_a_reason_that_is_not_utf8_reaches_the_others(group: Group) -> None:
    watches = group.start()
    watches[1].announce("no file \udcff")
    assert failure_of(watches[2]).message.endswith(r"gave up: no file \udcff")
    assert watches[1].failure is None


def test_only_the_first_failure_counts(group: Group) -> None:
    watches = group.start()
    watches[1].announce("first")
    failure_of(watches[0]), failure_of(watches[2])
    watches[2].announce("second")
    watches[0].announce("third")
    for watch in watches:
        watch.close()
    assert [len(group.reports[rank]) for rank in range(3)] == [1, 0, 1]
    assert watches[1].failure is None


def test_a_failure_is_reported_before_anyone_can_see_it(group: Group) -> None:
    seen: list[tuple[bool, RankFailure | None]] = []

    def report(message: str) -> None:
        seen.append((hub.failed.is_set(), hub.failure))

    hub = group.host(2, report=report)
    group.join(1).announce("x")
    failure_of(hub)
    assert seen == [(False, None)]


def test_a_report_that_fails_stops_nothing(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    def report(message: str) -> None:
        raise OSError("no space left")

    hub = group.host(2, report=report)
    group.join(1).announce("x")
    failure_of(hub)
    assert "no space left" in caplog.text


def test_a_rank_that_joins_late_learns_what_happened(group: Group) -> None:
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


def test_close_may_be_repeated_and_silences_a_failure(group: Group) -> None:
    watches = group.start(2)
    watches[1].announce("x")
    failure_of(watches[0])
    for watch in (*watches, *watches):
        watch.close()
        watch.check()
    watches[0].announce("nobody hears this")


def test_a_watch_ends_with_its_block() -> None:
    with Watch.host(["alone"]) as watch:
        watch.check()
    assert "dlres-watch" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_that_does_not_end_is_ended(
    group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = group.host(2, grace=0.1)
    group.join(1).announce("x")
    assert group.killed[0].wait(SECONDS)
    assert f"dlres: {NAMES[0]} did not end within 100 ms" in capsys.readouterr().err
    assert failure_of(hub).origin == 1


def test_a_rank_that_closes_in_time_is_not_ended(group: Group) -> None:
    hub = group.host(2, grace=0.5)
    member = group.join(1)
    member.announce("x")
    hub.failed.wait(SECONDS)
    hub.close()
    assert not group.killed[0].wait(0.7)
    assert not group.killed[1].is_set()


def test_a_watch_that_breaks_is_a_failure(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = group.host(2, grace=0.0)

    def broken(*_: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(hub._side, "connections", broken)
    assert "KeyError('bug')" in failure_of(hub).message
    assert group.killed[0].wait(SECONDS)


def test_messages_of_strangers_are_ignored_with_a_warning(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    hub = group.host(2)
    invited = msgspec.msgpack.decode(hub.invitation, type=heartbeat.Invitation)
    note = msgspec.msgpack.encode(heartbeat.Note(b"guess", 1, 1, "false alarm"))
    nonsense = msgspec.msgpack.encode(heartbeat.Note(invited.token, 7))
    with caplog.at_level(logging.WARNING), closing(Client("x", invited.endpoint)) as stranger:
        stranger.send("abort", note)
        stranger.send("abort", b"no note")
        stranger.send("abort", nonsense)
        stranger.send("dance", msgspec.msgpack.encode(heartbeat.Note(invited.token, 1)))
        wait_until(lambda: len(caplog.records) >= 4, "the hub has warned of four messages")
    assert "token of another run" in caplog.text
    assert invited.token.hex() not in caplog.text
    assert hub.failure is None
    group.join(1).announce("true alarm")
    assert "true alarm" in failure_of(hub).message


def test_beyond_this_machine_the_watch_needs_the_keys(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(liveness, "is_loopback", lambda address: False)
    hub = group.host(2)
    invited = msgspec.msgpack.decode(hub.invitation, type=heartbeat.Invitation)
    assert invited.server_key
    assert invited.client_secret
    note = msgspec.msgpack.encode(heartbeat.Note(invited.token, 1, 1, "intruder"))
    with closing(Client("x", invited.endpoint)) as intruder:
        intruder.send("abort", note)
        group.join(1).announce("friend")
        assert failure_of(hub).message == f"{NAMES[1]} gave up: friend"


def test_a_lost_parent_is_a_lost_hub(group: Group) -> None:
    group.host(2)
    orphan = group.join(1, watch_parent=os.getppid() + 1, deadline=1.0)
    assert failure_of(orphan).origin == 0
    assert "parent" in group.reports[1][0]


def test_bad_arguments(group: Group) -> None:
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


# --- The rules of patience, on a clock of their own.

PATIENCE = heartbeat.HeartbeatPatience.of(10.0)


def complaint(line: heartbeat.Line, now: float, trust_cut: bool = True) -> str:
    return PATIENCE.complaint(line, "rank 1", now, trust_cut) or ""


def test_a_silent_rank_has_the_whole_deadline() -> None:
    line = heartbeat.Line(1, 100.0, joined=True)
    assert not complaint(line, 109.9)
    assert complaint(line, 110.1) == (
        "rank 1 has not been heard of for 10 s: it was killed or hangs"
    )


def test_a_closed_connection_shortens_it() -> None:
    line = heartbeat.Line(1, 100.0, joined=True, cut=100.5)
    assert not complaint(line, 101.9), "it may connect again"
    assert "connection closed" in complaint(line, 102.1)
    assert not complaint(line, 102.1, trust_cut=False)
    line.listen(102.2)
    assert not complaint(line, 110.0)


def test_a_rank_has_longer_to_join() -> None:
    line = heartbeat.Line(1, 100.0)
    assert not complaint(line, 100.0 + heartbeat.JOIN_SECONDS)
    assert "did not join" in complaint(line, 100.1 + heartbeat.JOIN_SECONDS)


def test_silence_while_nobody_listened_does_not_count() -> None:
    line = heartbeat.Line(1, 100.0, joined=True, cut=100.5)
    line.excuse(50.0)
    assert not complaint(line, 151.0)
    assert complaint(line, 152.1)


class FakeServer:
    """Connections that come and go as a test says."""

    def __init__(self) -> None:
        self.events: list[ConnectionEvent] = []

    def connection_events(self) -> list[ConnectionEvent]:
        events, self.events = self.events, []
        return events

    def send(self, peer: str, kind: str, payload: bytes) -> None: ...
    def receive(self, timeout: float) -> None: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...


def test_a_busy_rank_that_connects_again_is_not_given_up() -> None:
    server, token = FakeServer(), bytes(32)
    invitation = heartbeat.Invitation("tcp://", NAMES, token, 10.0)
    hub = heartbeat.Hub(cast(Server, server), invitation)

    def beat(rank: int, connection: int, now: float) -> None:
        note = msgspec.msgpack.encode(heartbeat.Note(token, rank))
        hub.take(Message("heartbeat", 0, note, f"rank {rank}", connection), now)

    def events(*happened: tuple[bool, int], now: float) -> None:
        server.events = [ConnectionEvent(*one) for one in happened]
        hub.connections(now)

    beat(1, 11, 100.0)
    events((True, 11), (True, 12), now=100.0)
    beat(2, 12, 100.0)
    events((False, 11), (True, 13), now=100.5)
    beat(2, 12, 105.0)
    assert hub.judge(PATIENCE, 105.0) is None, "connection 13 may be rank 1"
    events((False, 13), now=105.5)
    failure = hub.judge(PATIENCE, 105.6)
    assert failure is not None
    assert failure.origin == 1


# --- Processes that are really killed and stopped.


def test_a_killed_rank_is_noticed_before_the_deadline_and_a_stopped_one_is_not_blamed(
    group: Group, start_script: StartScript
) -> None:
    hub = group.host(3)
    stopped, _ = start_rank(start_script, "1", hub.invitation)
    killed, _ = start_rank(start_script, "2", hub.invitation)
    wait_until(lambda: all(line.joined for line in hub._side.lines), "both ranks have joined")
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(killed.pid, signal.SIGKILL)
    assert failure_of(hub) == RankFailure(
        2, f"{NAMES[2]} is gone: its connection closed without a goodbye (killed or crashed)"
    )


def test_a_stopped_rank_is_noticed_and_ends_when_it_wakes(
    group: Group, start_script: StartScript
) -> None:
    hub = group.host(2, deadline=2.0)
    stopped, _ = start_rank(start_script, "1", hub.invitation)
    wait_until(lambda: all(line.joined for line in hub._side.lines), "the rank has joined")
    os.kill(stopped.pid, signal.SIGSTOP)
    message = f"{NAMES[1]} has not been heard of for 2 s: it was killed or hangs"
    assert failure_of(hub) == RankFailure(1, message)
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(SECONDS) == 1
    assert f"dlres: the other ranks gave up on this one: {message}" in stopped.output()


def test_when_rank_0_is_killed_the_others_say_so_and_end(
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


def test_when_rank_0_is_stopped_the_others_notice(group: Group, start_script: StartScript) -> None:
    host, invitation = start_rank(start_script, "host", names=",".join(NAMES[:2]))
    member = group.join(1, invitation=invitation, deadline=1.0)
    joined = member._side.lines[0].heard
    wait_until(lambda: member._side.lines[0].heard > joined, "the hub has answered")
    os.kill(host.pid, signal.SIGSTOP)
    assert failure_of(member) == RankFailure(
        0, f"{NAMES[0]} has not been heard of for 1 s: it was killed or hangs"
    )


def test_a_rank_that_returns_without_closing_ends_well_and_is_missed(
    group: Group, start_script: StartScript
) -> None:
    hub = group.host(2)
    script, _ = start_rank(start_script, "1", hub.invitation)
    wait_until(lambda: hub._side.lines[0].joined, "the rank has joined")
    os.kill(script.pid, signal.SIGTERM)
    assert script.wait(SECONDS) == 0, script.output()
    assert failure_of(hub).origin == 1
