"""Memory of ranks that share a host, a control group, or neither."""

from __future__ import annotations

from lightning_dlres.pipeline.profile.ranks.rank_device import (
    RankDevice,
    bytes_for_measuring,
    host_memory,
    with_own_limits,
)


def rank(free: int | None = 1000, group: str = "", **fields: object) -> RankDevice:
    described = {"name": "cpu", "is_cuda": False, "limit": None, "held": 0, **fields}
    return RankDevice(host="a", free=free, group=group, **described)  # type: ignore[arg-type]


def test_ranks_share_the_memory_of_their_host() -> None:
    devices = with_own_limits([rank(held=100), rank(free=900)])
    assert [device.limit for device in devices] == [None, None]
    assert bytes_for_measuring(devices, 0) == 405
    assert host_memory(devices) == {"a": 900}


def test_ranks_share_the_memory_of_their_group() -> None:
    devices = with_own_limits([rank(group="job"), rank(group="job"), rank(group="job", limit=50)])
    assert [device.limit for device in devices] == [None, None, 50]
    assert bytes_for_measuring(devices, 0) == 300
    assert bytes_for_measuring(devices, 2) == 50
    assert host_memory(devices) == {"a": 900}


def test_a_rank_that_is_alone_in_its_group_has_a_limit_of_its_own() -> None:
    described = [rank(group="one", held=200), rank(500, "two"), rank(None, "three")]
    devices = with_own_limits(described)
    assert [device.limit for device in devices] == [1080, 450, None]
    assert bytes_for_measuring(devices, 0) == 900
    assert bytes_for_measuring(devices, 1) == 450
    assert host_memory(devices) == {}


def test_a_group_of_another_host_is_another_one() -> None:
    devices = with_own_limits([rank(group="job"), rank(group="job")._replace(host="b")])
    assert [device.limit for device in devices] == [900, 900]
