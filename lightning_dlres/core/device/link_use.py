"""Use of a GPU's link to host memory by an engine, so that engines can share the link.

The engine whose copies every step needs, such as the one that fetches parameters, states its use.
Another one, which may choose its copies, plans with the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class LinkUse:
    """Bytes that an engine copies in a training step.

    Attributes:
        to_device: Bytes from the host to the device.
        from_device: Bytes from the device to the host.
    """

    to_device: int = 0
    from_device: int = 0

    def __add__(self, other: LinkUse) -> LinkUse:
        return LinkUse(self.to_device + other.to_device, self.from_device + other.from_device)


@runtime_checkable
class UsesLink(Protocol):
    """Part of a training run that copies between host and device in every step."""

    def link_use(self) -> LinkUse:
        """Return its copies in a training step, as far as they are known."""
        ...
