"""Spans of all ranks, gathered on one clock at the end of training.

One rank makes the report, and each rank has recorded only its own part of the run.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lightning_dlres.core.trace import Scalar, Span, Tracer
from lightning_dlres.core.wire.decoding import from_json

# Called by all ranks with (object, source rank); returns the source's object on all of them.
Broadcast = Callable[[Any, int], Any]

# Largest number of steps in a trace.
MAX_STEPS = 20
# Largest number of spans of one rank, at about 100 bytes each. It bounds the size of the exchanged
# messages and of the trace.
MAX_SPANS = 20_000
# Number of exchanges with each other host's clock; the shortest one gives the offset.
_PINGS = 5
# Files that tell clocks apart: hosts boot at different times, and a container's clock may have an
# offset of its own.
_CLOCK_FILES = ("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets")


class _Row(msgspec.Struct, array_like=True):
    """A span in a message. Times are those of the sending rank's `perf_counter_ns`."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    thread: str
    args: dict[str, Scalar]


@dataclass(frozen=True)
class GatheredSpans:
    """The spans of all ranks.

    Attributes:
        spans: Spans by rank, on rank 0's clock.
        clock_error: Largest possible shift of another host's spans, in seconds; 0 on one host.
    """

    spans: dict[int, list[Span]]
    clock_error: float


def last_steps(tracer: Tracer, since_ns: int) -> list[Span]:
    """Return the spans of the last steps, at most `MAX_STEPS` steps and `MAX_SPANS` spans.

    If even the last step has too many spans, its beginning is left out.

    Args:
        tracer: Tracer of this rank.
        since_ns: Spans that began before this time are left out, in nanoseconds of
            `perf_counter_ns`.
    """
    spans = [span for span in tracer.spans() if span.start_ns >= since_ns]
    step_starts = sorted(span.start_ns for span in spans if span.category == "step")
    # If the tracer's ring buffer has dropped spans, leave out the oldest step: its own span is
    # recorded after the spans in it, so that the first of these may be lost.
    step_starts = step_starts[1:] if tracer.dropped else step_starts
    for first in step_starts[-MAX_STEPS:]:
        recent = [span for span in spans if span.start_ns >= first]
        if len(recent) <= MAX_SPANS:
            return recent
    return spans[-MAX_SPANS:]


def gather(
    broadcast: Broadcast, rank: int, world_size: int, own_spans: Iterable[Span]
) -> GatheredSpans:
    """Return the spans of all ranks, with times on rank 0's clock; called by all ranks.

    Times and `clock_error` are valid on rank 0 only.

    Args:
        broadcast: Function described at `Broadcast`; it gets None, strings and numbers only.
        rank: This rank.
        world_size: Number of ranks.
        own_spans: Spans of this rank.
    """
    clocks = _all_gather(broadcast, rank, world_size, _clock())
    offsets, error = _clock_offsets(broadcast, rank, clocks)
    texts = _all_gather(broadcast, rank, world_size, encode(own_spans))
    spans = {
        source: _shifted(decode(text), offsets[clocks[source]]) for source, text in enumerate(texts)
    }
    return GatheredSpans(spans, error)


def encode(spans: Iterable[Span]) -> str:
    """Return spans as JSON text; an empty list if one of them cannot be encoded."""
    rows = [_Row(s.name, s.category, s.start_ns, s.end_ns, s.thread, dict(s.args)) for s in spans]
    try:
        return msgspec.json.encode(rows).decode()
    except (msgspec.MsgspecError, TypeError, UnicodeError):
        # This rank must still take part in the exchange, for which all others wait.
        return "[]"


def decode(text: str) -> list[Span]:
    """Return the spans that `encode` wrote.

    Raises:
        msgspec.ValidationError: If the text is not a list of spans.
    """
    return [
        Span(r.name, r.category, r.start_ns, r.end_ns, r.thread, r.args)
        for r in from_json(text, list[_Row])
    ]


def _all_gather(broadcast: Broadcast, rank: int, world_size: int, own_text: str) -> list[str]:
    return [
        str(broadcast(own_text if rank == source else None, source)) for source in range(world_size)
    ]


def _clock() -> str:
    """Return an identifier of the clock behind `perf_counter_ns`, equal for all processes that
    share the clock."""
    texts = [Path(name).read_text() for name in _CLOCK_FILES if os.access(name, os.R_OK)]
    return " ".join("".join(texts).split()) or platform.node()


def _clock_offsets(
    broadcast: Broadcast, rank: int, clocks: Sequence[str]
) -> tuple[dict[str, int], float]:
    """Return the nanoseconds by which each clock is ahead of rank 0's, and the largest possible
    error in seconds; both are valid on rank 0 only.

    Clocks of different hosts are unrelated. Rank 0 asks the first rank of each other host for its
    time. The peer reads its clock between the question and the answer, and rank 0 assumes that this
    happens in the middle. So the error is at most half of the round trip. The shortest of `_PINGS`
    round trips counts.
    """
    offsets, max_error_ns = {clocks[0]: 0}, 0
    for peer, clock in enumerate(clocks):
        if clock in offsets:
            continue
        offsets[clock], shortest = 0, None
        for _ in range(_PINGS):
            sent_ns = time.perf_counter_ns()
            broadcast(None, 0)
            peer_time = int(broadcast(time.perf_counter_ns() if rank == peer else None, peer))
            received_ns = time.perf_counter_ns()
            if shortest is None or received_ns - sent_ns < shortest:
                shortest = received_ns - sent_ns
                offsets[clock] = peer_time - (sent_ns + received_ns) // 2
        max_error_ns = max(max_error_ns, (shortest or 0) // 2)
    return offsets, max_error_ns / 1e9


def _shifted(spans: Sequence[Span], offset: int) -> list[Span]:
    """Return the spans moved back by `offset` nanoseconds."""
    if not offset:
        return list(spans)
    return [
        Span(s.name, s.category, s.start_ns - offset, s.end_ns - offset, s.thread, s.args)
        for s in spans
    ]
