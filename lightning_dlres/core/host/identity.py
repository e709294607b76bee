"""Identity of the host that a process runs on."""

from __future__ import annotations

import os
import socket
from pathlib import Path

# A new text at each boot of the kernel, which tells hosts of one name apart.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/net")


def host_identity() -> str:
    """Return a text that is equal for the processes of one host.

    Each network namespace counts as a host of its own, since processes in two of them, such as two
    containers, reach each other over a link.
    """
    parts = [socket.gethostname()]
    if _BOOT_ID.exists():
        parts.append(_BOOT_ID.read_text().strip())
    if _NAMESPACE.exists():
        parts.append(os.readlink(_NAMESPACE))
    return " ".join(parts)
