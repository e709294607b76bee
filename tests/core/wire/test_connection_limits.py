"""Limits of a server's connections, which the process's limit of open files reduces."""

from __future__ import annotations

import re
import resource

import pytest

from lightning_dlres.core.comm.liveness import Watch
from lightning_dlres.core.comm.rank_sockets import RankSockets
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.server import SocketLimits

LIMITS = SocketLimits(connections=1000)


def allow_files(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (count, count))


@pytest.mark.parametrize(("files", "most"), [(1024, 384), (resource.RLIM_INFINITY, 1000), (10, 16)])
def test_as_many_clients_are_accepted_as_can_connect(
    monkeypatch: pytest.MonkeyPatch, files: int, most: int
) -> None:
    allow_files(monkeypatch, files)
    assert LIMITS.for_clients(most, "workers") is LIMITS
    with pytest.raises(ConfigError, match=f"workers must be at most {most} .*, got {most + 1}"):
        LIMITS.for_clients(most + 1, "workers")


def test_the_error_names_the_limit_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_files(monkeypatch, 1024)
    with pytest.raises(ConfigError, match=re.escape("`ulimit -n 1256`")):
        LIMITS.for_clients(500, "workers")
    allow_files(monkeypatch, 1256)
    LIMITS.for_clients(500, "workers")
    with pytest.raises(ConfigError, match=r"got 1001\. Use at most 1000"):
        LIMITS.for_clients(1001, "workers")


def test_too_many_ranks_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_files(monkeypatch, 1024)
    names = [f"rank {rank}" for rank in range(386)]
    with pytest.raises(ConfigError, match=r"other ranks must be at most 384 .*, got 385"):
        Watch.host(names, bind="127.0.0.1")
    tokens = {name.encode(): rank for rank, name in enumerate(names[1:])}
    with pytest.raises(ConfigError, match=r"other ranks must be at most 384 .*, got 385"):
        RankSockets(tokens, bind="127.0.0.1", keys=None, allowed=())


def test_a_client_may_have_several_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_files(monkeypatch, 1025)
    LIMITS.for_clients(192, "workers", connections_each=2)
    with pytest.raises(ConfigError, match=r"at most 192 .*, got 193.*`ulimit -n 1028`"):
        LIMITS.for_clients(193, "workers", connections_each=2)
    with pytest.raises(ConfigError, match=r"got 501\. Use at most 500"):
        LIMITS.for_clients(501, "workers", connections_each=2)
