"""Spans that ranks would record for a given timeline; the inverse of `pipeline.report.timeline`."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dlres.core.trace import Span
from lightning_dlres.pipeline.plan.cost_model.simulator import Activity, Timeline
from lightning_dlres.pipeline.stage.microbatch import share

Spans = dict[int, list[Span]]


def span(name: str, category: str, start: float, end: float, **args: str | int) -> Span:
    """Return a span with times in seconds."""
    return Span(name, category, round(start * 1e9), round(end * 1e9), "main", args)


def no_spans(replicas: Sequence[Sequence[int]]) -> Spans:
    """Return an empty list of spans for each rank."""
    return {rank: [] for replica in replicas for rank in replica}


def add_step(
    spans: Spans,
    replicas: Sequence[Sequence[int]],
    timeline: Timeline,
    microbatches: int,
    batch: int,
    start: float,
    end: float,
) -> None:
    """Add a step of every rank, from `start` to `end` in seconds.

    The step of batch b is the pass 2b + 1, so that a test can add another pass before it.
    """
    for rank_spans in spans.values():
        rank_spans.append(span("step", "step", start, end, batch=batch))
    add_pass(spans, replicas, timeline, microbatches, 2 * batch + 1, start)


def add_pass(
    spans: Spans,
    replicas: Sequence[Sequence[int]],
    timeline: Timeline,
    microbatches: int,
    number: int,
    start: float,
) -> None:
    """Add the activities of a timeline as the pass `number` through the pipeline."""
    for activity in timeline.activities:
        rank = replicas[activity.replica][activity.stage]
        begin, end = start + activity.start, start + activity.end
        own = share(microbatches, len(replicas), activity.replica)
        microbatch = own[activity.microbatch] if activity.microbatch >= 0 else -1
        if activity.name == "sync":
            spans[rank].append(span("all-reduce", "sync", begin, end, stages="(0,)", nbytes=1))
        elif activity.name in ("activation", "gradient"):
            peer = replicas[activity.replica][
                activity.stage + (1 if activity.name == "activation" else -1)
            ]
            key = str((microbatch, number))
            send = span(f"send {activity.name}", "transfer", begin, end, key=key, peer=peer)
            spans[rank].append(send)
            spans[peer].append(span(f"receive {activity.name}", "transfer", begin, end, peer=rank))
        else:
            args = {"stage": activity.stage, "microbatch": microbatch}
            spans[rank].append(span(activity.name, "compute", begin, end, **args))


def rounded(timeline: Timeline, start: float = 0.0) -> list[Activity]:
    """Return a timeline's activities in a fixed order, with times rounded to microseconds."""
    activities = [
        Activity(
            activity.name,
            activity.replica,
            activity.stage,
            activity.microbatch,
            round(activity.start, 6),
            round(activity.end, 6),
        )
        for activity in timeline.activities
    ]
    return sorted(
        activities,
        key=lambda activity: (
            activity.name,
            activity.replica,
            activity.stage,
            activity.microbatch,
            activity.start,
        ),
    )
