"""Spans of all ranks are gathered on one clock, as plain text, and their number is bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from lightning_dlres.callbacks import gathering
from lightning_dlres.callbacks.gathering import GatheredSpans, decode, encode, gather, last_steps
from lightning_dlres.core.trace import Span, Tracer

HOUR_NS = 3_600_000_000_000


class RankThreads:
    """Ranks as threads. A broadcast passes an object through one slot, and takes no clock time.

    Args:
        count: Number of ranks.
        clocks: Identifier of each rank's clock, and the nanoseconds by which it is ahead of rank
            0's clock.
        monkeypatch: Replaces the functions of `gathering` that read the clocks.
    """

    def __init__(
        self, count: int, clocks: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.count, self.clocks = count, clocks
        self.local = threading.local()
        self.barrier = threading.Barrier(count, timeout=20)
        self.slot: Any = None
        self.sent: list[Any] = []
        self.ticks = [0] * count
        monkeypatch.setattr(gathering.time, "perf_counter_ns", self.perf_counter_ns)
        monkeypatch.setattr(gathering, "_clock", lambda: clocks[self.local.rank][0])

    def broadcast(self, obj: Any, source: int) -> Any:
        if self.local.rank == source:
            self.slot = obj
            self.sent.append(obj)
        self.barrier.wait()
        received = self.slot
        self.barrier.wait()
        return received

    def perf_counter_ns(self) -> int:
        """Return the time of the rank's clock, which advances by a microsecond for each call."""
        rank = self.local.rank
        self.ticks[rank] += 1000
        return self.ticks[rank] + self.clocks[rank][1]

    def run(self, work: Callable[[int], GatheredSpans]) -> list[GatheredSpans]:
        def as_rank(rank: int) -> GatheredSpans:
            self.local.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self.count) as executor:
            return list(executor.map(as_rank, range(self.count)))


def test_spans_of_another_host_are_shifted_to_the_clock_of_rank_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Three ranks on two hosts, with clocks that are an hour apart.
    clocks = [("here", 0), ("there", HOUR_NS), ("there", HOUR_NS)]
    threads = RankThreads(3, clocks, monkeypatch)

    def work(rank: int) -> GatheredSpans:
        start = threads.clocks[rank][1] + 5000
        own_spans = [Span("forward", "compute", start, start + 70, "main", {"stage": rank})]
        return gather(threads.broadcast, rank, 3, own_spans)

    gathered = threads.run(work)[0]
    assert list(gathered.spans) == [0, 1, 2]
    for rank, (span,) in gathered.spans.items():
        assert span.args == {"stage": rank}
        assert span.end_ns - span.start_ns == 70
        # Each clock advances only when it is read, so the clocks drift apart by some microseconds.
        assert abs(span.start_ns - 5000) <= gathered.clock_error * 1e9 + 10_000
    assert 0 < gathered.clock_error < 1e-4


def test_one_host_has_one_clock_and_only_text_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = RankThreads(2, [("here", 0), ("here", 0)], monkeypatch)
    span = Span("step", "step", 1, 2, "main", {"batch": 3, "x": None, "y": 0.5, "z": True})
    everywhere = threads.run(lambda rank: gather(threads.broadcast, rank, 2, [span]))
    assert all(spans == GatheredSpans({0: [span], 1: [span]}, 0.0) for spans in everywhere)
    assert all(isinstance(message, str) for message in threads.sent)


def test_a_rank_with_a_span_that_cannot_be_encoded_sends_an_empty_list() -> None:
    assert decode(encode([Span("\ud800", "c", 0, 1, "main", {})])) == []
    with pytest.raises(msgspec.ValidationError):
        decode('[{"name": 1}]')


def tracer_with(steps: int, inside: int = 2, capacity: int = 100_000) -> Tracer:
    """Return a tracer with steps of 100 ns each, and `inside` spans in every step."""
    tracer = Tracer(capacity)
    for step in range(steps):
        for index in range(inside):
            start = 100 * step + 10 + index
            tracer.add("forward", "compute", start, start + 1, microbatch=index)
        tracer.add("step", "step", 100 * step, 100 * step + 99, batch=step)
    return tracer


def batches(spans: list[Span]) -> list[Any]:
    return [span.args["batch"] for span in spans if span.category == "step"]


def test_the_last_steps_are_kept() -> None:
    spans = last_steps(tracer_with(50), since_ns=0)
    assert batches(spans) == list(range(30, 50))
    assert len(spans) == 60
    assert batches(last_steps(tracer_with(50), since_ns=4700)) == [47, 48, 49]


def test_fewer_steps_are_kept_if_they_have_many_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "MAX_SPANS", 10)
    assert batches(last_steps(tracer_with(50), since_ns=0)) == [47, 48, 49]
    assert len(last_steps(tracer_with(1, inside=30), since_ns=0)) == 10


def test_a_step_that_lost_its_first_spans_is_left_out() -> None:
    # The ring buffer holds the end of step 2, and steps 3 and 4.
    assert batches(last_steps(tracer_with(5, capacity=7), since_ns=0)) == [3, 4]


def test_spans_without_steps_are_kept_for_the_trace() -> None:
    tracer = Tracer()
    tracer.add("pull", "transfer", 5, 6)
    assert [span.name for span in last_steps(tracer, since_ns=0)] == ["pull"]
    assert last_steps(tracer, since_ns=7) == []
