"""Memory plan: the action for every storage that a step saves, and the predicted cost.

A plan prints as a table, round-trips through JSON, and predicts its own outcome.
"""

from __future__ import annotations

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.memory.execute.actions import MemoryAction


class StorageDecision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decision about one saved storage.

    An event is the saving or the use of a storage. Events are numbered from 0 in each step. The
    policy identifies a storage by its index in the step, its size in bytes, and its dtype.

    Attributes:
        nbytes: Size in bytes.
        dtype: Dtype of the tensor that is saved first, such as "float32".
        layer: Name of the module that saves it; "" outside of all modules.
        action: Action to apply.
        saved: Event at which it is saved.
        tier: Name of the tier that it is offloaded to; None: it stays on the device.
        offset: Offset in the tier's slab, in bytes.
        capacity: Bytes that are reserved for it: in the tier, or on the device if it is compressed
            and stays there.
        offloaded_by: Event at whose end it must have left the device; None: no deadline.
        prefetch_at: Event at which its prefetch starts; None: it is fetched at its first use.
        first_use: Event at which backward first asks for it; None: backward never does.
        uses: Events at which backward asks for it, ascending.
    """

    nbytes: int
    dtype: str
    layer: str
    action: MemoryAction
    saved: int
    tier: str | None = None
    offset: int = 0
    capacity: int = 0
    offloaded_by: int | None = None
    prefetch_at: int | None = None
    first_use: int | None = None
    uses: tuple[int, ...] = ()


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plan of one training step under memory limits.

    Interval `i` is the time before event `i`; the last interval follows the last event.

    Attributes:
        decisions: Decision for every saved storage, in the order of saving.
        recompute: Names of the modules that run again in backward.
        reuse: Names of the modules that reuse memory. They write their input's gradient into their
            input's memory, or are ReLUs that save signs instead of their output.
        seconds: Predicted duration of the step.
        plain_seconds: Duration of the step in plain training, which keeps every storage.
        peak: Predicted peak of bytes on the device.
        plain_peak: Peak of bytes on the device in plain training.
        saved_peak: Predicted peak of the bytes of saved storages on the device.
        plain_saved_peak: Peak of the bytes of saved storages in plain training.
        device_limit: Limit of the device in bytes; None: no limit.
        saved_limit: Limit of saved storages on the device in bytes; None: no limit.
        tiers: Bytes to allocate in each tier, by the name of the tier.
        held: Bytes of saved storages on the device, for every interval.
        base: Bytes of everything else on the device, for every interval.
        stalls: Seconds for which the device waits, compresses or recomputes, for every event; the
            last value follows the last event.
        interval_seconds: Seconds of computation, for every interval.
        moved: Bytes copied between the device and the tiers in a step.
        notes: Remarks for the user.
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
        """Return whether the plan keeps every storage and patches no module."""
        patched_modules = self.recompute or self.reuse
        return not patched_modules and all(d.action is MemoryAction.KEEP for d in self.decisions)

    def bytes_of(self, action: MemoryAction) -> int:
        """Return the bytes of the storages with this action."""
        return sum(d.nbytes for d in self.decisions if d.action is action)

    def prediction(self) -> str:
        """Return the predicted outcome in one line."""
        slowdown = self.seconds / self.plain_seconds - 1 if self.plain_seconds else 0.0
        return (
            f"peak {format_bytes(self.peak)} instead of {format_bytes(self.plain_peak)}, saved "
            f"tensors {format_bytes(self.saved_peak)} instead of "
            f"{format_bytes(self.plain_saved_peak)}, step {format_seconds(self.seconds)} "
            f"({slowdown:+.1%})"
        )

    def table(self) -> str:
        """Return the plan as a table of actions by layer."""
        rows: dict[tuple[str, str, str], list[int]] = {}
        for d in self.decisions:
            key = (d.layer or "(no module)", d.action.value, d.tier or "-")
            counts = rows.setdefault(key, [0, 0])
            counts[0] += 1
            counts[1] += d.nbytes
        table_rows = [
            [layer, action, tier, count, format_bytes(size)]
            for (layer, action, tier), (count, size) in rows.items()
        ]
        for name in self.recompute:
            table_rows.append([name, "recompute", "-", None, "-"])
        for name in self.reuse:
            table_rows.append([name, "reuse", "-", None, "-"])
        title = f"Memory plan: {self.prediction()}"
        lines = [render(title, ["layer", "action", "to", "storages", "bytes"], table_rows)]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    @staticmethod
    def from_json(text: str | bytes) -> MemoryPlan:
        """Return the plan in JSON text that `to_json` wrote.

        Raises:
            ConfigError: If the text is not a valid plan.
        """
        try:
            return from_json(text, MemoryPlan)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"memory plan must be JSON that MemoryPlan.to_json wrote, got an error: {error}. "
                "Write the plan with `to_json` again."
            ) from error
