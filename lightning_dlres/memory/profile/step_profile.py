"""Profile of one training step: the planner's input.

A step is a sequence of events: the saving or the use of a saved storage. Interval `i` is the time
before event `i`. The last interval follows the last event, and lasts to the end of the step.
"""

from __future__ import annotations

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.core.wire.decoding import from_json


class SavedStorageProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Storage that autograd saves, with all tensors that are views of it.

    Attributes:
        nbytes: Size in bytes.
        dtype: Dtype of the tensor that was saved first, such as "float32".
        shape: Shape of that tensor.
        layer: Name of the module that saved it; "" outside of all modules.
        role: Role in that module: "input", "output" or "internal".
        saved: Event at which it was saved.
        shared_until: Last interval in which other code, too, held the memory. Up to then the memory
            is not freed, even if a copy has left the device.
        uses: Events at which backward asked for it, ascending.
        end: Event after which backward does not ask for it again.
        packed: Compressed size in bytes; None: compression is not worthwhile.
        encode_seconds: Duration of its compression.
        decode_seconds: Duration of its decompression.
    """

    nbytes: int
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    layer: str = ""
    role: str = "internal"
    saved: int
    shared_until: int
    uses: tuple[int, ...]
    end: int
    packed: int | None = None
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def can_leave(self) -> bool:
        """Return whether the device does not need it for some time between saving and use."""
        return bool(self.uses) and self.shared_until < self.uses[0]


class TierLink(msgspec.Struct, frozen=True, kw_only=True):
    """Link to a tier. It carries copies of both directions one after another.

    Attributes:
        tier: Name of the tier: "host" or "disk".
        out_rate: Bytes per second from the device to the tier.
        in_rate: Bytes per second from the tier to the device.
        overlaps: Whether the device computes during a copy.
        latency: Seconds that every copy takes in addition to its bytes.
        taken: Share of the link that copies of other engines take, below 1.
    """

    tier: str
    out_rate: float
    in_rate: float
    overlaps: bool
    latency: float = 0.0
    taken: float = 0.0

    def out_seconds(self, nbytes: int) -> float:
        """Return the seconds of a copy to the tier."""
        return self.latency + nbytes / (self.out_rate * (1 - self.taken))

    def in_seconds(self, nbytes: int) -> float:
        """Return the seconds of a copy to the device."""
        return self.latency + nbytes / (self.in_rate * (1 - self.taken))


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Module whose storages need not be saved, since its forward can run again.

    Attributes:
        layer: Name of the module.
        storages: Indices of the storages that it saves, and that no other module needs.
        seconds: Duration of its forward.
        entry: Event before which its forward starts.
        inputs: Bytes of its inputs that nothing else saves. They must be saved if it runs again.
        workspace: Bytes that its forward needs beside the storages that it saves.
    """

    layer: str
    storages: tuple[int, ...]
    seconds: float
    entry: int
    inputs: int = 0
    workspace: int = 0


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """Modules that can reduce the memory of one saved storage.

    The module that reads the storage last in backward can write its input's gradient into the
    storage's memory. A ReLU can save signs in the storage's place. A reuse is either, or both.

    Attributes:
        layers: Names of the modules, in the order in which they run.
        storage: Index of the storage.
        overwritten_at: Event at which the last reader asks for the storage, and overwrites it;
            None: signs replace the storage, and backward does not ask for it.
        nbytes: Bytes of the input's gradient that then need no memory of their own.
        signs: Bytes of the signs that are saved; 0: none are.
        seconds: Seconds that the reuse adds to a step.
    """

    layers: tuple[str, ...]
    storage: int
    overwritten_at: int | None
    nbytes: int = 0
    signs: int = 0
    seconds: float = 0.0


class LayerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes of a module without children, and its dependencies.

    Attributes:
        name: Path in the model.
        kind: Class name.
        parameters: Its own parameters.
        gradients: Gradients of its parameters.
        optimizer_state: Optimizer state of its parameters.
        feature_maps: Storages that it saves for backward.
        feature_map_gradients: Gradients of its outputs.
        workspace: Most temporary memory of its forward.
        needs: Roles of the tensors that its backward reads: "input", "output", "internal".
        after: Names of the layers that made its inputs.
    """

    name: str
    kind: str
    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    feature_maps: int = 0
    feature_map_gradients: int = 0
    workspace: int = 0
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Profile of one step.

    Attributes:
        seconds: Seconds of computation in every interval.
        base: Most bytes on the device beside saved storages, in every interval.
        storages: Saved storages, in the order of saving.
        links: Links to the tiers, the preferred one first.
        regions: Modules that can run again in backward.
        reuses: Reuses that are possible.
        layers: Modules without children, in the order in which they ran.
    """

    seconds: tuple[float, ...]
    base: tuple[int, ...]
    storages: tuple[SavedStorageProfile, ...]
    links: tuple[TierLink, ...] = ()
    regions: tuple[Region, ...] = ()
    reuses: tuple[Reuse, ...] = ()
    layers: tuple[LayerMemory, ...] = ()

    def __post_init__(self) -> None:
        events = len(self.seconds) - 1
        numbered = sorted(e for storage in self.storages for e in (storage.saved, *storage.uses))
        if len(self.base) != events + 1 or numbered != list(range(events)):
            raise ConfigError(
                f"step profile must have {events + 1} base values and {events} distinct events, "
                f"got {len(self.base)} and {len(numbered)}. Profile again."
            )
        for number, storage in enumerate(self.storages):
            uses = list(storage.uses)
            is_ordered = (
                uses == sorted(uses)
                and storage.saved < storage.shared_until <= events
                and storage.saved <= storage.end <= events
                and (not uses or storage.saved < uses[0] <= uses[-1] <= storage.end)
            )
            if not is_ordered:
                raise ConfigError(
                    f"storage {number} of a step profile must have saved < shared_until, and "
                    f"ascending uses after saved and up to end, got {storage}. Profile again."
                )

    @property
    def saved_bytes(self) -> int:
        """Return the most bytes of saved storages at a time, if all are kept."""
        change = [0] * (len(self.seconds) + 1)
        for storage in self.storages:
            change[storage.saved] += storage.nbytes
            change[storage.end + 1] -= storage.nbytes
        most = now = 0
        for difference in change:
            now += difference
            most = max(most, now)
        return most

    def table(self) -> str:
        """Return a table of the memory of every layer."""
        columns = ["layer", "kind", "parameters", "gradients", "optimizer state", "feature maps"]
        columns += ["feature map gradients", "workspace", "backward needs", "after"]
        rows = []
        for layer in self.layers:
            sizes = [layer.parameters, layer.gradients, layer.optimizer_state]
            sizes += [layer.feature_maps, layer.feature_map_gradients, layer.workspace]
            shown = [format_bytes(size) if size else "-" for size in sizes]
            needs, after = ", ".join(layer.needs), ", ".join(layer.after)
            rows.append([layer.name, layer.kind, *shown, needs or "-", after or "-"])
        title = (
            f"One step: {format_seconds(sum(self.seconds))}, {len(self.storages)} saved storages, "
            f"at most {format_bytes(self.saved_bytes)} at a time"
        )
        return render(title, columns, rows)

    def to_json(self) -> str:
        """Return the profile as JSON text."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> StepProfile:
        """Return the profile in JSON text that `to_json` wrote.

        Raises:
            ConfigError: If the text is not a valid profile.
        """
        try:
            return from_json(text, StepProfile)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"step profile must be JSON that StepProfile.to_json wrote, got an error: {error}. "
                "Write the profile with `to_json` again."
            ) from error
