"""Addresses at which the ranks of a run listen for each other.

If all ranks are on one host, they listen on the loopback interface. Otherwise a rank listens at the
address of the interface in `GLOO_SOCKET_IFNAME`, which gloo uses as well, or at the one from which
it reaches the run's main address, `MASTER_ADDR`. On the main host, the main address may lead to the
loopback interface. The rank then listens at the main address as other hosts see it.
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
# Request for the IPv4 address of an interface, of Linux's `ioctl`. The address is at bytes 20 to 24
# of the answer.
_SIOCGIFADDR = 0x8915
# Any port: no packet is sent.
_ANY_PORT = 9


@dataclass(frozen=True)
class RankAddress:
    """Addresses that a rank has found.

    Attributes:
        host: Identity of its host.
        own: Address at which other hosts may reach this rank; empty if there is none.
        main: The main address, as this rank sees it; empty if there is none.
    """

    host: str
    own: str
    main: str


def own_address(host: str) -> RankAddress:
    """Return the addresses of this process, on the host of an identity.

    Raises:
        ConfigError: If `GLOO_SOCKET_IFNAME` names no interface with an IPv4 address.
    """
    interface = os.environ.get(_INTERFACE_VARIABLE, "").partition(",")[0]
    own, main = _towards(os.environ.get(_MAIN_VARIABLE, ""))
    return RankAddress(host, _address_of(interface) if interface else own, main)


def listening_addresses(found: Sequence[RankAddress]) -> list[str]:
    """Return the address at which each rank listens.

    Args:
        found: Addresses that each rank has found.

    Raises:
        ConfigError: If other hosts cannot reach a rank; the message names it.
    """
    if len({one.host for one in found}) == 1:
        return [LOOPBACK] * len(found)
    addresses = []
    for rank, one in enumerate(found):
        address = one.own
        if is_loopback(address):
            # The main address is one of this host.
            address = next((other.main for other in found if other.host != one.host), "")
        if not address or is_loopback(address):
            raise ConfigError(
                f"rank {rank} must have an address that other hosts can reach, got "
                f"{address or 'none'!r}. Set {_INTERFACE_VARIABLE} to the name of its interface."
            )
        addresses.append(address)
    return addresses


def _towards(host: str) -> tuple[str, str]:
    """Return the own address on the way to a host, and the host's address; empty without a way."""
    if not host:
        return "", ""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # This only looks the way up in the routing table.
            probe.connect(target)
            return str(probe.getsockname()[0]), str(probe.getpeername()[0])
    except OSError:
        return "", ""


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, such as "eth0"."""
    try:
        import fcntl

        request = struct.pack("256s", interface.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{_INTERFACE_VARIABLE} must be the name of an interface with an IPv4 address, got "
            f"{interface!r} ({error}). See `ip address`."
        ) from None
