"""Addresses at which the ranks of a run listen for each other.

If all ranks are on one host, they listen on the loopback interface. Otherwise a rank listens at the
address of the interface in `GLOO_SOCKET_IFNAME`, which gloo uses as well. Without that variable, it
listens at the local address of its route to the run's main address, `MASTER_ADDR`. On the main host
itself, that route may be the loopback interface. A rank there listens at the main address, as the
other hosts resolve it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.server import is_loopback

LOOPBACK = "127.0.0.1"
_INTERFACE_VARIABLE, _MAIN_VARIABLE = "GLOO_SOCKET_IFNAME", "MASTER_ADDR"
# Linux's `ioctl` request for the IPv4 address of an interface, which is at bytes 20 to 24 of the
# answer.
_SIOCGIFADDR = 0x8915
# Longest name of an interface on Linux, in bytes.
_MAX_NAME_BYTES = 15
# Port in a look-up of a route. Any port will do: no packet is sent.
_ANY_PORT = 9


@dataclass(frozen=True)
class RankAddress:
    """A rank's host and address, and the main address, as the rank finds them.

    Attributes:
        host_id: Identity of its host.
        own: Address at which other hosts may reach this rank; empty if it found none.
        main: Numeric main address, as this rank resolves it; empty if it found none.
    """

    host_id: str
    own: str
    main: str


def own_address(host_id: str) -> RankAddress:
    """Return this rank's own address and the main address, as this rank finds them.

    Args:
        host_id: Identity of this rank's host; see `host_identity`.

    Raises:
        ConfigError: If `GLOO_SOCKET_IFNAME` names no interface with an IPv4 address.
    """
    interface = os.environ.get(_INTERFACE_VARIABLE, "").partition(",")[0]
    own, main = _route_to(os.environ.get(_MAIN_VARIABLE, ""))
    return RankAddress(host_id, _address_of(interface) if interface else own, main)


def listening_addresses(by_rank: Sequence[RankAddress]) -> list[str]:
    """Return the numeric address at which each rank listens, by rank.

    Args:
        by_rank: Result of `own_address` on each rank.

    Raises:
        ConfigError: If other hosts cannot reach a rank; the message names it.
    """
    if len({entry.host_id for entry in by_rank}) == 1:
        return [LOOPBACK] * len(by_rank)
    addresses = []
    for rank, entry in enumerate(by_rank):
        address = entry.own
        if is_loopback(address):
            # This rank is on the main host. Take the main address as another host resolves it.
            address = next((other.main for other in by_rank if other.host_id != entry.host_id), "")
        if not address or is_loopback(address):
            raise ConfigError(
                f"rank {rank} must have an address that other hosts can reach, got "
                f"{address or 'none'!r}. Set {_INTERFACE_VARIABLE} to the name of its interface."
            )
        addresses.append(address)
    return addresses


def _route_to(name: str) -> tuple[str, str]:
    """Return the local address of the route to a host, and the host's own numeric address.

    Both are empty if there is no name or no route.
    """
    if not name:
        return "", ""
    try:
        family, _, _, _, target = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # For a datagram socket, this only looks the route up; it sends nothing.
            probe.connect(target)
            return str(probe.getsockname()[0]), str(probe.getpeername()[0])
    except OSError:
        return "", ""


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, such as "eth0".

    Raises:
        ConfigError: If there is no such interface, or it has no IPv4 address.
    """
    try:
        import fcntl

        request = struct.pack("256s", interface.encode()[:_MAX_NAME_BYTES])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{_INTERFACE_VARIABLE} must be the name of an interface with an IPv4 address, got "
            f"{interface!r} ({error}). See `ip address`."
        ) from None
