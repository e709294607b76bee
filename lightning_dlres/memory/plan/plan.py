"""What happens to everything that autograd saves in a step, and what that costs: the plan, which
prints as a table, round-trips through JSON, and predicts its own outcome (Method A, A3)."""

from __future__ import annotations

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.memory.execute.actions import MemoryAction


class StorageDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one saved_storage.

    Attributes:
        nbytes, dtype, layer: the saved_storage, by which the engine knows it again.
        action: what happens.
        tier: where it goes; None if it stays.
        offset, room: its place in the tier, and the bytes that are there for it; if it is
            compressed and stays, the bytes that it may take.
        left_by: event before whose next interval it must have left the device.
        fetch_at: event at which it may be brought back; None: when it is asked for.
        first_use: event at which it is asked for.
        saved: event at which it is saved.
    """

    nbytes: int
    dtype: str
    layer: str
    action: MemoryAction
    saved: int
    tier: str | None = None
    offset: int = 0
    room: int = 0
    left_by: int | None = None
    fetch_at: int | None = None
    first_use: int | None = None
    uses: tuple[int, ...] = ()


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step under limits.

    Attributes:
        decisions: for every saved_storage, in the order in which they are saved.
        recompute: names of the modules that run again in backward.
        reuse: names of the modules that write their input's gradient into their input's memory,
            and of ReLUs that save signs in the place of their output (Method A, A6).
        seconds, plain_seconds: predicted for the step, with the plan and if all is kept.
        peak, plain_peak: predicted most bytes on the device.
        saved_peak, plain_saved_peak: predicted most bytes of data on the device.
        device_limit, saved_limit: bytes; None: no limit.
        tiers: bytes of the slab in every tier.
        held: bytes of data on the device, for every interval.
        base: bytes of all else.
        stalls: seconds for which the device waits at every event.
        interval_seconds: seconds of computing of every interval.
        moved: bytes over the links.
        notes: what a person should know.
    """

    decisions: tuple[StorageDecision, ...]
    recompute: tuple[str, ...] = ()
    reuse: tuple[str, ...] = ()
    seconds: float
    plain_seconds: float
    peak: int
    plain_peak: int
    saved_peak: int
    plain_saved_peak: int
    device_limit: float | None = None
    saved_limit: float | None = None
    tiers: dict[str, int] = {}
    held: tuple[int, ...] = ()
    base: tuple[int, ...] = ()
    stalls: tuple[float, ...] = ()
    interval_seconds: tuple[float, ...] = ()
    moved: int = 0
    notes: tuple[str, ...] = ()

    @property
    def changes_nothing(self) -> bool:
        """Return whether everything stays as it is."""
        installs = self.recompute or self.reuse
        return not installs and all(d.action is MemoryAction.KEEP for d in self.decisions)

    def bytes_of(self, action: MemoryAction) -> int:
        """Return the bytes of the data to which this happens."""
        return sum(d.nbytes for d in self.decisions if d.action is action)

    def prediction(self) -> str:
        """Return the outcome in one line."""
        slower = self.seconds / self.plain_seconds - 1 if self.plain_seconds else 0.0
        return (
            f"peak {format_bytes(self.peak)} instead of {format_bytes(self.plain_peak)}, saved "
            f"data {format_bytes(self.saved_peak)} instead of "
            f"{format_bytes(self.plain_saved_peak)}, step {format_seconds(self.seconds)} "
            f"({slower:+.1%})"
        )

    def table(self) -> str:
        """Return the plan for people: what happens in every layer."""
        rows: dict[tuple[str, str, str], list[int]] = {}
        for d in self.decisions:
            key = (d.layer or "(no module)", d.action.value, d.tier or "-")
            counts = rows.setdefault(key, [0, 0])
            counts[0] += 1
            counts[1] += d.nbytes
        shown = [
            [layer, action, tier, count, format_bytes(size)]
            for (layer, action, tier), (count, size) in rows.items()
        ]
        for name in self.recompute:
            shown.append([name, "recompute", "-", None, "-"])
        for name in self.reuse:
            shown.append([name, "reuse", "-", None, "-"])
        title = f"Memory plan: {self.prediction()}"
        lines = [render(title, ["layer", "action", "to", "data", "bytes"], shown)]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the plan as text."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    @staticmethod
    def from_json(text: str | bytes) -> MemoryPlan:
        """Return the plan that `to_json` wrote.

        Raises:
            ConfigError: it is none.
        """
        try:
            return from_json(text, MemoryPlan)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"memory plan: cannot be read: {error}. Expected the JSON that "
                "MemoryPlan.to_json wrote."
            ) from error
