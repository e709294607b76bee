"""Ranks listen where the others reach them, and on the loopback interface of a single host."""

from __future__ import annotations

import pytest

from lightning_dlres.core.comm.rank_addresses import (
    RankAddress,
    listening_addresses,
    own_address,
)
from lightning_dlres.core.errors import ConfigError

MAIN = "10.0.0.1"


def test_ranks_of_one_host_listen_on_the_loopback_interface() -> None:
    found = [RankAddress("a", MAIN, MAIN), RankAddress("a", "", "")]
    assert listening_addresses(found) == ["127.0.0.1"] * 2


def test_ranks_of_several_hosts_listen_where_they_reach_the_main_address() -> None:
    found = [
        RankAddress("a", MAIN, MAIN),
        RankAddress("a", MAIN, MAIN),
        RankAddress("b", "10.0.0.2", MAIN),
    ]
    assert listening_addresses(found) == [MAIN, MAIN, "10.0.0.2"]


def test_the_main_host_listens_at_the_main_address_as_others_see_it() -> None:
    """On the main host, the name of the main address often stands for a loopback address."""
    found = [
        RankAddress("a", "127.0.0.1", "127.0.1.1"),
        RankAddress("b", "10.0.0.2", MAIN),
        RankAddress("a", "127.0.0.1", "127.0.1.1"),
    ]
    assert listening_addresses(found) == [MAIN, "10.0.0.2", MAIN]


@pytest.mark.parametrize("other", [RankAddress("b", "", ""), RankAddress("b", "::1", "::1")])
def test_a_rank_that_others_cannot_reach_is_refused(other: RankAddress) -> None:
    found = [RankAddress("a", MAIN, "::1"), other]
    with pytest.raises(ConfigError, match="rank 1 must have an address that other hosts can reach"):
        listening_addresses(found)


def test_a_rank_has_the_address_of_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert own_address("a") == RankAddress("a", "127.0.0.1", "127.0.0.5")


def test_without_an_interface_a_rank_has_the_address_on_its_way_to_the_main_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    assert own_address("a").own.startswith("127.")


def test_without_a_way_to_the_main_address_a_rank_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "host.invalid")
    assert own_address("a") == RankAddress("a", "", "")
    monkeypatch.delenv("MASTER_ADDR")
    assert own_address("a") == RankAddress("a", "", "")


def test_an_unknown_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME must be .*, got 'nothing0'"):
        own_address("a")
