"""Plan of gradient synchronisation: the units of all gradients, their codecs and their owners.

A plan is plain data. It prints as a table, and round-trips through JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.checks import one_of, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.tables import render
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.gradsync.plan.graph import TOPOLOGIES
from lightning_dlres.gradsync.plan.transmissions import MESSAGE_BYTES
from lightning_dlres.gradsync.plan.units import (
    GradientSpec,
    SyncUnit,
    assign_owners,
    cut,
    partitions_for,
)

RAW = "raw"


class SyncPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plan of gradient synchronisation, the same on all ranks.

    Attributes:
        world_size: Number of ranks.
        topology: "ps" (parameter server) or "ring".
        units: All units, by index.
        hosts: Ranks of each host, if the first rank of a host synchronises for the others; empty
            if each rank synchronises by itself.
        message_bytes: Size in bytes at which a message takes no more payloads.

    Raises:
        ConfigError: If the fields contradict each other.
    """

    world_size: int
    topology: str
    units: tuple[SyncUnit, ...]
    hosts: tuple[tuple[int, ...], ...] = ()
    message_bytes: int = MESSAGE_BYTES

    def __post_init__(self) -> None:
        whole_number("world_size", self.world_size, "world_size=2")
        whole_number("message_bytes", self.message_bytes, f"message_bytes={MESSAGE_BYTES}")
        one_of("topology", self.topology, TOPOLOGIES, "topology='ps'")
        indices = [unit.index for unit in self.units]
        if indices != list(range(len(indices))):
            raise ConfigError(
                f"units must be numbered from 0 in their order, got {indices}. Use make_plan."
            )
        self._check_hosts()
        for unit in self.units:
            if not 0 <= unit.owner < self.world_size:
                raise ConfigError(
                    got_expected("owner", unit.owner, f"in [0, {self.world_size})", "rank 0")
                )
            if not 0 <= unit.start <= unit.stop:
                raise ConfigError(
                    f"units must be ranges of elements, got {unit.start} to {unit.stop} of "
                    f"{unit.gradient!r}. Use make_plan."
                )

    def _check_hosts(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        is_sorted = all(host and list(host) == sorted(host) for host in self.hosts)
        if self.hosts and not (is_sorted and ranks == list(range(self.world_size))):
            rule = f"sorted and have each of the {self.world_size} ranks once"
            raise ConfigError(f"hosts must be {rule}, got {self.hosts}. Use ranks_by_host.")
        leaders = {host[0] for host in self.hosts}
        wrong = {unit.owner for unit in self.units} - leaders
        if self.hosts and wrong:
            rule = f"one of the first ranks of the hosts {sorted(leaders)}"
            raise ConfigError(got_expected("owner", min(wrong), rule, f"rank {min(leaders)}"))

    def units_of(self, gradient: str) -> list[SyncUnit]:
        """Return the units of a gradient, in the order of its elements."""
        return [unit for unit in self.units if unit.gradient == gradient]

    def gradient_counts(self) -> dict[str, int]:
        """Return the number of elements of each gradient, by name."""
        counts: dict[str, int] = {}
        for unit in self.units:
            counts[unit.gradient] = max(counts.get(unit.gradient, 0), unit.stop)
        return counts

    def table(self) -> str:
        """Return the plan as a table for printing: a row for each rank and codec."""
        groups: dict[tuple[int, str], list[SyncUnit]] = {}
        for unit in self.units:
            groups.setdefault((unit.owner, unit.codec), []).append(unit)
        total = sum(unit.count for unit in self.units)
        rows: list[list[object]] = []
        for owner, codec in sorted(groups):
            units = groups[owner, codec]
            elements = sum(unit.count for unit in units)
            share = 100 * elements / total if total else 0.0
            gradients = len({unit.gradient for unit in units})
            rows.append([owner, codec, gradients, len(units), elements, share])
        columns = ["owner", "codec", "gradients", "units", "elements", "% of all"]
        title = f"Gradient synchronisation plan: {self.topology}, {self.world_size} ranks"
        if self.hosts:
            title += f" on {len(self.hosts)} hosts"
        return render(title, columns, rows)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    @staticmethod
    def from_json(text: str | bytes) -> SyncPlan:
        """Return the plan in JSON text that `to_json` wrote.

        Raises:
            ConfigError: If the text is not the JSON of a plan.
        """
        try:
            return from_json(text, SyncPlan)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"plan must be JSON that SyncPlan.to_json wrote, got invalid text: {error}. Write "
                "the plan again."
            ) from None


@dataclass(frozen=True, kw_only=True)
class CodecChoice:
    """Codec and partitions of one gradient.

    Attributes:
        codec: Name of the codec; "raw" sends the elements as they are.
        partitions: Number of partitions.
    """

    codec: str
    partitions: int


def choices_by_size(
    gradients: Sequence[GradientSpec],
    codec: GradientCodec | None,
    *,
    least_elements: int,
    world_size: int,
) -> list[CodecChoice]:
    """Return choices that compress every gradient of at least `least_elements` elements.

    Args:
        gradients: The gradients.
        codec: Codec of the large gradients; None sends all gradients as they are.
        least_elements: Elements of the smallest gradient that is compressed.
        world_size: Number of ranks, which share the merging of large gradients.
    """
    total = sum(gradient.count for gradient in gradients)
    choices = []
    for gradient in gradients:
        used = codec if gradient.is_compressed(least_elements) else None
        is_divisible = used is None or used.is_divisible
        partitions = partitions_for(gradient.count, total, world_size) if is_divisible else 1
        choices.append(CodecChoice(codec=RAW if used is None else used.name, partitions=partitions))
    return choices


def make_plan(
    gradients: Sequence[GradientSpec],
    choices: Sequence[CodecChoice],
    *,
    world_size: int,
    topology: str,
    alignment: int,
    shares: Sequence[float] | None = None,
    message_bytes: int = MESSAGE_BYTES,
) -> SyncPlan:
    """Return the plan for a choice per gradient.

    Args:
        gradients: The gradients, in the order of the model.
        choices: Codec and partitions of each gradient.
        world_size: Number of ranks.
        topology: "ps" or "ring".
        alignment: Number of elements; each partition begins at a multiple of it.
        shares: Share of the merging work of each rank; None: equal shares.
        message_bytes: Size in bytes at which a message takes no more payloads.
    """
    pieces = [
        (gradient.name, start, stop, choice.codec)
        for gradient, choice in zip(gradients, choices, strict=True)
        for start, stop in cut(gradient.count, choice.partitions, alignment)
    ]
    sizes = [stop - start for _, start, stop, _ in pieces]
    owners = assign_owners(sizes, shares or [1.0] * world_size)
    units = tuple(
        SyncUnit(index=index, gradient=name, start=start, stop=stop, codec=codec, owner=owner)
        for index, ((name, start, stop, codec), owner) in enumerate(
            zip(pieces, owners, strict=True)
        )
    )
    return SyncPlan(
        world_size=world_size, topology=topology, units=units, message_bytes=message_bytes
    )
