"""Options of the pipeline strategy, checked at construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

import msgspec

from lightning_dlres.codecs.gradient import gradient_codec_names
from lightning_dlres.core.checks import function, instance, one_of, timeout_seconds, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.units import parse_bytes
from lightning_dlres.pipeline.plan.plan import PipelinePlan, consecutive_replicas
from lightning_dlres.pipeline.plan.planner import PlanConstraints
from lightning_dlres.pipeline.plan.schedules.registry import (
    AUTO,
    initial_schedule,
    schedule_names,
)
from lightning_dlres.pipeline.plan.search.grouping import stage_counts
from lightning_dlres.pipeline.profile.config import ProfileConfig
from lightning_dlres.strategies.hetero_pipe.evaluation.whole_model import Evaluation
from lightning_dlres.strategies.hetero_pipe.step.step_context import SplitBatch

Replicas = tuple[tuple[int, ...], ...]
Recompute = Literal["auto", "never", "always"]
MemoryLimit = int | str | Sequence[int | str] | None
RECOMPUTE = ("auto", "never", "always")
GPU_TRANSFERS = ("host", "nccl")
_DEFAULT_MICROBATCHES_PER_DEVICE = 4


@dataclass(frozen=True, kw_only=True)
class PipeOptions:
    """Arguments of `HeteroPipeStrategy`, whose docstring explains them.

    Attributes:
        stages: Number of stages of a replica, or "auto".
        microbatches: Number of micro-batches of a batch, or "auto".
        schedule: Name of a registered schedule, or "auto".
        module: Name of the module to cut into stages, or "training_step" for a step that calls
            several; None chooses the only candidate, and else the step.
        device_map: Ranks of every replica in stage order; None for the planner's choice.
        plan: Plan to use, or the path of its JSON file; None makes a plan before training.
        split_batch: Function that cuts a batch; None cuts along the first dimension.
        emulate_speed: Relative speed of every rank, above 0 and up to 1; None for real devices.
        memory_limit: Bytes for the model on a device, one size or one per rank; None derives the
            limit from the free memory.
        recompute: "auto", "never" or "always".
        gradient_codec: Name of the codec of gradients between replicas; None for none.
        gpu_transfers: "host" or "nccl": the way of messages between GPUs.
        deferred_init: True for a model that no rank builds whole.
        save_distributed_checkpoint: True for checkpoints that no rank holds whole.
        profile: Options of the profile.
        timeout: Time that a rank waits for another: seconds, text such as "10min", or a timedelta.
        given_plan: The option `plan`, loaded.

    Raises:
        ConfigError: If an option has a wrong value.
    """

    stages: int | Literal["auto"] = "auto"
    microbatches: int | Literal["auto"] = "auto"
    schedule: str = AUTO
    module: str | None = None
    device_map: Sequence[Sequence[int]] | None = None
    plan: PipelinePlan | str | Path | None = None
    split_batch: SplitBatch | None = None
    emulate_speed: Sequence[float] | None = None
    memory_limit: MemoryLimit = None
    recompute: Recompute = "auto"
    gradient_codec: str | None = None
    gpu_transfers: Literal["host", "nccl"] = "host"
    evaluation: Evaluation = "auto"
    deferred_init: bool = False
    save_distributed_checkpoint: bool = False
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    timeout: float | str | timedelta = "10min"
    given_plan: PipelinePlan | None = field(init=False)

    def __post_init__(self) -> None:
        _count("stages", self.stages)
        _count("microbatches", self.microbatches)
        if not isinstance(self.schedule, str) or self.schedule not in (AUTO, *schedule_names()):
            rule = f"'auto' or one of {schedule_names()}"
            raise ConfigError(got_expected("schedule", self.schedule, rule, "schedule='auto'"))
        if self.module is not None:
            instance("module", self.module, (str,), "the name of a module", "module='net'")
        # Tuples replace the user's lists, which may change later.
        object.__setattr__(self, "device_map", _replicas(self.device_map))
        if self.plan is not None:
            kinds = (PipelinePlan, str, Path)
            rule = "a PipelinePlan or the path of one"
            instance("plan", self.plan, kinds, rule, "plan='plan.json'")
        loads = isinstance(self.plan, (str, Path))
        object.__setattr__(self, "given_plan", PipelinePlan.load(self.plan) if loads else self.plan)  # type: ignore[arg-type]
        replicas, stages = self.fixed_replicas, self.fixed_stages
        if replicas is not None and stages not in (None, len(replicas[0])):
            source = "device_map" if self.given_plan is None else "plan"
            rule = f"{len(replicas[0])}, the number of stages of {source}"
            raise ConfigError(got_expected("stages", stages, rule, "stages='auto'"))
        if self._device_map not in (None, replicas):
            rule = f"{[list(replica) for replica in replicas or ()]}, the replicas of plan"
            got = [list(replica) for replica in self._device_map or ()]
            raise ConfigError(got_expected("device_map", got, rule, "device_map=None"))
        function("split_batch", self.split_batch)
        object.__setattr__(self, "emulate_speed", _speeds(self.emulate_speed))
        object.__setattr__(self, "memory_limit", _limits(self.memory_limit))
        if self.recompute not in RECOMPUTE:
            rule = f"one of {', '.join(map(repr, RECOMPUTE))}"
            raise ConfigError(got_expected("recompute", self.recompute, rule, "recompute='auto'"))
        if self.gradient_codec is not None and self.gradient_codec not in gradient_codec_names():
            rule = f"None or one of {gradient_codec_names()}"
            fix = "gradient_codec='int8'"
            raise ConfigError(got_expected("gradient_codec", self.gradient_codec, rule, fix))
        one_of("gpu_transfers", self.gpu_transfers, GPU_TRANSFERS, "gpu_transfers='host'")
        one_of("evaluation", self.evaluation, get_args(Evaluation), "evaluation='auto'")
        for name in ("deferred_init", "save_distributed_checkpoint"):
            instance(name, getattr(self, name), (bool,), "True or False", f"{name}=True")
        instance(
            "profile", self.profile, (ProfileConfig,), "a ProfileConfig", "profile=ProfileConfig()"
        )
        timeout_seconds(self.timeout)

    @property
    def fixed_stages(self) -> int | None:
        """Number of stages of a replica; None if the planner chooses it."""
        return _count("stages", self.stages)

    @property
    def fixed_microbatches(self) -> int | None:
        """Number of micro-batches of a batch; None if the default applies."""
        return _count("microbatches", self.microbatches)

    @property
    def timeout_seconds(self) -> float:
        """Seconds that a rank waits for another."""
        return timeout_seconds(self.timeout)

    def num_microbatches(self, devices: int, planned: int | None = None) -> int:
        """Return the number of micro-batches of a batch.

        Args:
            devices: Number of devices, on which the default depends.
            planned: Number in the plan; None or 0 if there is none. The option overrides it.
        """
        return self.fixed_microbatches or planned or _DEFAULT_MICROBATCHES_PER_DEVICE * devices

    def is_plain_training(self, world_size: int) -> bool:
        """Return True if steps need no pipeline: one device, and no option that asks for a pipeline
        on it."""
        needs_pipeline = (
            self.fixed_microbatches,
            self.given_plan,
            self.split_batch,
            self.emulate_speed,
        )
        return (
            world_size == 1
            and self.schedule == AUTO
            and self.recompute != "always"
            and all(option is None for option in needs_pipeline)
        )

    def least_stages(self, world_size: int) -> int:
        """Return the least number of stages that a plan may have on this number of ranks."""
        if self.fixed_replicas is not None:
            return len(self.fixed_replicas[0])
        return self.fixed_stages or stage_counts(world_size)[0]

    def replicas(self, world_size: int) -> Replicas:
        """Return the ranks of every replica, in stage order.

        Raises:
            ConfigError: If the plan, `device_map` or `stages` does not fit the number of ranks.
        """
        replicas = self._replicas(world_size)
        if sum(len(replica) for replica in replicas) != world_size:
            raise ConfigError(
                f"plan must place each of the {world_size} ranks, got replicas "
                f"{[list(replica) for replica in replicas]}. Use plan=None to plan again."
            )
        return replicas

    def rank_names(self, world_size: int) -> list[str]:
        """Return the name of each rank in messages."""
        replicas = self.replicas(world_size)
        placed = PipelinePlan(replicas=replicas, split=(1,) * len(replicas[0]))
        return [placed.rank_name(rank) for rank in range(world_size)]

    def slowdown(self, rank: int, world_size: int) -> float:
        """Return the factor by which the computations of a rank are stretched.

        Raises:
            ConfigError: If `emulate_speed` does not have one entry per rank.
        """
        if self.emulate_speed is None:
            return 1.0
        if len(self.emulate_speed) != world_size:
            raise ConfigError(
                f"emulate_speed must have one entry per rank ({world_size}), got "
                f"{len(self.emulate_speed)}. Use emulate_speed={[1.0] * world_size}."
            )
        return 1.0 / self.emulate_speed[rank]

    def memory_limit_of(self, rank: int, world_size: int) -> int | None:
        """Return the bytes that the model may take on a rank's device; None if only the free memory
        limits it.

        Raises:
            ConfigError: If `memory_limit` is a list and does not have one entry per rank.
        """
        limits = _limits(self.memory_limit)
        if isinstance(limits, tuple):
            if len(limits) != world_size:
                raise ConfigError(
                    f"memory_limit must be one size, or one per rank ({world_size}), got "
                    f"{len(limits)} sizes. Use memory_limit={limits[0]} for all ranks."
                )
            return limits[rank]
        return limits

    @property
    def plan_constraints(self) -> PlanConstraints:
        """The options that constrain the plan."""
        schedule = initial_schedule(self.schedule)
        return PlanConstraints(self.fixed_stages, self.fixed_replicas, schedule, self.recompute)

    @property
    def first_schedule(self) -> str:
        """Name of the schedule with which a run begins."""
        if self.schedule == AUTO and self.given_plan is not None:
            return self.given_plan.schedule
        return initial_schedule(self.schedule).name

    @property
    def adjusted_plan(self) -> PipelinePlan | None:
        """The user's plan with the schedule and the micro-batches that the options fix; None if the
        user gave no plan."""
        if self.given_plan is None:
            return None
        count = self.fixed_microbatches or self.given_plan.microbatches
        return msgspec.structs.replace(
            self.given_plan, schedule=self.first_schedule, microbatches=count
        )

    @property
    def fixed_replicas(self) -> Replicas | None:
        """Ranks of every replica in stage order; None if the planner chooses them."""
        return self.given_plan.replicas if self.given_plan is not None else self._device_map

    @property
    def _device_map(self) -> Replicas | None:
        return _replicas(self.device_map)

    def _replicas(self, world_size: int) -> Replicas:
        if self.given_plan is not None:
            return self.given_plan.replicas
        device_map = self._device_map
        if device_map is None:
            return consecutive_replicas(world_size, self.fixed_stages or world_size)
        ranks = sorted(rank for replica in device_map for rank in replica)
        lengths = {len(replica) for replica in device_map}
        if ranks != list(range(world_size)) or len(lengths) != 1:
            raise ConfigError(
                f"device_map must name each rank from 0 to {world_size - 1} once, in "
                f"replicas of equal length, got {[list(replica) for replica in device_map]}. Use "
                f"device_map={[list(range(world_size))]}."
            )
        return device_map


def _replicas(device_map: object) -> Replicas | None:
    """Return the checked option `device_map` as tuples; None for None."""
    if device_map is None:
        return None
    rows = device_map if isinstance(device_map, (list, tuple)) else ()
    replicas = tuple(tuple(row) if isinstance(row, (list, tuple)) else () for row in rows)
    ranks = [rank for replica in replicas for rank in replica]
    are_ranks = all(type(r) is int for r in ranks) and sorted(ranks) == list(range(len(ranks)))
    if not ranks or not are_ranks or len({len(replica) for replica in replicas}) != 1:
        rule = "lists of equal length with each rank, from 0 on, once"
        raise ConfigError(
            got_expected("device_map", device_map, rule, "device_map=[[0, 1]] for two devices")
        )
    return replicas


def _count(name: str, value: object) -> int | None:
    """Return the checked number; None for "auto"."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        expected = "a positive integer or 'auto'"
        raise ConfigError(got_expected(name, value, expected, f"{name}='auto'"))
    return value


def _limits(memory_limit: MemoryLimit) -> int | tuple[int, ...] | None:
    """Return the checked limit in bytes: one, or one per rank; None for None."""
    if memory_limit is None:
        return None
    if not isinstance(memory_limit, (list, tuple)):
        return _limit(memory_limit)
    if not memory_limit:
        rule = "a size, or one for each rank"
        raise ConfigError(got_expected("memory_limit", memory_limit, rule, "memory_limit='8GiB'"))
    return tuple(_limit(limit) for limit in memory_limit)


def _limit(limit: object) -> int:
    instance("memory_limit", limit, (int, str), "a number of bytes", "memory_limit='8GiB'")
    size = parse_bytes(limit, "memory_limit")  # type: ignore[arg-type]
    return whole_number("memory_limit", size, "memory_limit='8GiB'")


def _speeds(speeds: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return the checked option `emulate_speed` as a tuple; None for None."""
    if speeds is None:
        return None
    numbers = speeds if isinstance(speeds, (list, tuple)) else ()
    if not numbers or any(
        isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed <= 1
        for speed in numbers
    ):
        expected = "numbers above 0 and up to 1, one per rank"
        raise ConfigError(
            got_expected("emulate_speed", speeds, expected, "emulate_speed=[1.0, 0.5]")
        )
    return tuple(float(speed) for speed in speeds)
