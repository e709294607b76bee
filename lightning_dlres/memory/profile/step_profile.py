"""What one training step keeps in memory, as measured (Method A, A1): the planner's input.

A step is a row of events: a saved_storage is saved, or used. Interval `p` is the time before event `p`, and
the last interval is the one after the last event, up to the end of the step.
"""

from __future__ import annotations

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.core.wire.decoding import from_json


class SavedStorageProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that autograd saves, for all tensors that are views of it.

    Attributes:
        nbytes: its size.
        dtype, shape: of the tensor that was saved first.
        layer: name of the module that saved it; "" outside of all.
        role: what it is to that module: "input", "output" or "internal".
        saved: event at which it was saved.
        gone: last interval in which somebody else held the memory, too: before that it is not
            freed, wherever a copy of it is.
        uses: events at which backward asked for it, ascending.
        end: event after which nobody asks for it any more.
        packed: bytes that it has when compressed; None where that does not pay.
        encode_seconds, decode_seconds: how long compression takes, and its reverse.
    """

    nbytes: int
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    layer: str = ""
    role: str = "internal"
    saved: int
    gone: int
    uses: tuple[int, ...]
    end: int
    packed: int | None = None
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def can_leave(self) -> bool:
        """Return whether there is a time at which it is needed nowhere on the device."""
        return bool(self.uses) and self.gone < self.uses[0]


class TierLink(msgspec.Struct, frozen=True, kw_only=True):
    """The way to a tier, which carries what leaves and what comes back, one after another.

    Attributes:
        tier: where it leads to: "host" or "disk".
        out_rate, in_rate: bytes a second.
        overlaps: whether the device computes meanwhile.
        latency: seconds that every copy takes beside its bytes.
    """

    tier: str
    out_rate: float
    in_rate: float
    overlaps: bool
    latency: float = 0.0

    def out_seconds(self, nbytes: int) -> float:
        """Return how long so many bytes take to leave."""
        return self.latency + nbytes / self.out_rate

    def in_seconds(self, nbytes: int) -> float:
        """Return how long so many bytes take to come back."""
        return self.latency + nbytes / self.in_rate


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """A module whose data need not be saved, since its forward can run again.

    Attributes:
        layer: its name.
        data: what it saves and nobody else needs.
        seconds: of its forward.
        entry: event before which its forward begins.
        inputs: bytes that must be kept for it, and are not kept otherwise.
        workspace: bytes that its forward needs beside what it saves.
    """

    layer: str
    data: tuple[int, ...]
    seconds: float
    entry: int
    inputs: int = 0
    workspace: int = 0


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """Modules that can do with less memory for one saved_storage (Method A, A6): one that writes its
    input's gradient into the saved_storage's memory, or a ReLU that saves signs in its place, or both.

    Attributes:
        layers: their names, in the order in which they run.
        saved_storage: which.
        at: event at which its last reader asks for it; None: with the signs, nobody does.
        nbytes: of the input's gradient that need no other memory then.
        signs: bytes of the signs that are saved.
        seconds: what it takes.
    """

    layers: tuple[str, ...]
    saved_storage: int
    at: int | None
    nbytes: int = 0
    signs: int = 0
    seconds: float = 0.0


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """What a module without children keeps in memory, in bytes, and what it depends on.

    Attributes:
        name, kind: path in the model, and class.
        parameters, gradients, history: of its parameters; history is what the optimizer keeps.
        maps: feature maps that it saves for backward.
        map_gradients: gradients of its outputs.
        workspace: the most that its forward takes and gives back.
        needs: roles of what its backward reads: "input", "output", "internal", "parameter".
        after: the layers that made its inputs.
    """

    name: str
    kind: str
    parameters: int = 0
    gradients: int = 0
    history: int = 0
    maps: int = 0
    map_gradients: int = 0
    workspace: int = 0
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One step.

    Attributes:
        seconds: of computing, for every interval.
        base: the most bytes that the device holds in every interval, beside the data.
        data: in the order in which they were saved.
        links: to the tiers that can be used; the first is preferred.
        regions: modules that can be run again.
        reuses: modules that can do with less memory.
        layers: the modules, in the order in which they ran.
    """

    seconds: tuple[float, ...]
    base: tuple[int, ...]
    data: tuple[SavedStorageProfile, ...]
    links: tuple[TierLink, ...] = ()
    regions: tuple[Region, ...] = ()
    reuses: tuple[Reuse, ...] = ()
    layers: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        events = len(self.seconds) - 1
        taken = sorted(
            e for saved_storage in self.data for e in (saved_storage.saved, *saved_storage.uses)
        )
        if len(self.base) != events + 1 or taken != list(range(events)):
            raise ConfigError(
                f"a profile of a step: got {len(self.base)} intervals and {len(taken)} events, "
                f"expected {events + 1} and {events}. Profile again."
            )
        for number, saved_storage in enumerate(self.data):
            ordered = saved_storage.saved < saved_storage.gone <= events and list(
                saved_storage.uses
            ) == sorted(saved_storage.uses)
            if not (ordered and saved_storage.saved <= saved_storage.end <= events) or (
                saved_storage.uses
                and not saved_storage.saved
                < saved_storage.uses[0]
                <= saved_storage.uses[-1]
                <= saved_storage.end
            ):
                raise ConfigError(
                    f"saved_storage {number} of a profile: got {saved_storage}, expected it to be saved before it "
                    "is used. Profile again."
                )

    @property
    def saved_bytes(self) -> int:
        """Return the most bytes of data that there are at a time, if all are kept."""
        change = [0] * (len(self.seconds) + 1)
        for saved_storage in self.data:
            change[saved_storage.saved] += saved_storage.nbytes
            change[saved_storage.end + 1] -= saved_storage.nbytes
        most = now = 0
        for step in change:
            now += step
            most = max(most, now)
        return most

    def table(self) -> str:
        """Return what every layer keeps, for people."""
        columns = ["layer", "kind", "parameters", "gradients", "history", "feature maps"]
        columns += ["their gradients", "workspace", "backward needs", "after"]
        rows = []
        for layer in self.layers:
            sizes = [layer.parameters, layer.gradients, layer.history]
            sizes += [layer.maps, layer.map_gradients, layer.workspace]
            shown = [format_bytes(size) if size else "-" for size in sizes]
            needs, after = ", ".join(layer.needs), ", ".join(layer.after)
            rows.append([layer.name, layer.kind, *shown, needs or "-", after or "-"])
        title = (
            f"One step: {format_seconds(sum(self.seconds))}, {len(self.data)} saved data, at most "
            f"{format_bytes(self.saved_bytes)} of them at a time"
        )
        return render(title, columns, rows)

    def to_json(self) -> str:
        """Return the profile as text."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> StepProfile:
        """Return the profile that `to_json` wrote.

        Raises:
            ConfigError: it is none.
        """
        try:
            return from_json(text, StepProfile)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"memory profile: cannot be read: {error}. Expected what to_json wrote."
            ) from error
