"""Simulator of a plan's step: the times of each stage's computations and transfers, and its peak
memory.

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
    """One simulated step.

    Attributes:
        activities: All activities, in the order of their starts.
        step_seconds: Seconds from the first start to the last end.
        busy_seconds: Seconds that each stage computes, for every replica.
        peak_bytes: Largest number of bytes that each stage holds.
    """

    activities: tuple[Activity, ...]
    step_seconds: float
    busy_seconds: tuple[tuple[float, ...], ...]
    peak_bytes: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of the step in which a stage does not compute, as a mean over stages."""
        stages = [busy for replica in self.busy_seconds for busy in replica]
        return 1.0 - sum(stages) / (len(stages) * self.step_seconds) if self.step_seconds else 0.0

    def in_flight(self, replica: int, stage: int) -> list[tuple[float, int]]:
        """Return the number of micro-batches in flight on a stage over time.

        Returns:
            One (seconds, number) per change: the number from this time on.
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
    last_computed: dict[tuple[int, int], float] = {}
    busy = dict.fromkeys(costs, 0.0)
    for event, start, end in zip(events, starts, ends, strict=True):
        place = event.replica, event.stage
        if event.work in COMPUTING:
            last_computed[place] = max(last_computed.get(place, 0.0), end)
            busy[place] += end - start
    for place, end in last_computed.items():
        # The rest of the gradient synchronisation, after the last backward.
        tail = workload.sync_tail(*place, layer_ranges(split)[place[1]])
        if tail:
            activities.append(Activity("sync", *place, ALL_MICROBATCHES, end, end + tail))
    return Timeline(
        activities=tuple(sorted(activities, key=lambda a: a.start)),
        step_seconds=max(end + costs[place].tail for place, end in last_computed.items()),
        busy_seconds=tuple(
            tuple(busy[m, s] for s in range(workload.stages)) for m in range(len(workload.replicas))
        ),
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
    """Return the starts and the ends of all events. An event starts when its predecessors end."""
    starts: list[float] = []
    ends: list[float] = []
    for event in events:
        start = max([ends[index] for index in event.after], default=0.0)
        starts.append(start)
        ends.append(start + costs[event.replica, event.stage].seconds[event.work])
    return starts, ends
