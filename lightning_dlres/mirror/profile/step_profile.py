"""Profile of a step: which units it uses in which order, and how long everything takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class UseEvent(NamedTuple):
    """Begin or end of a use of a unit.

    Attributes:
        kind: "begin" or "end".
        unit: The unit.
    """

    kind: Literal["begin", "end"]
    unit: int


@dataclass(frozen=True, kw_only=True)
class FetchCost:
    """Time of a copy to the device.

    Attributes:
        fixed_seconds: Time of a copy without bytes.
        bytes_per_second: Speed of all further bytes.
    """

    fixed_seconds: float
    bytes_per_second: float

    def seconds(self, nbytes: int) -> float:
        """Return the time of a copy of so many bytes."""
        return self.fixed_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class MirrorProfile:
    """Profile of a step.

    Attributes:
        nbytes: Bytes of each unit.
        events: Events of the step in their order.
        gaps: Seconds of computation from each event to the next one.
        fetch: Time of a copy to the device.
    """

    nbytes: tuple[int, ...]
    events: tuple[UseEvent, ...]
    gaps: tuple[float, ...]
    fetch: FetchCost

    @property
    def compute_seconds(self) -> float:
        """Seconds of the step without any wait for a copy."""
        return sum(self.gaps)
