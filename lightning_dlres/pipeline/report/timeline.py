"""Measured steps, made from the spans of all ranks.

A measured step is a timeline like the simulator's, so that planned and measured steps have the same
tables and charts. The spans must be on one clock; everything here is a pure function of them.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_dlres.core.trace import Span
from lightning_dlres.pipeline.plan.cost_model.simulator import Activity, Timeline
from lightning_dlres.pipeline.plan.schedules.base import ALL_MICROBATCHES

# Number of first steps that the figures leave out, because caches and connections warm up in them.
WARM_UP_STEPS = 2
COMPUTING = ("forward", "loss", "recompute", "backward")
TRANSFERS = ("activation", "gradient")
# Key of a message in its span: (micro-batch, number of the pass), as `Runtime.key` makes it.
_KEY = re.compile(r"\((\d+), (\d+)\)")


@dataclass(frozen=True)
class MeasuredStep:
    """One training step on all ranks.

    Attributes:
        batch: Number of the batch, as in the spans.
        timeline: Activities, in seconds since the first rank began the step. `step_seconds` is
            `interval`; without one, the time until the last rank ends the step. `peak_bytes` is
            empty, since memory is not measured.
        interval: Seconds until the next step starts. None if no step follows directly: after the
            last one, and before an evaluation.
        checked: True if a computation ran more than once, because the loss was checked or the step
            was repeated. The timeline holds the last run with a backward pass.
        whole_loss: True if the loss was computed once over the whole batch, as under GPipe.
    """

    batch: int
    timeline: Timeline
    interval: float | None
    checked: bool
    whole_loss: bool

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of all replicas together."""
        forwards = [a for a in self.timeline.activities if a.name == "forward"]
        return len({(a.replica, a.microbatch) for a in forwards})


@dataclass(frozen=True)
class Measurement:
    """The measured steps of a run, and their figures.

    Attributes:
        steps: All steps.
        counted: Steps from which the figures are computed: those after the warm-up, with an
            interval, and without a check of the loss. If there are none, `measure` drops the last
            condition; then also the first one; then the last two; then all. All of these steps ran
            the schedule of the last step.
        includes_warm_up: True if a warm-up step counts, because there are too few others.
    """

    steps: tuple[MeasuredStep, ...]
    counted: tuple[MeasuredStep, ...]
    includes_warm_up: bool

    @property
    def is_steady(self) -> bool:
        """True if another step directly followed each counted step.

        Its time then includes the work between steps.
        """
        return all(step.interval is not None for step in self.counted)

    @property
    def step_seconds(self) -> float:
        """Median time of a step, from its start to that of the next, in seconds."""
        return statistics.median(step.timeline.step_seconds for step in self.counted)

    @property
    def pipeline_seconds(self) -> float:
        """Median seconds from a step's first computation to its last computation or sync."""
        return statistics.median(pipeline_seconds(step.timeline) for step in self.counted)

    @property
    def busy_seconds(self) -> tuple[tuple[float, ...], ...]:
        """Median seconds for which each stage of each replica computes in a step."""
        by_step = [step.timeline.busy_seconds for step in self.counted]
        return tuple(
            tuple(
                statistics.median(busy[replica][stage] for busy in by_step)
                for stage in range(len(by_step[0][replica]))
            )
            for replica in range(len(by_step[0]))
        )

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage does not compute, as the mean over all stages."""
        stages = [busy for replica in self.busy_seconds for busy in replica]
        return 1.0 - sum(stages) / (len(stages) * self.step_seconds) if self.step_seconds else 0.0

    @property
    def typical(self) -> MeasuredStep:
        """Step whose time is closest to the median."""
        median = self.step_seconds
        return min(self.counted, key=lambda step: abs(step.timeline.step_seconds - median))


def measure(
    replicas: Sequence[Sequence[int]],
    spans: Mapping[int, Sequence[Span]],
    warm_up: int = WARM_UP_STEPS,
) -> Measurement | None:
    """Return the measurement of a run, or None if no step was recorded completely.

    Args:
        replicas: Ranks of every replica, in stage order.
        spans: Spans by rank, on one clock.
        warm_up: Number of first steps that do not count, if there are others.
    """
    steps = measured_steps(replicas, spans)
    if not steps:
        return None
    # The schedule may have changed during the run; the last one counts.
    same_schedule = [step for step in steps if step.whole_loss == steps[-1].whole_loss]
    warm_up_batches = {step.batch for step in steps[:warm_up]}
    warm = [step for step in same_schedule if step.batch not in warm_up_batches]
    # The first choice with any steps is taken.
    choices = (
        [s for s in warm if s.interval is not None and not s.checked],
        [s for s in warm if s.interval is not None],
        [s for s in same_schedule if s.interval is not None],
        warm,
        same_schedule,
    )
    counted = next(choice for choice in choices if choice)
    includes_warm_up = any(step.batch in warm_up_batches for step in counted)
    return Measurement(steps, tuple(counted), includes_warm_up)


def measured_steps(
    replicas: Sequence[Sequence[int]], spans: Mapping[int, Sequence[Span]]
) -> tuple[MeasuredStep, ...]:
    """Return the steps that all ranks have recorded, in order."""
    ranks = {
        rank: _Rank(replica, stage, spans.get(rank, ()))
        for replica, members in enumerate(replicas)
        for stage, rank in enumerate(members)
    }
    batches = sorted(set[int].intersection(*(set(rank.steps) for rank in ranks.values())))
    starts = [min(rank.steps[batch].start_ns for rank in ranks.values()) for batch in batches]
    transfers = _transfers(ranks)
    steps = []
    for index, batch in enumerate(batches):
        follows = index + 1 < len(batches) and batches[index + 1] == batch + 1
        if follows and not any(rank.evaluates_after(batch) for rank in ranks.values()):
            interval = (starts[index + 1] - starts[index]) / 1e9
        else:
            interval = None
        step = _step(
            batch,
            start_ns=starts[index],
            interval=interval,
            replicas=replicas,
            ranks=ranks,
            transfers=transfers,
        )
        steps.append(step)
    return tuple(steps)


def pipeline_seconds(timeline: Timeline) -> float:
    """Return the seconds from the first computation of a step to its last computation or sync."""
    work = [a for a in timeline.activities if a.name in COMPUTING]
    ends = [a for a in timeline.activities if a.name in COMPUTING or a.name == "sync"]
    return max(a.end for a in ends) - min(a.start for a in work) if work else 0.0


class _Rank:
    """The spans of one rank, by step.

    Attributes:
        replica: Replica of the rank.
        stage: Stage of the rank.
        steps: Span of each step, by batch.
        computed: By batch, the span of each computation by (name, micro-batch).
        synced: By batch, the all-reduces of its step.
        checked: Batches in which some computation ran more than once; see `MeasuredStep`.
            `computed` and `synced` hold one of the runs.
        sent: By (kind of message, receiving rank), the transfers in order of their start.
        received: By (kind of message, sending rank), the transfers in order of their start.
    """

    def __init__(self, replica: int, stage: int, spans: Sequence[Span]) -> None:
        self.replica, self.stage = replica, stage
        complete = [s for s in spans if s.category == "step" and "error" not in s.args]
        self.steps = {int(str(s.args["batch"])): s for s in complete if "batch" in s.args}
        self._batches = sorted(self.steps, key=lambda batch: self.steps[batch].start_ns)
        self._starts = [self.steps[batch].start_ns for batch in self._batches]
        # The runs of each step, by batch.
        self._runs: dict[int, list[_Run]] = {}
        # Batches after whose step layers ran outside of any step.
        self._evaluated: set[int] = set()
        self.sent: dict[tuple[str, int], list[Span]] = {}
        self.received: dict[tuple[str, int], list[Span]] = {}
        for span in sorted(spans, key=lambda s: s.start_ns):
            self._add(span)
        counted = {batch: _counted(runs) for batch, runs in self._runs.items()}
        self.computed = {batch: run.computed for batch, run in counted.items()}
        self.synced = {batch: run.synced for batch, run in counted.items()}
        self.checked = {batch for batch, runs in self._runs.items() if len(runs) > 1}

    def evaluates_after(self, batch: int) -> bool:
        """Return True if layers ran between this batch's step and the next, for an evaluation."""
        return batch in self._evaluated

    def step_at(self, time_ns: int) -> int | None:
        """Return the batch of the step that includes a time on this rank, or None."""
        batch = self._last_before(time_ns)
        return batch if batch is not None and time_ns <= self.steps[batch].end_ns else None

    def _last_before(self, time_ns: int) -> int | None:
        """Return the batch of the last step that began at or before a time, or None."""
        index = bisect_right(self._starts, time_ns) - 1
        return self._batches[index] if index >= 0 else None

    def _add(self, span: Span) -> None:
        if span.category == "compute" and span.name in COMPUTING:
            self._add_computation(span)
        elif span.category == "sync":
            batch = self.step_at(span.start_ns)
            if batch is not None:
                self._runs_of(batch)[-1].synced.append(span)
        elif span.category == "transfer":
            verb, _, kind = span.name.partition(" ")
            if kind in TRANSFERS and "peer" in span.args:
                by_peer = self.sent if verb == "send" else self.received
                by_peer.setdefault((kind, int(str(span.args["peer"]))), []).append(span)

    def _add_computation(self, span: Span) -> None:
        batch = self.step_at(span.start_ns)
        if batch is None:
            before = self._last_before(span.start_ns)
            if before is not None:
                self._evaluated.add(before)
            return
        runs = self._runs_of(batch)
        key = span.name, int(str(span.args.get("microbatch", ALL_MICROBATCHES)))
        if key in runs[-1].computed:
            runs.append(_Run())
        runs[-1].computed[key] = span

    def _runs_of(self, batch: int) -> list[_Run]:
        return self._runs.setdefault(batch, [_Run()])


@dataclass(frozen=True)
class _Run:
    """One run of a step on a rank. A computation that runs again begins a new run.

    Attributes:
        computed: Span of each computation, by (name, micro-batch).
        synced: The all-reduces that began in the run.
    """

    computed: dict[tuple[str, int], Span] = field(default_factory=dict)
    synced: list[Span] = field(default_factory=list)


def _counted(runs: Sequence[_Run]) -> _Run:
    """Return the last run that trained; the last one if none did.

    A check of the loss runs the layers forward only, before the step or after it.
    """
    trained = [run for run in runs if any(name == "backward" for name, _ in run.computed)]
    return (trained or runs)[-1]


@dataclass(frozen=True)
class _Transfer:
    """A message from a stage to a neighbour.

    Replica and stage are those of the sender. Times are in nanoseconds, on the common clock.
    """

    kind: str
    replica: int
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int


def _transfers(ranks: Mapping[int, _Rank]) -> dict[int, list[_Transfer]]:
    """Return the transfers of every step, by batch.

    The step of a transfer follows from the message's key, which has the number of the pass. It does
    not follow from the time: a rank may begin the next step while its sending thread still sends
    for the last one.
    """
    transfers: dict[int, list[_Transfer]] = {}
    batch_of = _passes(ranks)
    for source, sender in ranks.items():
        for (kind, peer), sends in sender.sent.items():
            arrivals = ranks[peer].received.get((kind, source), []) if peer in ranks else []
            # Messages of one kind keep their order. A full tracer drops its oldest spans, so only
            # these may be missing on either side. Hence pair the spans from the end.
            arrival_of = dict(zip(map(id, reversed(sends)), reversed(arrivals), strict=False))
            for send in sends:
                key = _KEY.fullmatch(str(send.args.get("key")))
                if key is None or int(key[2]) not in batch_of:
                    continue
                # A send ends once the message is in the sender's buffers, a receive on arrival.
                arrival = arrival_of.get(id(send), send)
                end = max(send.end_ns, arrival.end_ns)
                transfer = _Transfer(
                    kind, sender.replica, sender.stage, int(key[1]), send.start_ns, end
                )
                transfers.setdefault(batch_of[int(key[2])], []).append(transfer)
    return transfers


def _passes(ranks: Mapping[int, _Rank]) -> dict[int, int]:
    """Return the batch of every pass through the pipeline, by number of the pass.

    A stage starts to send activations while it is in the step. So the start determines the batch.
    If the loss was checked or the step was repeated, a step has several passes. The last one that
    sent gradients counts, or the last one if none did.
    """
    sends = [
        (rank, kind, send)
        for rank in ranks.values()
        for (kind, _), spans in rank.sent.items()
        for send in spans
    ]
    trained = {_pass_of(send) for _, kind, send in sends if kind == "gradient"}
    last_pass: dict[int, tuple[bool, int]] = {}
    for rank, kind, send in sends:
        batch, number = rank.step_at(send.start_ns), _pass_of(send)
        if kind == "activation" and batch is not None and number is not None:
            candidate = number in trained, number
            last_pass[batch] = max(last_pass.get(batch, candidate), candidate)
    return {number: batch for batch, (_, number) in last_pass.items()}


def _pass_of(send: Span) -> int | None:
    """Return the number of the pass in a message's key, or None."""
    key = _KEY.fullmatch(str(send.args.get("key")))
    return int(key[2]) if key is not None else None


def _step(
    batch: int,
    *,
    start_ns: int,
    interval: float | None,
    replicas: Sequence[Sequence[int]],
    ranks: Mapping[int, _Rank],
    transfers: Mapping[int, Sequence[_Transfer]],
) -> MeasuredStep:
    """Return one step, made from the spans of all ranks; see `MeasuredStep`."""
    # Index of a micro-batch: in spans over the global batch, in activities within its replica.
    shares: list[set[int]] = [set() for _ in replicas]
    for rank in ranks.values():
        shares[rank.replica] |= {m for _, m in rank.computed.get(batch, {})}
    local_indices = [
        {m: index for index, m in enumerate(sorted(share - {ALL_MICROBATCHES}))} for share in shares
    ]

    def activity(name: str, place: tuple[int, int], m: int, times: tuple[int, int]) -> Activity:
        local_index = local_indices[place[0]].get(m, ALL_MICROBATCHES)
        start, end = ((time - start_ns) / 1e9 for time in times)
        return Activity(name, *place, local_index, start, end)

    activities = [
        activity(t.kind, (t.replica, t.stage), t.microbatch, (t.start_ns, t.end_ns))
        for t in transfers.get(batch, ())
    ]
    for rank in ranks.values():
        place = rank.replica, rank.stage
        activities += [
            activity(name, place, m, (span.start_ns, span.end_ns))
            for (name, m), span in rank.computed.get(batch, {}).items()
        ]
        activities += [
            activity("sync", place, ALL_MICROBATCHES, (span.start_ns, span.end_ns))
            for span in rank.synced.get(batch, [])
        ]
    last_end = max(rank.steps[batch].end_ns for rank in ranks.values())
    busy = [[0.0] * len(members) for members in replicas]
    for a in activities:
        if a.name in COMPUTING:
            busy[a.replica][a.stage] += a.end - a.start
    return MeasuredStep(
        batch=batch,
        timeline=Timeline(
            activities=tuple(sorted(activities, key=lambda a: a.start)),
            step_seconds=interval if interval is not None else (last_end - start_ns) / 1e9,
            busy_seconds=tuple(tuple(replica) for replica in busy),
            peak_bytes=(),
        ),
        interval=interval,
        checked=any(batch in rank.checked for rank in ranks.values()),
        whole_loss=any(
            ("loss", ALL_MICROBATCHES) in rank.computed.get(batch, {}) for rank in ranks.values()
        ),
    )
