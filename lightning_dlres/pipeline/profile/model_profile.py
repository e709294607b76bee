"""What is known of a model and of the devices that shall train it (Method E, E1, E5): plain data,
from which everything is planned and simulated.

All sizes and times are those of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from lightning_dlres.core.checks import finite, instance, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected

_LAYER_SIZES = (
    "parameter_bytes",
    "gradient_bytes",
    "input_bytes",
    "output_bytes",
    "gradient_output_bytes",
    "saved_bytes",
    "workspace_bytes",
    "update_bytes",
)


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, under one micro-batch.

    Attributes:
        name: as in the state dict.
        parameter_bytes: parameters that no other layer uses.
        gradient_bytes: those of them that are trained.
        shared: parameters that other layers use, too: bytes by name.
        input_bytes: tensors that enter.
        output_bytes: tensors that leave: what crosses a cut below this layer.
        gradient_output_bytes: gradients that come back over that cut.
        saved_bytes: what the layer keeps for its backward beside its inputs and outputs.
        workspace_bytes: what forward or backward needs for a moment beyond what is kept.
        update_bytes: what an optimizer that takes one parameter after the other needs for a moment.
        forward, backward: seconds on each kind of device; empty where they were not measured.
    """

    name: str
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    shared: dict[str, int] = msgspec.field(default_factory=dict)
    input_bytes: int = 0
    output_bytes: int = 0
    gradient_output_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    update_bytes: int = 0
    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        instance("name", self.name, (str,), "the name of a layer", "name='layer'")
        for size in _LAYER_SIZES:
            whole_number(size, getattr(self, size), f"{size}=0", least=0)

    @property
    def all_parameter_bytes(self) -> int:
        """Bytes of every parameter that the layer uses."""
        return self.parameter_bytes + sum(self.shared.values())


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a step does beside the layers.

    Attributes:
        loss: seconds of the loss of one micro-batch, forward and backward, on each kind.
        loss_bytes: what the loss of one micro-batch needs for a moment, with a copy of the output.
        message: seconds that one message takes from a stage's computing, on each kind.
        run_overhead_seconds: extra seconds, forward and backward, of a layer that is a run of its
            own, on each kind. Layers' own times are those within a longer run.
        update: seconds that the optimizer takes for every byte of a gradient, on each kind.
        state_bytes_per_parameter_byte: size of the optimizer's state.
        update_bytes_per_byte: what an optimizer that takes all parameters at once needs for a
            moment, for every byte of a gradient.
        gradient_copies: 2 where the gradients of the step before are still held while those of a
            step are computed (accumulation over batches), else 1.
    """

    loss: tuple[float, ...] = ()
    loss_bytes: int = 0
    message: tuple[float, ...] = ()
    run_overhead_seconds: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    state_bytes_per_parameter_byte: float = 0.0
    update_bytes_per_byte: float = 0.0
    gradient_copies: int = 1


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's device.

    Attributes:
        kind: index of its kind: devices of one kind take the same time for every layer.
        power: compute power; the fastest device has 1.0.
        host: name of its host; links inside and between hosts differ.
        memory_limit: bytes that the model may take there; None: no limit.
    """

    kind: int = 0
    power: float = 1.0
    host: str = ""
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        whole_number("kind", self.kind, "kind=0", least=0)
        finite("power", self.power, "power=1.0", above=True)
        instance("host", self.host, (str,), "a name", "host=''")
        if self.memory_limit is not None:
            whole_number("memory_limit", self.memory_limit, "memory_limit=None", least=0)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A way between two ranks: seconds before the first byte, and bytes a second after it."""

    ranks: tuple[int, int]
    latency: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        pair = self.ranks if isinstance(self.ranks, (list, tuple)) else ()
        if len(pair) != 2 or any(type(rank) is not int or rank < 0 for rank in pair):
            raise ConfigError(got_expected("ranks", self.ranks, "two ranks", "ranks=(0, 1)"))
        finite("latency", self.latency, "latency=0.0")
        # A perfect link is infinitely fast.
        if self.bytes_per_second != float("inf"):
            finite("bytes_per_second", self.bytes_per_second, "bytes_per_second=1e9", above=True)


_PERFECT = Link(ranks=(0, 0), latency=0.0, bytes_per_second=float("inf"))


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The devices and what joins them.

    Attributes:
        kinds: name of each kind of device.
        devices: one per rank.
        links: measured ways. A pair that is not in the list is like a measured pair of the same two
            hosts, else like one of the same nature (within a host, between hosts), else perfect.
    """

    kinds: tuple[str, ...]
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        for rank, device in enumerate(self.devices):
            if device.kind >= len(self.kinds):
                raise ConfigError(
                    f"devices must be of one of the {len(self.kinds)} kinds, got kind "
                    f"{device.kind} for rank {rank}. Name that kind in kinds."
                )
        for link in self.links:
            if max(link.ranks) >= len(self.devices):
                raise ConfigError(
                    f"links must be between ranks below {len(self.devices)}, got {link.ranks}. "
                    "Add the device, or remove the link."
                )

    def link(self, a: int, b: int) -> Link:
        """Return the way between two ranks."""

        def hosts(ranks: Sequence[int]) -> list[str]:
            return sorted(self.devices[rank].host for rank in ranks)

        def inside(ranks: Sequence[int]) -> bool:
            return len(set(hosts(ranks))) == 1

        wanted = (a, b)
        same_ranks = (x for x in self.links if sorted(x.ranks) == sorted(wanted))
        same_hosts = (x for x in self.links if hosts(x.ranks) == hosts(wanted))
        same_nature = (x for x in self.links if inside(x.ranks) == inside(wanted))
        return next(chain(same_ranks, same_hosts, same_nature), _PERFECT)

    def transfer_seconds(self, a: int, b: int, nbytes: int) -> float:
        """Return the seconds that a message takes from one rank to another."""
        link = self.link(a, b)
        return link.latency + nbytes / link.bytes_per_second
