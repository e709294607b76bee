"""Plan of a pipeline: the rank of each stage of each replica, and the layers of each stage.

A plan is plain data. It prints as a table, round-trips through JSON, and can be edited by hand and
used again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from lightning_dlres.core.checks import instance, whole_number
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.events import COMPUTING, Work
from lightning_dlres.pipeline.plan.schedules.registry import schedule_named
from lightning_dlres.pipeline.profile.cluster import Cluster
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, StepCosts


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A split of `layers` over stages, on `replicas`, with the profile that it was made from.

    Attributes:
        replicas: One tuple of ranks per replica, in stage order.
        split: Number of consecutive layers of each stage.
        recompute: Indices of the layers that are recomputed. Such a layer saves only its inputs,
            and runs its forward again before its backward.
        schedule: Name of the schedule that the plan was made for.
        microbatches: Number of micro-batches of a batch; 0 if nothing was measured.
        extra_in_flight: Number of micro-batches that each stage but the last keeps in flight in
            addition to those that fill the pipeline; see `Schedule.actions`.
        layers: Profile of every layer, in order.
        step: Costs of a step besides the layers.
        cluster: The devices; None if they were not measured.
        predicted_seconds: Simulated seconds of a step with this plan; None if nothing was measured.
        even_seconds: Simulated seconds of a step with an even split, the ranks in order and no
            recomputation; None if nothing was measured.

    Raises:
        ConfigError: If a field is of the wrong type, or the fields contradict each other.
    """

    replicas: tuple[tuple[int, ...], ...]
    split: tuple[int, ...]
    recompute: tuple[int, ...] = ()
    schedule: str = "1f1b"
    microbatches: int = 0
    extra_in_flight: int = 0
    layers: tuple[LayerProfile, ...] = ()
    step: StepCosts = StepCosts()
    cluster: Cluster | None = None
    predicted_seconds: float | None = None
    even_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("replicas", "split", "recompute", "layers"):
            instance(name, getattr(self, name), (tuple, list), "a tuple", f"{name}=()")
        for replica in self.replicas:
            instance("replicas", replica, (tuple, list), "tuples of ranks", "replicas=((0, 1),)")
            for rank in replica:
                whole_number("replicas", rank, "replicas=((0, 1),)", least=0)
        for num_layers in self.split:
            whole_number("split", num_layers, "split=(1, 1)", least=0)
        for index in self.recompute:
            whole_number("recompute", index, "recompute=()", least=0)
        schedule_named(self.schedule)
        whole_number("microbatches", self.microbatches, "microbatches=0", least=0)
        whole_number("extra_in_flight", self.extra_in_flight, "extra_in_flight=0", least=0)
        ranks = sorted(rank for replica in self.replicas for rank in replica)
        if not self.split or min(self.split) < 1:
            raise ConfigError(
                f"split must be at least one layer for every stage, got {list(self.split)}. Use "
                "fewer stages."
            )
        if not self.replicas or any(len(replica) != len(self.split) for replica in self.replicas):
            raise ConfigError(
                f"replicas must be lists with a rank for each stage of split ({len(self.split)}), "
                f"got {[list(r) for r in self.replicas]}. Use replicas=((0, 1),) for two stages."
            )
        if ranks != list(range(len(ranks))):
            raise ConfigError(
                f"replicas must be lists of the ranks 0 to {len(ranks) - 1}, each once, got "
                f"{ranks}. Number the ranks from 0."
            )
        if self.layers and sum(self.split) != len(self.layers):
            raise ConfigError(
                f"split must add up to the {len(self.layers)} layers of the plan, got "
                f"{list(self.split)}. Move layers from one stage to another."
            )
        recomputed = sorted(set(self.recompute))
        if recomputed and not 0 <= recomputed[0] <= recomputed[-1] < sum(self.split):
            raise ConfigError(
                f"recompute must contain indices of layers from 0 to {sum(self.split) - 1}, got "
                f"{list(self.recompute)}. Use recompute: []."
            )
        if self.cluster is not None and len(self.cluster.devices) != len(ranks):
            raise ConfigError(
                f"cluster must have one device for each rank ({len(ranks)}), got "
                f"{len(self.cluster.devices)}. Use cluster: null."
            )

    @property
    def stages(self) -> int:
        """Number of stages of every replica."""
        return len(self.split)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.replicas) * len(self.split)

    def position(self, rank: int) -> tuple[int, int]:
        """Return (replica, stage) of a rank.

        Raises:
            ConfigError: If the plan has no such rank.
        """
        for replica, ranks in enumerate(self.replicas):
            if rank in ranks:
                return replica, ranks.index(rank)
        raise ConfigError(
            f"rank must be in one of the replicas {[list(r) for r in self.replicas]}, got {rank}. "
            f"Start {self.world_size} ranks, as the plan requires."
        )

    def layers_of(self, stage: int) -> range:
        """Return the indices of the layers of a stage."""
        first = sum(self.split[:stage])
        return range(first, first + self.split[stage])

    def stage_of(self, layer: int) -> int:
        """Return the stage that holds a layer."""
        return next(stage for stage in range(self.stages) if layer in self.layers_of(stage))

    @property
    def powers(self) -> tuple[float, ...]:
        """Compute power of each rank relative to the fastest; empty if not measured."""
        return tuple(d.power for d in self.cluster.devices) if self.cluster is not None else ()

    @property
    def is_measured(self) -> bool:
        """True if the plan has measured layer times, so that the simulator can run it."""
        return self.cluster is not None and self.microbatches > 0 and bool(self.layers)

    def workload(self) -> Workload:
        """Return the plan's workload, for the simulator and the planner.

        Raises:
            ConfigError: If nothing was measured.
        """
        if self.cluster is None or not self.is_measured:
            raise ConfigError(
                "plan must have measured times to be simulated, got a plan without them. Use the "
                "plan of a profiled run."
            )
        return Workload(
            self.layers,
            self.step,
            self.cluster,
            self.replicas,
            schedule_named(self.schedule),
            self.microbatches,
            extra_in_flight=self.extra_in_flight,
        )

    def rank_name(self, rank: int) -> str:
        """Return the name of a rank in messages.

        Raises:
            ConfigError: If the plan has no such rank.
        """
        replica, stage = self.position(rank)
        return (
            f"stage {stage} of replica {replica} (rank {rank})"
            if len(self.replicas) > 1
            else f"stage {stage} (rank {rank})"
        )

    def table(self) -> str:
        """Return the plan as a table for printing."""
        rows = []
        workload = self.workload() if self.is_measured else None
        for stage in range(self.stages):
            layers = self.layers_of(stage)
            profiles = self.layers[layers.start : layers.stop]
            ranks = [replica[stage] for replica in self.replicas]
            power = ", ".join(f"{self.powers[rank]:.2f}" for rank in ranks) if self.powers else "-"
            # Names of the first and the last layer. The dict keeps one if both are the same layer.
            end_names = dict.fromkeys(profile.name for profile in (*profiles[:1], *profiles[-1:]))
            recomputed = sum(index in layers for index in set(self.recompute))
            # A parameter that several layers of the stage share counts once.
            shared_bytes = {
                name: nbytes for layer in profiles for name, nbytes in layer.shared.items()
            }
            parameters = sum(layer.parameter_bytes for layer in profiles) + sum(
                shared_bytes.values()
            )
            in_flight = peak = busy = "-"
            if workload is not None:
                in_flight = str(workload.in_flight(stage))
                peak = format_bytes(workload.peak_bytes(stage, layers, self.recompute))
                busy = f"{self.busy_seconds(stage) * 1e3:.1f} ms"
            rows.append(
                [
                    str(stage),
                    ", ".join(map(str, ranks)),
                    power,
                    str(len(layers)),
                    " .. ".join(end_names) or "-",
                    str(recomputed),
                    in_flight,
                    format_bytes(parameters) if profiles else "-",
                    peak,
                    busy,
                ]
            )
        columns = [
            "stage",
            "rank",
            "power",
            "layers",
            "names",
            "recomputed",
            "in flight",
            "parameters",
            "peak memory",
            "busy per step",
        ]
        return render("Pipeline plan", columns, rows)

    def busy_seconds(self, stage: int) -> float:
        """Return the compute seconds of a stage per step, in the replica where it takes longest.

        Raises:
            ConfigError: If nothing was measured.
        """
        workload = self.workload()
        seconds_by_replica = []
        for replica, num_microbatches in enumerate(workload.shares):
            cost = workload.stage_cost(replica, stage, self.layers_of(stage), self.recompute)
            losses = workload.schedule.losses(num_microbatches)
            seconds_by_replica.append(
                sum(
                    seconds * (losses if work is Work.LOSS else num_microbatches)
                    for work, seconds in cost.seconds.items()
                    if work in COMPUTING
                )
            )
        return max(seconds_by_replica)

    def prediction(self) -> str:
        """Return one line with the predicted step time, or with the reason why there is none."""
        if self.predicted_seconds is None:
            return "The time of a step was not predicted, since nothing was measured."
        line = f"Predicted step: {self.predicted_seconds * 1e3:.1f} ms"
        if self.even_seconds:
            ratio = self.even_seconds / self.predicted_seconds
            line += f"; an even split takes {self.even_seconds * 1e3:.1f} ms ({ratio:.2f} times)"
        return f"{line}."

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    @staticmethod
    def from_json(text: str | bytes) -> PipelinePlan:
        """Read a plan from JSON text.

        Raises:
            ConfigError: If the text is not the JSON of a plan.
        """
        try:
            return from_json(text, PipelinePlan)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"plan must be JSON that PipelinePlan.to_json wrote, got invalid text: {error}. "
                "Plan again."
            ) from None

    @staticmethod
    def load(path: str | Path) -> PipelinePlan:
        """Read a plan from a file.

        Raises:
            ConfigError: If the file cannot be read, or is not the JSON of a plan.
        """
        try:
            return PipelinePlan.from_json(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(
                f"plan must be the path of a plan.json, got {str(path)!r} ({error.strerror}). "
                "Write one with `dlres plan`."
            ) from error


def consecutive_replicas(world_size: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return replicas of `stages` consecutive ranks each.

    Raises:
        ConfigError: If the ranks do not divide into replicas of this many stages.
    """
    if stages < 1 or world_size % stages:
        divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
        raise ConfigError(
            f"stages must divide the number of ranks ({world_size}), got {stages}. Use one of "
            f"{divisors}."
        )
    return tuple(tuple(range(first, first + stages)) for first in range(0, world_size, stages))


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Return the split with equal numbers of layers; stages differ by at most one layer."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
