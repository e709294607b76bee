"""A cluster described by hand (`cluster.yaml`), to plan for machines that are not at hand.

    kinds:
      fast: {power: 1.0, memory: 24GiB}
      slow: {power: 0.4, memory: 8GiB}
    hosts:
      - devices: [fast, fast]
      - devices: [slow]
    links:
      within_host: {bandwidth: 10GB/s, latency: 20us}
      between_hosts: {bandwidth: 500Mbit/s, latency: 200us}
    measured_on: fast

Ranks are numbered in the order of hosts and of their devices.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import parse_bytes, parse_rate, parse_seconds
from lightning_dlres.pipeline.profile.cluster import Cluster, Device, Link


class KindSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A kind of device: its power relative to the others, and the memory that the model may
    take."""

    power: float
    memory: str | int | None = None


class HostSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A host: the kind of each of its devices."""

    devices: list[str]
    name: str = ""


class LinkSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A way between two devices."""

    bandwidth: str | float
    latency: str | float = 0.0


class LinksSpec(msgspec.Struct, forbid_unknown_fields=True):
    """The ways inside of a host and between hosts; a missing one is perfect."""

    within_host: LinkSpec | None = None
    between_hosts: LinkSpec | None = None


class ClusterFile(msgspec.Struct, forbid_unknown_fields=True):
    """What a cluster file holds.

    Attributes:
        kinds: by name.
        hosts: in the order of ranks.
        links: the ways between devices.
        measured_on: the kind of device that this machine counts as when layers are measured here;
            empty: one of power 1.
    """

    kinds: dict[str, KindSpec]
    hosts: list[HostSpec]
    links: LinksSpec = msgspec.field(default_factory=LinksSpec)
    measured_on: str = ""


def load_cluster(path: str | Path) -> tuple[Cluster, list[float]]:
    """Read a cluster file.

    Returns:
        The cluster, and for every kind the factor by which a layer takes longer there than on this
        machine.

    Raises:
        ConfigError: it cannot be read, or makes no sense.
    """
    try:
        given = msgspec.yaml.decode(Path(path).read_bytes(), type=ClusterFile)
    except OSError as error:
        raise ConfigError(
            f"cluster: cannot read {str(path)!r}: {error.strerror}. Expected the path of a cluster "
            "file in YAML."
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"cluster: {str(path)!r} cannot be read: {error}. Expected kinds, hosts and links; see "
            "docs/hetero_pipe.md."
        ) from None
    names = list(given.kinds)
    used = [kind for host in given.hosts for kind in host.devices]
    asked = [*used, given.measured_on] if given.measured_on else used
    unknown = sorted(set(asked) - set(names))
    if unknown or not used:
        raise ConfigError(
            f"cluster: got devices of the kinds {used} and unknown kinds {unknown}, expected at "
            f"least one device, of {names}."
        )
    if any(not kind.power > 0 for kind in given.kinds.values()):
        powers = {name: kind.power for name, kind in given.kinds.items()}
        raise ConfigError(f"cluster: got powers {powers}, expected positive numbers.")
    fastest = max(given.kinds[name].power for name in used)
    here = given.kinds[given.measured_on].power if given.measured_on else 1.0
    devices = []
    for number, host in enumerate(given.hosts):
        for name in host.devices:
            kind = given.kinds[name]
            devices.append(
                Device(
                    kind=names.index(name),
                    power=kind.power / fastest,
                    host=host.name or f"host {number}",
                    memory_limit=_memory(kind),
                )
            )
    cluster = Cluster(
        kinds=tuple(names), devices=tuple(devices), links=_links(given.links, devices)
    )
    return cluster, [here / kind.power for kind in given.kinds.values()]


def _memory(kind: KindSpec) -> int | None:
    return parse_bytes(kind.memory, "cluster: memory") if kind.memory is not None else None


def _links(links: LinksSpec, devices: list[Device]) -> tuple[Link, ...]:
    """Return one link for each nature of pair that there is; see `Cluster.link`."""
    found = []
    for spec, inside in ((links.within_host, True), (links.between_hosts, False)):
        pairs = [
            (a, b)
            for a in range(len(devices))
            for b in range(a + 1, len(devices))
            if (devices[a].host == devices[b].host) == inside
        ]
        if spec is not None and pairs:
            found.append(
                Link(
                    ranks=pairs[0],
                    latency=parse_seconds(spec.latency, "cluster: latency"),
                    bytes_per_second=parse_rate(spec.bandwidth, "cluster: bandwidth"),
                )
            )
    return tuple(found)
