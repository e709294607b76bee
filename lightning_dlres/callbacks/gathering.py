"""The spans of all ranks, brought together on one clock when training has ended: a report is made
on one rank, and every rank saw a part of it only.
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

# Returns the source's object on all ranks; called by all of them.
Broadcast = Callable[[Any, int], Any]

KEPT_STEPS = 20
# A rank's share of what travels and of the trace; some 100 bytes each.
KEPT_SPANS = 20_000
_PINGS = 5
# Hosts boot apart, and a container's clock may have an offset of its own.
_CLOCK_FILES = ("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets")


class _Row(msgspec.Struct, array_like=True):
    """A span as it travels."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    thread: str
    args: dict[str, Scalar]


@dataclass(frozen=True)
class Gathered:
    """The spans of all ranks.

    Attributes:
        spans: by rank, on rank 0's clock.
        clock_error: seconds by which spans of unlike hosts may be shifted against each other; 0 on
            one host.
    """

    spans: dict[int, list[Span]]
    clock_error: float


def last_steps(tracer: Tracer, since_ns: int) -> list[Span]:
    """Return the spans of the last steps that a tracer holds.

    Args:
        tracer: this rank's.
        since_ns: what began before does not count.
    """
    spans = [span for span in tracer.spans() if span.start_ns >= since_ns]
    starts = sorted(span.start_ns for span in spans if span.category == "step")
    # What a step did was recorded before the step itself: where the ring has forgotten something,
    # the oldest step may be there without its beginning.
    starts = starts[1:] if tracer.dropped else starts
    for first in starts[-KEPT_STEPS:]:
        found = [span for span in spans if span.start_ns >= first]
        if len(found) <= KEPT_SPANS:
            return found
    return spans[-KEPT_SPANS:]


def gather(broadcast: Broadcast, rank: int, world_size: int, mine: Iterable[Span]) -> Gathered:
    """Return the spans of all ranks; called by all of them.

    Args:
        broadcast: see `Broadcast`; gets plain values only.
        rank: this rank.
        world_size: number of ranks.
        mine: this rank's spans.
    """
    clocks = _everywhere(broadcast, rank, world_size, _clock())
    offsets, error = _offsets(broadcast, rank, clocks)
    texts = _everywhere(broadcast, rank, world_size, encode(mine))
    spans = {
        source: _shifted(decode(text), offsets[clocks[source]]) for source, text in enumerate(texts)
    }
    return Gathered(spans, error)


def encode(spans: Iterable[Span]) -> str:
    """Return spans as JSON text."""
    rows = [_Row(s.name, s.category, s.start_ns, s.end_ns, s.thread, dict(s.args)) for s in spans]
    try:
        return msgspec.json.encode(rows).decode()
    except (msgspec.MsgspecError, TypeError, UnicodeError):
        # One odd name shall not keep this rank from the exchange for which all others wait.
        return "[]"


def decode(text: str) -> list[Span]:
    """Return the spans that `encode` wrote.

    Raises:
        msgspec.ValidationError: the text is something else.
    """
    return [
        Span(r.name, r.category, r.start_ns, r.end_ns, r.thread, r.args)
        for r in from_json(text, list[_Row])
    ]


def _everywhere(broadcast: Broadcast, rank: int, world_size: int, mine: str) -> list[str]:
    return [
        str(broadcast(mine if rank == source else None, source)) for source in range(world_size)
    ]


def _clock() -> str:
    """Return a name of the clock that `perf_counter_ns` reads: one for all processes of a
    machine."""
    found = [Path(name).read_text() for name in _CLOCK_FILES if os.access(name, os.R_OK)]
    return " ".join("".join(found).split()) or platform.node()


def _offsets(
    broadcast: Broadcast, rank: int, clocks: Sequence[str]
) -> tuple[dict[str, int], float]:
    """Return by how many nanoseconds each clock is ahead of rank 0's, and the largest possible
    error in seconds; both count on rank 0 only.

    Clocks of unlike hosts have nothing in common. Rank 0 asks the first rank of another host for
    its time: what it is told was true at some moment between question and answer, taken to be the
    middle, and half of the time between them is the most by which that can be wrong. The shortest
    of a few attempts counts.
    """
    offsets, worst = {clocks[0]: 0}, 0
    for peer, clock in enumerate(clocks):
        if clock in offsets:
            continue
        offsets[clock], shortest = 0, None
        for _ in range(_PINGS):
            asked = time.perf_counter_ns()
            broadcast(None, 0)
            told = int(broadcast(time.perf_counter_ns() if rank == peer else None, peer))
            heard = time.perf_counter_ns()
            if shortest is None or heard - asked < shortest:
                shortest = heard - asked
                offsets[clock] = told - (asked + heard) // 2
        worst = max(worst, (shortest or 0) // 2)
    return offsets, worst / 1e9


def _shifted(spans: Sequence[Span], offset: int) -> list[Span]:
    if not offset:
        return list(spans)
    return [
        Span(s.name, s.category, s.start_ns - offset, s.end_ns - offset, s.thread, s.args)
        for s in spans
    ]
