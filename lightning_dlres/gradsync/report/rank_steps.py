"""Figures of the steps of one rank, made from its spans.

A step ends with a backward that synchronises gradients. Backwards that only accumulate gradients
belong to the step that follows. The figures need these spans:

- `WAIT`, with the number of the step. It begins when the last bucket of gradients is ready, and
  ends when the rank has the means of all gradients. It is the *exposed* time of synchronisation:
  backward has nothing left to compute, and the optimizer cannot begin.
- `BACKWARD`, the backward that synchronises gradients. It has the same end as `WAIT`.
- "encode", "merge" and "decode" of category "compute". One span may cover several tasks.
- "send" and "receive" of category "transfer", one for each message, with its bytes and its step.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_dlres.core.trace import Span
from lightning_dlres.gradsync.plan.graph import TaskKind

BACKWARD, WAIT = "backward", "wait for gradients"
# Category of `WAIT`.
SYNC = "sync"
COMPUTE_TASKS = tuple(kind.value for kind in TaskKind if not kind.is_transfer)
TRANSFER_TASKS = tuple(kind.value for kind in TaskKind if kind.is_transfer)
TASKS = (*COMPUTE_TASKS, *TRANSFER_TASKS)

# Start and end in nanoseconds.
Interval = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step on one rank. Times are in nanoseconds, on the clock of the spans.

    Attributes:
        step: Number of the step.
        start_ns: Start of the backward that synchronised the gradients.
        ready_ns: Time at which the last bucket of gradients was ready.
        end_ns: Time at which the rank had the means of all gradients.
        tasks: Spans of all tasks, in the order of their starts.
        residual_norm: Norm of the residuals divided by that of the gradient, as last measured; None
            if it has not been measured.
    """

    step: int
    start_ns: int
    ready_ns: int
    end_ns: int
    tasks: tuple[Span, ...]
    residual_norm: float | None

    @property
    def exposed_seconds(self) -> float:
        """Seconds of synchronisation that did not overlap with backward."""
        return (self.end_ns - self.ready_ns) / 1e9

    @property
    def exposed_compute_seconds(self) -> float:
        """Seconds of the exposed time in which a compute task ran on this rank.

        In the rest of the exposed time, the rank waited for messages.
        """
        computing = [(s.start_ns, s.end_ns) for s in self.tasks if s.name in COMPUTE_TASKS]
        return covered_seconds(computing, (self.ready_ns, self.end_ns))

    @property
    def sent_bytes(self) -> int:
        """Bytes of the payloads that this rank sent."""
        return self._total("send", "nbytes")

    @property
    def raw_sent_bytes(self) -> int:
        """Bytes that the sent payloads would have without compression."""
        return self._total("send", "raw_nbytes")

    @property
    def received_bytes(self) -> int:
        """Bytes of the payloads that this rank received."""
        return self._total("receive", "nbytes")

    def task_seconds(self, name: str) -> float:
        """Return the seconds of the tasks with a name, one of `TASKS`."""
        return sum(span.seconds for span in self.tasks if span.name == name)

    def _total(self, name: str, argument: str) -> int:
        return sum(int(s.args.get(argument) or 0) for s in self.tasks if s.name == name)


def rank_steps(spans: Iterable[Span], *, is_truncated: bool = False) -> list[RankStep]:
    """Return the steps of one rank, in order.

    Args:
        spans: Spans of the rank.
        is_truncated: True if older spans were dropped. The first step is then left out, because
            some of its spans may be missing.
    """
    spans = list(spans)
    waits = sorted((s for s in spans if s.name == WAIT), key=lambda s: s.end_ns)
    # The recorder gives both spans of a step the same end, which identifies the pair.
    backwards = {s.end_ns: s.start_ns for s in spans if s.name == BACKWARD}
    ends = [wait.end_ns for wait in waits]
    tasks: list[list[Span]] = [[] for _ in waits]
    for span in sorted(filter(_is_task, spans), key=lambda s: s.start_ns):
        # A task belongs to the step whose synchronisation ends next. Only a message from a rank
        # that is ahead can belong to the step after it; its span has the number of its step.
        index = bisect_right(ends, span.start_ns)
        if span.name == "receive" and index < len(waits):
            is_ahead = span.args.get("step") not in (None, waits[index].args.get("step"))
            index += 1 if is_ahead else 0
        if index < len(waits):
            tasks[index].append(span)
    steps = [
        RankStep(
            step=int(wait.args.get("step") or 0),
            start_ns=backwards.get(wait.end_ns, wait.start_ns),
            ready_ns=wait.start_ns,
            end_ns=wait.end_ns,
            tasks=tuple(own),
            residual_norm=_number(wait.args.get("residual_norm")),
        )
        for wait, own in zip(waits, tasks, strict=True)
    ]
    return steps[1:] if is_truncated else steps


def metrics(steps: Sequence[RankStep]) -> dict[str, float]:
    """Return the figures of one rank as means over some steps, by name; empty without steps.

    - "wire_mb": payloads that the rank sends and receives in a step, in 10**6 bytes.
    - "ratio": `compression_ratio` of all steps.
    - "encode_ms", "merge_ms", "decode_ms": time of these tasks in a step.
    - "transfer_ms": work of the threads that send and receive, in a step. It excludes the time of a
      message on the link, which one rank alone cannot measure.
    - "exposed_ms": exposed time of synchronisation in a step.
    - "wait_ms": part of the exposed time in which this rank waits for messages.
    - "residual_norm": `RankStep.residual_norm` of the last step, if it has been measured.

    Steps without tasks have no figure but "exposed_ms" and "residual_norm".
    """
    if not steps:
        return {}
    figures = {"exposed_ms": 1e3 * statistics.fmean(s.exposed_seconds for s in steps)}
    if any(step.tasks for step in steps):
        computing = statistics.fmean(s.exposed_compute_seconds for s in steps)
        figures["wait_ms"] = figures["exposed_ms"] - 1e3 * computing
        nbytes = statistics.fmean(s.sent_bytes + s.received_bytes for s in steps)
        figures["wire_mb"] = nbytes / 1e6
        for name in COMPUTE_TASKS:
            seconds = statistics.fmean(step.task_seconds(name) for step in steps)
            figures[f"{name}_ms"] = 1e3 * seconds
        transfer = [s.task_seconds("send") + s.task_seconds("receive") for s in steps]
        figures["transfer_ms"] = 1e3 * statistics.fmean(transfer)
    ratio = compression_ratio(steps)
    if ratio is not None:
        figures["ratio"] = ratio
    if steps[-1].residual_norm is not None:
        figures["residual_norm"] = steps[-1].residual_norm
    return figures


def compression_ratio(steps: Sequence[RankStep]) -> float | None:
    """Return the uncompressed size of the sent payloads divided by their size; None without any."""
    sent = sum(step.sent_bytes for step in steps)
    return sum(step.raw_sent_bytes for step in steps) / sent if sent else None


def covered_seconds(intervals: Iterable[Interval], bounds: Interval | None = None) -> float:
    """Return the length of the union of intervals, in seconds.

    Args:
        intervals: Intervals in nanoseconds; they may overlap.
        bounds: Only the parts of the intervals within these bounds count; None for no bounds.
    """
    total, reached = 0, bounds[0] if bounds is not None else None
    for start, end in sorted(intervals):
        if bounds is not None:
            end = min(end, bounds[1])
        start = start if reached is None else max(start, reached)
        if end > start:
            total += end - start
            reached = end
    return total / 1e9


def _is_task(span: Span) -> bool:
    names: Mapping[str, tuple[str, ...]] = {"compute": COMPUTE_TASKS, "transfer": TRANSFER_TASKS}
    return span.name in names.get(span.category, ())


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
