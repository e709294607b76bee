"""Cluster that a model is trained on: the devices and the links between them, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from lightning_dlres.core.checks import finite, instance, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's device.

    Attributes:
        kind: Index of the device's kind. Devices of one kind take the same time for every layer.
        power: Compute power relative to the fastest device, which has 1.0.
        host: Name of the device's host. Links within hosts and between hosts differ.
        memory_limit: Bytes that the model may take on the device; None: no limit.
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


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link between two ranks, the same in both directions.

    Attributes:
        ranks: The two ranks.
        latency: Seconds before the first byte arrives.
        bytes_per_second: Bandwidth after the first byte; infinite for a perfect link.
    """

    ranks: tuple[int, int]
    latency: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        pair = self.ranks if isinstance(self.ranks, (list, tuple)) else ()
        if len(pair) != 2 or any(type(rank) is not int or rank < 0 for rank in pair):
            rule = "two ranks of at least 0"
            raise ConfigError(got_expected("ranks", self.ranks, rule, "ranks=(0, 1)"))
        finite("latency", self.latency, "latency=0.0")
        if self.bytes_per_second != float("inf"):
            finite("bytes_per_second", self.bytes_per_second, "bytes_per_second=1e9", above=True)


_PERFECT_LINK = Link(ranks=(0, 0), latency=0.0, bytes_per_second=float("inf"))


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices of all ranks and the links between them.

    Attributes:
        kinds: Name of each kind of device.
        devices: One device per rank.
        links: Measured links. `link` derives all others from these.
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
        """Return the link between two ranks.

        It is the measured link of these ranks, else one of the same two hosts. Else it is any link
        of the same nature (within a host or between hosts), else a perfect link.
        """

        def hosts(ranks: Sequence[int]) -> list[str]:
            return sorted(self.devices[rank].host for rank in ranks)

        def is_within_host(ranks: Sequence[int]) -> bool:
            return len(set(hosts(ranks))) == 1

        pair = (a, b)
        same_ranks = (x for x in self.links if sorted(x.ranks) == sorted(pair))
        same_hosts = (x for x in self.links if hosts(x.ranks) == hosts(pair))
        same_nature = (x for x in self.links if is_within_host(x.ranks) == is_within_host(pair))
        return next(chain(same_ranks, same_hosts, same_nature), _PERFECT_LINK)

    def transfer_seconds(self, a: int, b: int, nbytes: int) -> float:
        """Return the seconds that a message of this many bytes takes from one rank to another."""
        link = self.link(a, b)
        return link.latency + nbytes / link.bytes_per_second
