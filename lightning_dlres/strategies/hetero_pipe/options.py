"""The options of the pipeline strategy, checked before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal

from lightning_dlres.core.checks import function, instance, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.units import parse_bytes, parse_seconds
from lightning_dlres.pipeline.plan.plan import PipelinePlan, arrange
from lightning_dlres.pipeline.plan.planner import PlanConstraints
from lightning_dlres.pipeline.plan.schedules.registry import (
    AUTO,
    initial_schedule,
    schedule_names,
)
from lightning_dlres.pipeline.profile.config import ProfileConfig
from lightning_dlres.strategies.hetero_pipe.step.user_step import SplitBatch

Replicas = tuple[tuple[int, ...], ...]
Recompute = Literal["auto", "never", "always"]
RECOMPUTE = ("auto", "never", "always")
_LONGEST_TIMEOUT = 100 * 86400.0  # in seconds; torch counts them in nanoseconds in 64 bits
MemoryLimit = int | str | Sequence[int | str] | None


class PipeOptions:
    """The arguments of `HeteroPipeStrategy`; see there.

    Raises:
        ConfigError: an argument is of no use; the message says what was expected.
    """

    def __init__(
        self,
        stages: int | Literal["auto"],
        microbatches: int | Literal["auto"],
        schedule: str,
        module: str | None,
        device_map: Sequence[Sequence[int]] | None,
        plan: PipelinePlan | str | Path | None,
        split_batch: SplitBatch | None,
        emulate_speed: Sequence[float] | None,
        memory_limit: MemoryLimit,
        recompute: Recompute,
        profile: ProfileConfig | None,
        timeout: float | str | timedelta,
    ) -> None:
        self.stages = _count("stages", stages)
        self.microbatches = _count("microbatches", microbatches)
        if not isinstance(schedule, str) or schedule not in (AUTO, *schedule_names()):
            names = f"'auto' or one of {schedule_names()}"
            raise ConfigError(got_expected("schedule", schedule, names, "schedule='auto'"))
        self.schedule = schedule
        if module is not None:
            instance("module", module, (str,), "the name of a module", "module=None")
        self.module = module
        self.device_map = _replicas(device_map)
        if plan is not None:
            kinds = (PipelinePlan, str, Path)
            instance("plan", plan, kinds, "a PipelinePlan or the path of one", "plan=None")
        self.plan = PipelinePlan.load(plan) if isinstance(plan, (str, Path)) else plan
        function("split_batch", split_batch)
        self.split_batch = split_batch
        self.emulate_speed = _speeds(emulate_speed)
        self._memory_limit = _limits(memory_limit)
        if recompute not in RECOMPUTE:
            expected = f"one of {', '.join(map(repr, RECOMPUTE))}"
            raise ConfigError(got_expected("recompute", recompute, expected, "recompute='auto'"))
        self.recompute = recompute
        if profile is not None:
            instance("profile", profile, (ProfileConfig,), "a ProfileConfig", "ProfileConfig()")
        self.profile = profile or ProfileConfig()
        self.timeout = parse_seconds(timeout, "timeout")
        if not 0 < self.timeout <= _LONGEST_TIMEOUT:
            rule = "a time above 0 and up to 100 days"
            raise ConfigError(got_expected("timeout", timeout, rule, "timeout='10min'"))

    def cuts_nothing(self, world_size: int) -> bool:
        """Return whether steps are those of plain training: one device, and no wish for more."""
        wishes = (self.microbatches, self.plan, self.split_batch, self.emulate_speed)
        return (
            world_size == 1
            and self.schedule == AUTO
            and self.recompute != "always"
            and all(wish is None for wish in wishes)
        )

    def replicas(self, world_size: int) -> Replicas:
        """Return the ranks of every replica, in stage order.

        Raises:
            ConfigError: they do not fit the number of ranks.
        """
        replicas = self._replicas(world_size)
        if sum(len(replica) for replica in replicas) != world_size:
            raise ConfigError(
                f"plan must place each of the {world_size} ranks, got replicas "
                f"{[list(m) for m in replicas]}. Plan again, or change devices."
            )
        return replicas

    def rank_names(self, world_size: int) -> list[str]:
        """Return what each rank is called in messages."""
        replicas = self.replicas(world_size)
        placed = PipelinePlan(replicas=replicas, split=(1,) * len(replicas[0]))
        return [placed.rank_name(rank) for rank in range(world_size)]

    def slowdown(self, rank: int, world_size: int) -> float:
        """Return by which factor a rank's computations are stretched.

        Raises:
            ConfigError: emulated speeds were given, but not one for every rank.
        """
        if self.emulate_speed is None:
            return 1.0
        if len(self.emulate_speed) != world_size:
            raise ConfigError(
                f"emulate_speed must have one entry per rank ({world_size}), got "
                f"{len(self.emulate_speed)}. Use emulate_speed={[1.0] * world_size}."
            )
        return 1.0 / self.emulate_speed[rank]

    def memory_limit(self, rank: int, world_size: int) -> int | None:
        """Return the bytes that the model may take on a rank's device; None: as many as are found.

        Raises:
            ConfigError: limits were given, but not one for every rank.
        """
        limits = self._memory_limit
        if isinstance(limits, tuple):
            if len(limits) != world_size:
                raise ConfigError(
                    f"memory_limit must be one size, or one per rank ({world_size}), got "
                    f"{len(limits)} sizes. Use memory_limit={limits[0]} for all ranks."
                )
            return limits[rank]
        return limits

    @property
    def wishes(self) -> PlanConstraints:
        """What is fixed of the plan."""
        schedule = initial_schedule(self.schedule)
        return PlanConstraints(self.stages, self.fixed_replicas, schedule, self.recompute)

    @property
    def fixed_replicas(self) -> Replicas | None:
        """The ranks of every replica in stage order, where the user fixed them."""
        return self.plan.replicas if self.plan is not None else self.device_map

    def _replicas(self, world_size: int) -> Replicas:
        if self.plan is not None:
            return self.plan.replicas
        if self.device_map is None:
            return arrange(world_size, self.stages or world_size)
        ranks = sorted(rank for replica in self.device_map for rank in replica)
        lengths = {len(replica) for replica in self.device_map}
        if ranks != list(range(world_size)) or len(lengths) != 1:
            raise ConfigError(
                f"device_map must name each rank from 0 to {world_size - 1} once, in "
                f"replicas of equal length, got {[list(m) for m in self.device_map]}. Use "
                f"device_map={[list(range(world_size))]}."
            )
        return self.device_map


def _replicas(device_map: object) -> Replicas | None:
    if device_map is None:
        return None
    rows = device_map if isinstance(device_map, (list, tuple)) else ()
    replicas = tuple(tuple(row) if isinstance(row, (list, tuple)) else () for row in rows)
    ranks = [rank for replica in replicas for rank in replica]
    whole = all(type(rank) is int for rank in ranks) and sorted(ranks) == list(range(len(ranks)))
    if not ranks or not whole or len({len(replica) for replica in replicas}) != 1:
        rule = "lists of equal length with each rank, from 0 on, once"
        raise ConfigError(got_expected("device_map", device_map, rule, "[[0, 1]] for two devices"))
    return replicas


def _count(name: str, value: object) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        expected = "a positive integer or 'auto'"
        raise ConfigError(got_expected(name, value, expected, f"{name}='auto'"))
    return value


def _limits(given: MemoryLimit) -> int | tuple[int, ...] | None:
    if given is None:
        return None
    limits = given if isinstance(given, (list, tuple)) else [given]
    found = tuple(_limit(limit) for limit in limits)
    if not found:
        rule = "a size, or one for each rank"
        raise ConfigError(got_expected("memory_limit", given, rule, "memory_limit='8GiB'"))
    return found if isinstance(given, (list, tuple)) else found[0]


def _limit(given: object) -> int:
    instance("memory_limit", given, (int, str), "a number of bytes", "memory_limit='8GiB'")
    found = parse_bytes(given, "memory_limit")  # type: ignore[arg-type]
    return whole_number("memory_limit", found, "memory_limit='8GiB'")


def _speeds(speeds: Sequence[float] | None) -> tuple[float, ...] | None:
    if speeds is None:
        return None
    numbers = speeds if isinstance(speeds, (list, tuple)) else ()
    if not numbers or any(
        isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed <= 1
        for speed in numbers
    ):
        expected = "numbers above 0 and up to 1, one per rank"
        raise ConfigError(got_expected("emulate_speed", speeds, expected, "[1.0, 0.5]"))
    return tuple(float(speed) for speed in speeds)
