"""Ports in the addresses of servers."""

from __future__ import annotations

PORTS = range(1 << 16)


def has_port(address: str) -> bool:
    """Return True if an address, such as "tcp://10.0.0.1:5555", ends with a port to connect to."""
    port = address.rpartition(":")[2]
    return port.isdecimal() and int(port) in PORTS[1:]
