"""Simulator of a plan's step: the times of each stage's computations and transfers, and the stage's
peak memory.

The simulator is a pure function of the plan's profile. It follows the runtime's action lists.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_dlres.pipeline.plan.cost_model.costs import StageCost, Workload, layer_ranges
from lightning_dlres.pipeline.plan.cost_model.events import COMPUTING, ScheduleEvent, event_graph
from lightning_dlres.pipeline.plan.schedules.base import ALL_MICROBATCHES


@dataclass(frozen=True)
class Activity:
    """Activity of a stage from `start` to `end`, in seconds since the start of the step.

    Attributes:
        name: "forward", "loss", "recompute", "backward", "activation", "gradient" or "sync".
        replica: Replica of the stage.
        stage: Index of the stage.
        microbatch: Index among the replica's micro-batches; -1 for all of them.
        start: Start of the activity.
        end: End of the activity.
    """

    name: str
    replica: int
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step, simulated here or measured by `report.timeline`.

    Attributes:
        activities: All activities, in the order of their starts.
        step_seconds: Seconds of the step. In a simulated step, every stage has then ended its
            computations, its gradient synchronisation and its optimizer's step.
        busy_seconds: Seconds that each stage computes, one tuple per replica.
        peak_bytes: Largest number of bytes that each stage holds at a time; empty if not known.
    """

    activities: tuple[Activity, ...]
    step_seconds: float
    busy_seconds: tuple[tuple[float, ...], ...]
    peak_bytes: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of the step in which a stage does not compute: the mean over all stages."""
        stages = [busy for replica in self.busy_seconds for busy in replica]
        return 1.0 - sum(stages) / (len(stages) * self.step_seconds) if self.step_seconds else 0.0

    def in_flight(self, replica: int, stage: int) -> list[tuple[float, int]]:
        """Return the number of micro-batches in flight on a stage over time.

        Returns:
            One (seconds, number) for each change: the time, and the number from then on.
        """
        changes = {"forward": 1, "backward": -1}
        times = sorted(
            (a.start if a.name == "forward" else a.end, changes[a.name])
            for a in self.activities
            if (a.replica, a.stage) == (replica, stage) and a.name in changes
        )
        count, counts = 0, []
        for seconds, change in times:
            count += change
            counts.append((seconds, count))
        return counts


def simulate(workload: Workload, split: Sequence[int], recompute: Collection[int] = ()) -> Timeline:
    """Return the timeline of one step.

    Args:
        workload: The model on its devices.
        split: Number of consecutive layers of each stage.
        recompute: Indices of the layers that are recomputed before their backward.
    """
    costs = stage_costs(workload, split, recompute)
    events = event_graph(
        workload.schedule, workload.stages, workload.shares, workload.extra_in_flight
    )
    starts, ends = run_events(events, costs)
    activities = [
        Activity(e.work.name.lower(), e.replica, e.stage, e.microbatch, start, end)
        for e, start, end in zip(events, starts, ends, strict=True)
        if end > start
    ]
    # End of the last computation of a stage, in seconds, by (replica, stage).
    last_end: dict[tuple[int, int], float] = {}
    busy = dict.fromkeys(costs, 0.0)
    for event, start, end in zip(events, starts, ends, strict=True):
        key = event.replica, event.stage
        if event.work in COMPUTING:
            last_end[key] = max(last_end.get(key, 0.0), end)
            busy[key] += end - start
    for (replica, stage), end in last_end.items():
        # The part of the gradient synchronisation that comes after the last backward.
        tail = workload.sync_tail(replica, stage, layer_ranges(split)[stage])
        if tail:
            activities.append(Activity("sync", replica, stage, ALL_MICROBATCHES, end, end + tail))
    return Timeline(
        activities=tuple(sorted(activities, key=lambda a: a.start)),
        step_seconds=max(end + costs[key].tail for key, end in last_end.items()),
        busy_seconds=tuple(
            tuple(busy[replica, stage] for stage in range(workload.stages))
            for replica in range(len(workload.replicas))
        ),
        # The peak is the same in every replica; see `Workload.peak_bytes`.
        peak_bytes=tuple(costs[0, stage].peak_bytes for stage in range(workload.stages)),
    )


def step_seconds(
    workload: Workload, split: Sequence[int], recompute: Collection[int] = ()
) -> float:
    """Return the seconds of one simulated step."""
    return simulate(workload, split, recompute).step_seconds


def stage_costs(
    workload: Workload, split: Sequence[int], recompute: Collection[int]
) -> dict[tuple[int, int], StageCost]:
    """Return the costs of every stage, by (replica, stage)."""
    return {
        (replica, stage): workload.stage_cost(replica, stage, layers, recompute)
        for replica in range(len(workload.replicas))
        for stage, layers in enumerate(layer_ranges(split))
    }


def run_events(
    events: Sequence[ScheduleEvent], costs: Mapping[tuple[int, int], StageCost]
) -> tuple[list[float], list[float]]:
    """Return the starts and the ends of all events, in seconds since the start of the step.

    An event starts when its last predecessor ends.
    """
    starts: list[float] = []
    ends: list[float] = []
    for event in events:
        start = max([ends[index] for index in event.after], default=0.0)
        starts.append(start)
        ends.append(start + costs[event.replica, event.stage].seconds[event.work])
    return starts, ends
