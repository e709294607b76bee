"""The plan of a pipeline: which rank is which stage of which VM, and which layers each stage holds.

A plan is plain data: it prints as a table, round-trips through JSON, and can be edited and given
    back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes


class LayerProfile(msgspec.Struct, frozen=True):
    """What is known of one layer: its name, its parameter bytes, and the seconds of one forward and
    backward of the profiled samples on a device of power 1 (0 where it was not measured)."""

    name: str
    parameter_bytes: int = 0
    seconds: float = 0.0


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A split of `layers` over stages, on `machines`.

    Attributes:
        machines: one tuple of ranks per virtual machine, in stage order.
        split: number of consecutive layers of each stage.
        layers: the profile of every layer, in order.
        powers: measured compute power of each rank, the fastest is 1.0; empty where it was not
            measured.
    """

    machines: tuple[tuple[int, ...], ...]
    split: tuple[int, ...]
    layers: tuple[LayerProfile, ...] = ()
    powers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        ranks = sorted(rank for machine in self.machines for rank in machine)
        if not self.machines or any(len(machine) != len(self.split) for machine in self.machines):
            raise ConfigError(
                f"plan: got {len(self.split)} stages in split {list(self.split)} and virtual "
                f"machines {[list(m) for m in self.machines]}, expected one rank per stage in "
                "every virtual machine."
            )
        if ranks != list(range(len(ranks))):
            raise ConfigError(
                f"plan: got ranks {ranks} in machines, expected each of 0 to {len(ranks) - 1} once."
            )
        if not self.split or min(self.split) < 1:
            raise ConfigError(
                f"plan: got split {list(self.split)}, expected at least one layer in every stage."
            )
        if self.layers and sum(self.split) != len(self.layers):
            raise ConfigError(
                f"plan: got split {list(self.split)} for {sum(self.split)} layers, but the model "
                f"has {len(self.layers)}."
            )

        if self.powers and (len(self.powers) != len(ranks) or min(self.powers) <= 0):
            raise ConfigError(
                f"plan: got powers {list(self.powers)}, expected a positive one for each of the "
                f"{len(ranks)} ranks, or none."
            )

    @property
    def stages(self) -> int:
        """Number of stages of every virtual machine."""
        return len(self.split)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.machines) * len(self.split)

    def place(self, rank: int) -> tuple[int, int]:
        """Return (virtual machine, stage) of a rank."""
        for machine, ranks in enumerate(self.machines):
            if rank in ranks:
                return machine, ranks.index(rank)
        raise ConfigError(
            f"plan: rank {rank} is in none of the virtual machines "
            f"{[list(m) for m in self.machines]}."
        )

    def layers_of(self, stage: int) -> range:
        """Return the indices of the layers of a stage."""
        first = sum(self.split[:stage])
        return range(first, first + self.split[stage])

    def stage_of(self, layer: int) -> int:
        """Return the stage that holds a layer."""
        return next(stage for stage in range(self.stages) if layer in self.layers_of(stage))

    def stage_seconds(self, split: Sequence[int] | None = None) -> list[float]:
        """Return the seconds that each stage computes for the profiled samples, under this
        or another split."""
        counts, seconds, first = split or self.split, [], 0
        for stage, count in enumerate(counts):
            power = (
                min((self.powers[machine[stage]] for machine in self.machines), default=1.0)
                if self.powers
                else 1.0
            )
            seconds.append(
                sum(layer.seconds for layer in self.layers[first : first + count]) / power
            )
            first += count
        return seconds

    def rank_name(self, rank: int) -> str:
        """Return what a rank is called in messages."""
        machine, stage = self.place(rank)
        return (
            f"stage {stage} of VM {machine} (rank {rank})"
            if len(self.machines) > 1
            else f"stage {stage} (rank {rank})"
        )

    def table(self) -> str:
        """Return the plan as a table to print."""
        rows = []
        seconds = self.stage_seconds() if self.layers else []
        for stage, layers in enumerate(self.layers_of(s) for s in range(self.stages)):
            profiles = self.layers[layers.start : layers.stop]
            ranks = [machine[stage] for machine in self.machines]
            power = ", ".join(f"{self.powers[rank]:.2f}" for rank in ranks) if self.powers else "-"
            ends = dict.fromkeys(profile.name for profile in (*profiles[:1], *profiles[-1:]))
            names = " .. ".join(ends) or "-"
            size = (
                format_bytes(sum(layer.parameter_bytes for layer in profiles)) if profiles else "-"
            )
            busy = f"{seconds[stage] * 1e3:.1f} ms" if seconds and seconds[stage] else "-"
            rows.append(
                [str(stage), ", ".join(map(str, ranks)), power, str(len(layers)), names, size, busy]
            )
        columns = [
            "stage",
            "rank",
            "power",
            "layers",
            "names",
            "parameters",
            "profiled time",
        ]
        return render("Pipeline plan", columns, rows)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    @staticmethod
    def from_json(text: str | bytes) -> PipelinePlan:
        """Read a plan from JSON text.

        Raises:
            ConfigError: not JSON, or not a plan.
        """
        try:
            return msgspec.json.decode(text, type=PipelinePlan)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"plan: cannot be read: {error}. Expected the JSON that PipelinePlan.to_json "
                "writes."
            ) from None

    @staticmethod
    def load(path: str | Path) -> PipelinePlan:
        """Read a plan from a file."""
        try:
            return PipelinePlan.from_json(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(
                f"plan: cannot read {str(path)!r}: {error.strerror}. Expected the path of a "
                "plan.json."
            ) from error


def arrange(world_size: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return virtual machines of `stages` consecutive ranks each.

    Raises:
        ConfigError: the ranks do not divide into machines of this many stages.
    """
    if stages < 1 or world_size % stages:
        divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
        raise ConfigError(
            f"stages: got {stages} for {world_size} ranks, expected a divisor. Try one of "
            f"{divisors}."
        )
    return tuple(tuple(range(first, first + stages)) for first in range(0, world_size, stages))


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Return the split that ignores cost and speed: layer counts that differ by at most one."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
