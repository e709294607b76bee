"""Measured steps of all ranks: their figures, and the messages between the ranks.

The spans must be on one clock; everything here is a pure function of them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lightning_dlres.core.trace import Span
from lightning_dlres.gradsync.report.rank_steps import (
    COMPUTE_TASKS,
    TASKS,
    Interval,
    RankStep,
    compression_ratio,
    covered_seconds,
    rank_steps,
)

# Number of first steps that the figures leave out: connections are made in them, and
# DistributedDataParallel sorts its buckets.
WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A message on its way, from the start of its sending until its receiver has it.

    Attributes:
        source: Sending rank.
        destination: Receiving rank.
        start_ns: Start of the sending.
        end_ns: End of the receiving, on the common clock.
    """

    source: int
    destination: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class SyncStep:
    """One step on all ranks.

    Attributes:
        ranks: The step by rank.
        deliveries: Messages between the ranks.
        interval: Seconds since the end of the step before; None for the first one.
    """

    ranks: Mapping[int, RankStep]
    deliveries: tuple[Delivery, ...]
    interval: float | None

    @property
    def number(self) -> int:
        """Number of the step."""
        return next(iter(self.ranks.values())).step

    @property
    def start_ns(self) -> int:
        """Start of the first rank's backward."""
        return min(step.start_ns for step in self.ranks.values())

    @property
    def backward_and_sync_seconds(self) -> float:
        """Time of backward and of the synchronisation after it, on the slowest rank."""
        return max(step.end_ns - step.start_ns for step in self.ranks.values()) / 1e9

    def compute_seconds(self, rank: int) -> float:
        """Return the time of a rank's compute tasks."""
        return sum(self.ranks[rank].task_seconds(name) for name in COMPUTE_TASKS)

    @cached_property
    def link_seconds(self) -> Mapping[int, float]:
        """Time by rank in which a message was on its way in the busier direction of its link."""
        sent: dict[int, list[Interval]] = defaultdict(list)
        received: dict[int, list[Interval]] = defaultdict(list)
        for delivery in self.deliveries:
            interval = delivery.start_ns, delivery.end_ns
            sent[delivery.source].append(interval)
            received[delivery.destination].append(interval)
        return {
            rank: max(covered_seconds(sent[rank]), covered_seconds(received[rank]))
            for rank in self.ranks
        }


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """Figures of one rank: medians over the counted steps.

    Attributes:
        rank: The rank.
        sent_bytes: Bytes of sent payloads.
        received_bytes: Bytes of received payloads.
        ratio: Bytes of sent gradients without compression over `sent_bytes`; None if none was sent.
        task_seconds: Time of the tasks of each kind.
        link_seconds: Time in which a message was on its way, in the link's busier direction.
        exposed_seconds: Time that a step waited for synchronisation after its backward.
        exposed_compute_seconds: Part of it in which the rank's own compute tasks ran.
        residual_norm: Norm of the residuals relative to that of the gradient, as last measured;
            None if it was not.
    """

    rank: int
    sent_bytes: int
    received_bytes: int
    ratio: float | None
    task_seconds: Mapping[str, float]
    link_seconds: float
    exposed_seconds: float
    exposed_compute_seconds: float
    residual_norm: float | None


@dataclass(frozen=True)
class SyncMeasurement:
    """The measured steps of a run.

    Attributes:
        steps: Steps from which the figures are computed, in order.
        includes_warm_up: True if a warm-up step counts, because there are no others.
    """

    steps: tuple[SyncStep, ...]
    includes_warm_up: bool

    @property
    def has_tasks(self) -> bool:
        """True if any task was recorded; torch's all-reduce has none."""
        return any(step.tasks for s in self.steps for step in s.ranks.values())

    @property
    def step_seconds(self) -> float | None:
        """Median time between the ends of two steps; None if there is only one step."""
        intervals = [step.interval for step in self.steps if step.interval is not None]
        return statistics.median(intervals) if intervals else None

    @property
    def backward_and_sync_seconds(self) -> float:
        """Median time of backward and synchronisation on the slowest rank."""
        return statistics.median(step.backward_and_sync_seconds for step in self.steps)

    @property
    def compute_seconds(self) -> float:
        """Median time of the compute tasks on the busiest rank."""
        return statistics.median(max(map(s.compute_seconds, s.ranks)) for s in self.steps)

    @property
    def link_seconds(self) -> float:
        """Median time in which the busiest direction of a link had a message."""
        return statistics.median(max(s.link_seconds.values()) for s in self.steps)

    @cached_property
    def ranks(self) -> tuple[RankFigures, ...]:
        """Figures by rank."""
        return tuple(self._figures(rank) for rank in self.steps[0].ranks)

    @property
    def typical(self) -> SyncStep:
        """Step whose backward and synchronisation are closest to the median."""
        median = self.backward_and_sync_seconds
        return min(self.steps, key=lambda step: abs(step.backward_and_sync_seconds - median))

    def _figures(self, rank: int) -> RankFigures:
        steps = [step.ranks[rank] for step in self.steps]
        return RankFigures(
            rank=rank,
            sent_bytes=round(statistics.median(s.sent_bytes for s in steps)),
            received_bytes=round(statistics.median(s.received_bytes for s in steps)),
            ratio=compression_ratio(steps),
            task_seconds={
                name: statistics.median(s.task_seconds(name) for s in steps) for name in TASKS
            },
            link_seconds=statistics.median(s.link_seconds[rank] for s in self.steps),
            exposed_seconds=statistics.median(s.exposed_seconds for s in steps),
            exposed_compute_seconds=statistics.median(s.exposed_compute_seconds for s in steps),
            residual_norm=steps[-1].residual_norm,
        )


def measure_sync(
    spans: Mapping[int, Sequence[Span]], *, warm_up: int = WARM_UP_STEPS
) -> SyncMeasurement | None:
    """Return the measurement of a run, or None if no step was recorded on all ranks.

    Args:
        spans: Spans by rank, on one clock.
        warm_up: Number of first steps that do not count, if there are others. Count at least one if
            older spans were dropped: spans of the first step may be missing.
    """
    by_rank = {
        rank: {step.step: step for step in rank_steps(own)} for rank, own in sorted(spans.items())
    }
    if not by_rank:
        return None
    numbers = sorted(set.intersection(*(set(steps) for steps in by_rank.values())))
    if not numbers:
        return None
    steps = [{rank: own[number] for rank, own in by_rank.items()} for number in numbers]
    first = next(iter(by_rank))
    intervals: list[float | None] = [None]
    for before, after in pairwise(steps):
        follows = after[first].step == before[first].step + 1
        interval = (after[first].end_ns - before[first].end_ns) / 1e9
        intervals.append(interval if follows else None)
    measured = [
        SyncStep(ranks=ranks, deliveries=tuple(_deliveries(ranks)), interval=interval)
        for ranks, interval in zip(steps, intervals, strict=True)
    ]
    counted = measured[warm_up:]
    return SyncMeasurement(tuple(counted or measured), includes_warm_up=not counted)


def _deliveries(ranks: Mapping[int, RankStep]) -> Iterator[Delivery]:
    """Yield the messages of a step; those between two ranks arrive in the order of their sends."""
    receives: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for rank, step in ranks.items():
        for span in step.tasks:
            if span.name == "receive":
                receives[int(str(span.args.get("peer"))), rank].append(span)
    # Number of messages of each link that have been paired.
    paired: dict[tuple[int, int], int] = defaultdict(int)
    for rank, step in ranks.items():
        for span in step.tasks:
            if span.name != "send":
                continue
            link = rank, int(str(span.args.get("peer")))
            arrivals, index = receives[link], paired[link]
            paired[link] += 1
            end_ns = span.end_ns
            if index < len(arrivals):
                end_ns = max(end_ns, arrivals[index].end_ns)
            yield Delivery(source=rank, destination=link[1], start_ns=span.start_ns, end_ns=end_ns)
