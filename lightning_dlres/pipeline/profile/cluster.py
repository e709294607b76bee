"""Cluster that a model is trained on: the devices and the links between them, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from lightning_dlres.core.checks import finite, instance, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's device.

    Attributes:
        kind: index of its kind: devices of one kind take the same time for every layer.
        power: compute power; the fastest device has 1.0.
        host: name of its host; links inside and between hosts differ.
        memory_limit: bytes that the model may take there; None: no limit.
    """

    kind: int = 0
    power: float = 1.0
    host: str = ""
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        whole_number("kind", self.kind, "kind=0", least=0)
        finite("power", self.power, "power=1.0", above=True)
        instance("host", self.host, (str,), "a name", "host=''")
        if self.memory_limit is not None:
            whole_number("memory_limit", self.memory_limit, "memory_limit=None", least=0)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A way between two ranks: seconds before the first byte, and bytes a second after it."""

    ranks: tuple[int, int]
    latency: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        pair = self.ranks if isinstance(self.ranks, (list, tuple)) else ()
        if len(pair) != 2 or any(type(rank) is not int or rank < 0 for rank in pair):
            raise ConfigError(got_expected("ranks", self.ranks, "two ranks", "ranks=(0, 1)"))
        finite("latency", self.latency, "latency=0.0")
        # A perfect link is infinitely fast.
        if self.bytes_per_second != float("inf"):
            finite("bytes_per_second", self.bytes_per_second, "bytes_per_second=1e9", above=True)


_PERFECT = Link(ranks=(0, 0), latency=0.0, bytes_per_second=float("inf"))


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The devices and what joins them.

    Attributes:
        kinds: name of each kind of device.
        devices: one per rank.
        links: measured ways. A pair that is not in the list is like a measured pair of the same two
            hosts, else like one of the same nature (within a host, between hosts), else perfect.
    """

    kinds: tuple[str, ...]
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        for rank, device in enumerate(self.devices):
            if device.kind >= len(self.kinds):
                raise ConfigError(
                    f"devices must be of one of the {len(self.kinds)} kinds, got kind "
                    f"{device.kind} for rank {rank}. Name that kind in kinds."
                )
        for link in self.links:
            if max(link.ranks) >= len(self.devices):
                raise ConfigError(
                    f"links must be between ranks below {len(self.devices)}, got {link.ranks}. "
                    "Add the device, or remove the link."
                )

    def link(self, a: int, b: int) -> Link:
        """Return the way between two ranks."""

        def hosts(ranks: Sequence[int]) -> list[str]:
            return sorted(self.devices[rank].host for rank in ranks)

        def inside(ranks: Sequence[int]) -> bool:
            return len(set(hosts(ranks))) == 1

        wanted = (a, b)
        same_ranks = (x for x in self.links if sorted(x.ranks) == sorted(wanted))
        same_hosts = (x for x in self.links if hosts(x.ranks) == hosts(wanted))
        same_nature = (x for x in self.links if inside(x.ranks) == inside(wanted))
        return next(chain(same_ranks, same_hosts, same_nature), _PERFECT)

    def transfer_seconds(self, a: int, b: int, nbytes: int) -> float:
        """Return the seconds that a message takes from one rank to another."""
        link = self.link(a, b)
        return link.latency + nbytes / link.bytes_per_second
