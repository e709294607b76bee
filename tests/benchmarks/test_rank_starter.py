"""Ranks are forked from processes that have imported their modules, and say why they failed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.ranks import Ranks
from benchmarks.support.rpc import RankRpc
from benchmarks.support.testbed import Host, HostError, Testbed, reason_unavailable
from tests.support.waiting import wait_until

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    if reason := reason_unavailable():
        pytest.skip(reason)
    with Testbed([Host(), Host()]) as bed:
        yield bed


def main(rpc: RankRpc) -> None:
    for order in rpc.orders():
        if order.get("fail"):
            raise RuntimeError("as ordered")
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        network = os.stat("/proc/self/ns/net").st_ino
        answer = {"pid": os.getpid(), "network": network, "cpus": sorted(os.sched_getaffinity(0))}
        rpc.reply({**answer, **{name: os.environ[name] for name in names}})


def test_groups_of_ranks_come_and_go(bed: Testbed) -> None:
    starter = RankStarter(bed, [__name__])
    groups = [Ranks(starter, __name__, 2, timeout=60.0) for _ in range(2)]
    first, second = (group.ask({}) for group in groups)
    assert [answer["RANK"] for answer in first] == ["0", "1"]
    assert {answer["WORLD_SIZE"] for answer in first} == {"2"}
    assert {answer["MASTER_ADDR"] for answer in first + second} == {bed.hosts[0].address}
    assert len({answer["MASTER_PORT"] for answer in first + second}) == 2
    groups[0].close()
    for answer in first:
        wait_until(lambda pid=answer["pid"]: not Path(f"/proc/{pid}").exists(), "it is gone")
    assert groups[1].ask({}) == second


def test_each_rank_is_on_its_host() -> None:
    if reason := reason_unavailable():
        pytest.skip(reason)
    cpu = min(os.sched_getaffinity(0))
    with Testbed([Host(), Host(cpus=(cpu,))]) as bed:
        ranks = Ranks(RankStarter(bed, [__name__]), __name__, 2, timeout=60.0)
        answers = ranks.ask({})
        for host, answer in zip(bed.hosts, answers, strict=True):
            namespace = Path("/run/netns", host.namespace)
            assert answer["network"] == namespace.stat().st_ino
            members = (host.cgroup / "cgroup.procs").read_text().split()
            assert str(answer["pid"]) in members
        assert answers[1]["cpus"] == [cpu]


def test_a_rank_that_fails_is_reported(bed: Testbed) -> None:
    ranks = Ranks(RankStarter(bed, [__name__]), __name__, 1, timeout=60.0)
    with pytest.raises(HostError, match=r"(?s)rank 0 ended.*RuntimeError: as ordered"):
        ranks.ask({"fail": True})


def test_what_cannot_be_imported_is_reported(bed: Testbed) -> None:
    with pytest.raises(HostError, match=r"(?s)fork server.*No module named 'no_such_module'"):
        RankStarter(bed, ["no_such_module"])
