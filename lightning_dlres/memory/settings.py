"""What a user wants of an offloader."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

from lightning_dlres.memory.execute.actions import MemoryAction


@dataclass(frozen=True)
class TierSettings:
    """A place where data may go.

    Attributes:
        name: "host" or "disk".
        limit: bytes; infinite: no limit.
        directory: of a file; None for memory.
    """

    name: str
    limit: float = inf
    directory: Path | None = None


@dataclass(frozen=True)
class Settings:
    """What the user wants.

    Attributes:
        device_limit: bytes that the device may hold; "min": as few as possible.
        saved_limit: bytes of saved data, or, up to 1, a share of what plain training saves.
        min_bytes: smaller data stay.
        tiers: where data may go, the preferred one first.
        actions, recompute, reuse: what may be done.
        profile_steps: steps that are measured.
        exact: whether modules are changed only if they compute the same bits in one more step.
        on_over_budget: "error", or "warn": a step that no plan fits goes on with the smallest peak.
    """

    device_limit: float | str = inf
    saved_limit: float = inf
    min_bytes: int = 1 << 16
    tiers: tuple[TierSettings, ...] = (TierSettings("host"),)
    actions: tuple[MemoryAction, ...] = tuple(MemoryAction)
    recompute: bool = True
    reuse: bool = True
    profile_steps: int = 2
    exact: bool = True
    on_over_budget: str = "error"
