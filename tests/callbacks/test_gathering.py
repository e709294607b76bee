"""Spans of all ranks come together on one clock, a bounded number of them, as plain text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from lightning_dlres.callbacks import gathering
from lightning_dlres.callbacks.gathering import Gathered, decode, encode, gather, last_steps
from lightning_dlres.core.trace import Span, Tracer

HOUR_NS = 3_600_000_000_000


class Threads:
    """Ranks as threads; a broadcast is a slot that all of them look into, and takes no time."""

    def __init__(self, count: int, clocks: list[tuple[str, int]]) -> None:
        self.count, self.clocks = count, clocks
        self.local = threading.local()
        self.barrier = threading.Barrier(count, timeout=20)
        self.slot: Any = None
        self.sent: list[Any] = []
        self.ticks = [0] * count

    def broadcast(self, obj: Any, source: int) -> Any:
        if self.local.rank == source:
            self.slot = obj
            self.sent.append(obj)
        self.barrier.wait()
        found = self.slot
        self.barrier.wait()
        return found

    def perf_counter_ns(self) -> int:
        """Each rank's clock goes on by a microsecond whenever it is looked at."""
        rank = self.local.rank
        self.ticks[rank] += 1000
        return self.ticks[rank] + self.clocks[rank][1]

    def run(self, work: Callable[[int], Gathered]) -> list[Gathered]:
        def as_rank(rank: int) -> Gathered:
            self.local.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self.count) as executor:
            return list(executor.map(as_rank, range(self.count)))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """Three ranks on two hosts, whose clocks are an hour apart."""
    made = Threads(3, [("here", 0), ("there", HOUR_NS), ("there", HOUR_NS)])
    monkeypatch.setattr(gathering.time, "perf_counter_ns", made.perf_counter_ns)
    monkeypatch.setattr(gathering, "_clock", lambda: made.clocks[made.local.rank][0])
    return made


def test_spans_of_another_host_are_put_on_rank_zeros_clock(threads: Threads) -> None:
    def work(rank: int) -> Gathered:
        start = threads.clocks[rank][1] + 5000
        mine = [Span("forward", "compute", start, start + 70, "main", {"stage": rank})]
        return gather(threads.broadcast, rank, 3, mine)

    found = threads.run(work)[0]
    assert list(found.spans) == [0, 1, 2]
    for rank, (span,) in found.spans.items():
        assert span.args == {"stage": rank}
        assert span.end_ns - span.start_ns == 70
        assert abs(span.start_ns - 5000) <= found.clock_error * 1e9 + 10_000
    assert 0 < found.clock_error < 1e-4


def test_one_host_has_one_clock_and_only_plain_values_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads(2, [("here", 0), ("here", 0)])
    span = Span("step", "step", 1, 2, "main", {"batch": 3, "x": None, "y": 0.5, "z": True})
    found = threads.run(lambda rank: gather(threads.broadcast, rank, 2, [span]))
    assert all(gathered == Gathered({0: [span], 1: [span]}, 0.0) for gathered in found)
    assert all(isinstance(sent, str) for sent in threads.sent)


def test_what_cannot_travel_keeps_no_rank_from_the_exchange() -> None:
    assert decode(encode([Span("\ud800", "c", 0, 1, "main", {})])) == []
    with pytest.raises(msgspec.ValidationError):
        decode('[{"name": 1}]')


def tracer_with(steps: int, inside: int = 2, capacity: int = 100_000) -> Tracer:
    """Return a tracer with steps of 100 ns each, in every one of which something happens."""
    tracer = Tracer(capacity)
    for step in range(steps):
        for index in range(inside):
            at = 100 * step + 10 + index
            tracer.add("forward", "compute", at, at + 1, microbatch=index)
        tracer.add("step", "step", 100 * step, 100 * step + 99, batch=step)
    return tracer


def batches(spans: list[Span]) -> list[Any]:
    return [span.args["batch"] for span in spans if span.category == "step"]


def test_the_last_steps_are_kept() -> None:
    spans = last_steps(tracer_with(50), 0)
    assert batches(spans) == list(range(30, 50))
    assert len(spans) == 60
    assert batches(last_steps(tracer_with(50), 4700)) == [47, 48, 49]


def test_fewer_steps_are_kept_where_they_are_full_of_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "KEPT_SPANS", 10)
    assert batches(last_steps(tracer_with(50), 0)) == [47, 48, 49]
    assert len(last_steps(tracer_with(1, inside=30), 0)) == 10


def test_a_step_whose_beginning_is_forgotten_is_left_out() -> None:
    # The ring holds the end of step 2, and steps 3 and 4.
    assert batches(last_steps(tracer_with(5, capacity=7), 0)) == [3, 4]


def test_spans_without_steps_are_kept_for_the_trace() -> None:
    tracer = Tracer()
    tracer.add("pull", "transfer", 5, 6)
    assert [span.name for span in last_steps(tracer, 0)] == ["pull"]
    assert last_steps(tracer, 7) == []
