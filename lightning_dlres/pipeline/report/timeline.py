"""What a step really took (Method E, E6): the spans of all ranks as the timeline that the simulator
predicts, so that planned and measured fit into one table and one picture.

A pure function of the spans, which must be on one clock.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dlres.core.trace import Span
from lightning_dlres.pipeline.plan.cost_model.simulator import Activity, Timeline
from lightning_dlres.pipeline.plan.schedules.base import ALL_MICROBATCHES

WARM_UP_STEPS = 2
COMPUTING = ("forward", "loss", "recompute", "backward")
TRANSFERS = ("activation", "gradient")
# A message's key as the mailbox writes it: micro-batch, and the number of the pass.
_KEY = re.compile(r"\((\d+), (\d+)\)")


@dataclass(frozen=True)
class MeasuredStep:
    """One training step on all ranks.

    Attributes:
        batch: its number, as in the spans.
        timeline: seconds from the earliest start of the step on any rank. The length of the step is
            the interval; where there is none, it ends when the last rank has left it. What a stage
            holds is not measured: `peak_bytes` is empty.
        interval: seconds until the next step starts; None where another step does not follow at
            once: after the last one, and where an evaluation comes between.
        checked: whether the loss was checked in this step, for which the layers run forward twice;
            the timeline holds the second time.
        whole_loss: whether the loss was computed once over the whole batch, as under GPipe.
    """

    batch: int
    timeline: Timeline
    interval: float | None
    checked: bool
    whole_loss: bool

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of all replicas together."""
        found = {(a.replica, a.microbatch) for a in self.timeline.activities if a.name == "forward"}
        return len(found)


@dataclass(frozen=True)
class Measurement:
    """The steps that were measured, and the figures that stand for them.

    Attributes:
        steps: all of them.
        counted: those that the figures are about: after the warm-up, with an interval, without a
            check of the loss, as far as there are such steps.
        includes_warm_up: whether there are too few steps to leave the first ones out.
    """

    steps: tuple[MeasuredStep, ...]
    counted: tuple[MeasuredStep, ...]
    includes_warm_up: bool

    @property
    def is_steady(self) -> bool:
        """Whether steps follow each other: else their time lacks what lies between them."""
        return all(step.interval is not None for step in self.counted)

    @property
    def step_seconds(self) -> float:
        """The median time of a step, from its start to that of the next."""
        return statistics.median(step.timeline.step_seconds for step in self.counted)

    @property
    def pipeline_seconds(self) -> float:
        """The median time from a step's first computation to its last computation or sync."""
        return statistics.median(pipeline_seconds(step.timeline) for step in self.counted)

    @property
    def busy_seconds(self) -> tuple[tuple[float, ...], ...]:
        """For every replica, the median time that each stage computes in a step."""
        of_steps = [step.timeline.busy_seconds for step in self.counted]
        return tuple(
            tuple(
                statistics.median(busy[replica][stage] for busy in of_steps)
                for stage in range(len(of_steps[0][replica]))
            )
            for replica in range(len(of_steps[0]))
        )

    @property
    def bubble(self) -> float:
        """Share of the step in which a stage does not compute; mean over stages."""
        stages = [busy for replica in self.busy_seconds for busy in replica]
        return 1.0 - sum(stages) / (len(stages) * self.step_seconds) if self.step_seconds else 0.0

    @property
    def typical(self) -> MeasuredStep:
        """The step whose time is closest to the median."""
        median = self.step_seconds
        return min(self.counted, key=lambda step: abs(step.timeline.step_seconds - median))


def measure(
    replicas: Sequence[Sequence[int]],
    spans: Mapping[int, Sequence[Span]],
    warm_up: int = WARM_UP_STEPS,
) -> Measurement | None:
    """Return what the spans say of the steps; None where no step is there as a whole.

    Args:
        replicas: ranks of every replica, in stage order.
        spans: those of every rank, by rank, on one clock.
        warm_up: how many steps at the beginning shall not count. All count where there are no
            others.
    """
    steps = measured_steps(replicas, spans)
    if not steps:
        return None
    # The schedule may have changed on the way; the last one counts.
    alike = [step for step in steps if step.whole_loss == steps[-1].whole_loss]
    first = {step.batch for step in steps[:warm_up]}
    warm = [step for step in alike if step.batch not in first]
    choices = (
        [s for s in warm if s.interval is not None and not s.checked],
        [s for s in warm if s.interval is not None],
        [s for s in alike if s.interval is not None],
        warm,
        alike,
    )
    counted = next(choice for choice in choices if choice)
    return Measurement(steps, tuple(counted), any(step.batch in first for step in counted))


def measured_steps(
    replicas: Sequence[Sequence[int]], spans: Mapping[int, Sequence[Span]]
) -> tuple[MeasuredStep, ...]:
    """Return the steps that every rank has recorded, in order."""
    ranks = {
        rank: _Rank(replica, stage, spans.get(rank, ()))
        for replica, members in enumerate(replicas)
        for stage, rank in enumerate(members)
    }
    everywhere = set[int].intersection(*(set(rank.steps) for rank in ranks.values()))
    batches = sorted(everywhere)
    starts = [min(rank.steps[batch].start_ns for rank in ranks.values()) for batch in batches]
    moves = _transfers(ranks)
    found = []
    for index, batch in enumerate(batches):
        follows = index + 1 < len(batches) and batches[index + 1] == batch + 1
        if follows and not any(rank.evaluates_after(batch) for rank in ranks.values()):
            interval = (starts[index + 1] - starts[index]) / 1e9
        else:
            interval = None
        found.append(_step(batch, starts[index], interval, replicas, ranks, moves))
    return tuple(found)


def pipeline_seconds(timeline: Timeline) -> float:
    """Return the seconds from the first computation of a step to its last computation or sync."""
    work = [a for a in timeline.activities if a.name in COMPUTING]
    ends = [a for a in timeline.activities if a.name in COMPUTING or a.name == "sync"]
    return max(a.end for a in ends) - min(a.start for a in work) if work else 0.0


class _Rank:
    """The spans of one rank, sorted by step."""

    def __init__(self, replica: int, stage: int, spans: Sequence[Span]) -> None:
        self.replica, self.stage = replica, stage
        whole = [s for s in spans if s.category == "step" and "error" not in s.args]
        self.steps = {int(str(s.args["batch"])): s for s in whole if "batch" in s.args}
        self._batches = sorted(self.steps, key=lambda batch: self.steps[batch].start_ns)
        self._starts = [self.steps[batch].start_ns for batch in self._batches]
        self.computed: dict[int, dict[tuple[str, int], Span]] = {}
        self.synced: dict[int, list[Span]] = {}
        self.checked: set[int] = set()
        self._evaluated: set[int] = set()
        self.sent: dict[tuple[str, int], list[Span]] = {}
        self.received: dict[tuple[str, int], list[Span]] = {}
        for span in sorted(spans, key=lambda s: s.start_ns):
            self._sort_in(span)

    def evaluates_after(self, batch: int) -> bool:
        """Whether layers ran between this step and the next: for an evaluation."""
        return batch in self._evaluated

    def step_at(self, time_ns: int) -> int | None:
        """Return the step during which something happened on this rank."""
        batch = self._last_before(time_ns)
        return batch if batch is not None and time_ns <= self.steps[batch].end_ns else None

    def _last_before(self, time_ns: int) -> int | None:
        index = bisect_right(self._starts, time_ns) - 1
        return self._batches[index] if index >= 0 else None

    def _sort_in(self, span: Span) -> None:
        if span.category == "compute" and span.name in COMPUTING:
            self._compute(span)
        elif span.category == "sync":
            batch = self.step_at(span.start_ns)
            if batch is not None:
                self.synced.setdefault(batch, []).append(span)
        elif span.category == "transfer":
            verb, _, what = span.name.partition(" ")
            if what in TRANSFERS and "peer" in span.args:
                lists = self.sent if verb == "send" else self.received
                lists.setdefault((what, int(str(span.args["peer"]))), []).append(span)

    def _compute(self, span: Span) -> None:
        batch = self.step_at(span.start_ns)
        if batch is None:
            before = self._last_before(span.start_ns)
            if before is not None:
                self._evaluated.add(before)
            return
        work = self.computed.setdefault(batch, {})
        key = span.name, int(str(span.args.get("microbatch", ALL_MICROBATCHES)))
        if key in work:
            self.checked.add(batch)
        work[key] = span


@dataclass(frozen=True)
class _Move:
    """A message under way."""

    what: str
    replica: int
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int


def _transfers(ranks: Mapping[int, _Rank]) -> dict[int, list[_Move]]:
    """Return the messages of every step.

    A sender's thread may still be busy with a step when its rank has begun the next one, so time
    does not tell to which step a message belongs. Its key does: it holds the number of the pass,
    which all ranks share, and a stage's activations leave while it is still in the step.
    """
    found: dict[int, list[_Move]] = {}
    batch_of = _passes(ranks)
    for source, sender in ranks.items():
        for (what, peer), sends in sender.sent.items():
            arrivals = ranks[peer].received.get((what, source), []) if peer in ranks else []
            # Messages of one kind keep their order, and all have arrived by the end; the oldest may
            # be missing on either side. A sender is done when the message is in its buffers, so the
            # receiver knows the end.
            pairs = dict(zip(map(id, reversed(sends)), reversed(arrivals), strict=False))
            for send in sends:
                key = _KEY.fullmatch(str(send.args.get("key")))
                if key is None or int(key[2]) not in batch_of:
                    continue
                arrival = pairs.get(id(send), send)
                end = max(send.end_ns, arrival.end_ns)
                move = _Move(what, sender.replica, sender.stage, int(key[1]), send.start_ns, end)
                found.setdefault(batch_of[int(key[2])], []).append(move)
    return found


def _passes(ranks: Mapping[int, _Rank]) -> dict[int, int]:
    """Return the step of every pass through the pipeline; of several in a step (the loss was
    checked), the last one counts."""
    last: dict[int, int] = {}
    for rank in ranks.values():
        for (what, _), sends in rank.sent.items():
            for send in sends if what == "activation" else []:
                batch, key = rank.step_at(send.start_ns), _KEY.fullmatch(str(send.args.get("key")))
                if batch is not None and key is not None:
                    last[batch] = max(last.get(batch, 0), int(key[2]))
    return {number: batch for batch, number in last.items()}


def _step(
    batch: int,
    start_ns: int,
    interval: float | None,
    replicas: Sequence[Sequence[int]],
    ranks: Mapping[int, _Rank],
    moves: Mapping[int, Sequence[_Move]],
) -> MeasuredStep:
    # The spans count micro-batches over all replicas; the simulator counts those of each replica.
    shares: list[set[int]] = [set() for _ in replicas]
    for rank in ranks.values():
        shares[rank.replica] |= {m for _, m in rank.computed.get(batch, {})}
    local = [
        {m: index for index, m in enumerate(sorted(share - {ALL_MICROBATCHES}))} for share in shares
    ]

    def activity(name: str, replica: int, stage: int, m: int, start: int, end: int) -> Activity:
        own = local[replica].get(m, ALL_MICROBATCHES)
        seconds = (start - start_ns) / 1e9, (end - start_ns) / 1e9
        return Activity(name, replica, stage, own, *seconds)

    activities = [
        activity(m.what, m.replica, m.stage, m.microbatch, m.start_ns, m.end_ns)
        for m in moves.get(batch, ())
    ]
    for rank in ranks.values():
        place = rank.replica, rank.stage
        activities += [
            activity(name, *place, m, span.start_ns, span.end_ns)
            for (name, m), span in rank.computed.get(batch, {}).items()
        ]
        activities += [
            activity("sync", *place, ALL_MICROBATCHES, span.start_ns, span.end_ns)
            for span in rank.synced.get(batch, [])
        ]
    last_end = max(rank.steps[batch].end_ns for rank in ranks.values())
    busy = [[0.0] * len(members) for members in replicas]
    for a in activities:
        if a.name in COMPUTING:
            busy[a.replica][a.stage] += a.end - a.start
    return MeasuredStep(
        batch,
        Timeline(
            activities=tuple(sorted(activities, key=lambda a: a.start)),
            step_seconds=interval if interval is not None else (last_end - start_ns) / 1e9,
            busy_seconds=tuple(tuple(replica) for replica in busy),
            peak_bytes=(),
        ),
        interval,
        any(batch in rank.checked for rank in ranks.values()),
        any(("loss", ALL_MICROBATCHES) in rank.computed.get(batch, {}) for rank in ranks.values()),
    )
