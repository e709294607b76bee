"""Cluster file (`cluster.yaml`): a hand-written description, to plan for a cluster elsewhere.

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

Ranks are numbered by host, in the order of the file, then by device.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import parse_bytes, parse_rate, parse_seconds
from lightning_dlres.pipeline.profile.cluster import Cluster, Device, Link


class KindSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A kind of device in a cluster file.

    Attributes:
        power: Compute power relative to the other kinds, in any unit.
        memory: Memory that the model may take, in bytes or as "24GiB"; None: no limit.
    """

    power: float
    memory: str | int | None = None


class HostSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A host in a cluster file.

    Attributes:
        devices: For each device, the name of its kind.
        name: Name of the host; empty: "host" and the host's number in the file, from 0 on.
    """

    devices: list[str]
    name: str = ""


class LinkSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A link between two devices in a cluster file.

    Attributes:
        bandwidth: Bandwidth as "500Mbit/s", or in bytes per second.
        latency: Latency as "200us", or in seconds.
    """

    bandwidth: str | float
    latency: str | float = 0.0


class LinksSpec(msgspec.Struct, forbid_unknown_fields=True):
    """The links within a host and between hosts; without one, transfers take no time."""

    within_host: LinkSpec | None = None
    between_hosts: LinkSpec | None = None


class ClusterFile(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of a cluster file.

    Attributes:
        kinds: Kinds of devices by name.
        hosts: Hosts in the order of ranks.
        links: Links between devices.
        measured_on: Kind of the local device, on which the layers are measured; empty: a device of
            power 1.
    """

    kinds: dict[str, KindSpec]
    hosts: list[HostSpec]
    links: LinksSpec = msgspec.field(default_factory=LinksSpec)
    measured_on: str = ""


def load_cluster(path: str | Path) -> tuple[Cluster, list[float]]:
    """Read a cluster file.

    Returns:
        The cluster, and for every kind the ratio of a layer's time there to its time on the local
        device, in the order of `Cluster.kinds`.

    Raises:
        ConfigError: If the file cannot be read, names an unknown kind, has no device, or has a
            value out of range.
    """
    try:
        file = msgspec.yaml.decode(Path(path).read_bytes(), type=ClusterFile)
    except OSError as error:
        raise ConfigError(
            f"cluster must be the path of a cluster file in YAML, got {str(path)!r} "
            f"({error.strerror}). Correct the path."
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"cluster must be a file with kinds, hosts and links, got {str(path)!r}: {error}. See "
            "the example in docs/hetero_pipe.md."
        ) from None
    names = list(file.kinds)
    used = [kind for host in file.hosts for kind in host.devices]
    referenced = [*used, file.measured_on] if file.measured_on else used
    unknown = sorted(set(referenced) - set(names))
    if unknown or not used:
        raise ConfigError(
            f"cluster must have at least one device and name only the kinds {names}, got devices "
            f"{used} and unknown kinds {unknown}. Add the devices to hosts, or the kinds to kinds."
        )
    if any(not kind.power > 0 for kind in file.kinds.values()):
        powers = {name: kind.power for name, kind in file.kinds.items()}
        raise ConfigError(f"cluster: power must be positive, got {powers}. Use power: 1.0.")
    fastest = max(file.kinds[name].power for name in used)
    local_power = file.kinds[file.measured_on].power if file.measured_on else 1.0
    devices = []
    for host_index, host in enumerate(file.hosts):
        for name in host.devices:
            kind = file.kinds[name]
            devices.append(
                Device(
                    kind=names.index(name),
                    power=kind.power / fastest,
                    host=host.name or f"host {host_index}",
                    memory_limit=_memory(kind),
                )
            )
    cluster = Cluster(kinds=tuple(names), devices=tuple(devices), links=_links(file.links, devices))
    return cluster, [local_power / kind.power for kind in file.kinds.values()]


def _memory(kind: KindSpec) -> int | None:
    return parse_bytes(kind.memory, "cluster: memory") if kind.memory is not None else None


def _links(specs: LinksSpec, devices: list[Device]) -> tuple[Link, ...]:
    """Return one link within a host and one between hosts; `Cluster.link` derives the others."""
    links = []
    for spec, within_host in ((specs.within_host, True), (specs.between_hosts, False)):
        pairs = [
            (a, b)
            for a in range(len(devices))
            for b in range(a + 1, len(devices))
            if (devices[a].host == devices[b].host) == within_host
        ]
        if spec is not None and pairs:
            links.append(
                Link(
                    ranks=pairs[0],
                    latency=parse_seconds(spec.latency, "cluster: latency"),
                    bytes_per_second=parse_rate(spec.bandwidth, "cluster: bandwidth"),
                )
            )
    return tuple(links)
