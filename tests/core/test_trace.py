"""Tests of the tracer: any thread, limited memory, no cost when disabled, and Perfetto files."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.trace import Tracer, write_chrome_trace


def test_a_span_has_its_times_and_arguments() -> None:
    tracer = Tracer()
    with tracer.span("outer", "compute", name="layer 3", size=7):
        with tracer.span("inner", "copy"):
            pass
    inner, outer = tracer.spans()
    assert (outer.name, outer.category, dict(outer.args)) == (
        "outer",
        "compute",
        {"name": "layer 3", "size": 7},
    )
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert outer.seconds >= inner.seconds >= 0
    with pytest.raises(AttributeError):
        outer.name = "other"  # type: ignore[misc]


def test_a_span_that_raises_is_recorded_with_its_error() -> None:
    tracer = Tracer()
    with pytest.raises(KeyError), tracer.span("step", "compute"):
        raise KeyError("x")
    assert tracer.spans()[0].args == {"error": "KeyError"}


def test_a_disabled_tracer_records_nothing_and_allocates_no_spans() -> None:
    tracer = Tracer(enabled=False)
    assert tracer.span("a", "b") is tracer.span("c", "d")
    with tracer.span("a", "b"):
        tracer.add("c", "d", 1, 2)
    assert tracer.spans() == ()
    tracer.enabled = True
    tracer.add("c", "d", 1, 2)
    assert len(tracer.spans()) == 1


def test_the_buffer_keeps_the_newest_spans() -> None:
    tracer = Tracer(capacity=3)
    for number in range(5):
        tracer.add(str(number), "c", number, number + 1)
    assert [span.name for span in tracer.spans()] == ["2", "3", "4"]
    assert tracer.dropped == 2
    tracer.clear()
    assert (tracer.spans(), tracer.dropped) == ((), 0)


def test_capacity_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="capacity"):
        Tracer(capacity=0)


def test_threads_do_not_lose_each_others_spans() -> None:
    tracer = Tracer()
    barrier = threading.Barrier(4, timeout=20)

    def work() -> None:
        barrier.wait()
        for _ in range(200):
            with tracer.span("work", "compute"):
                tracer.spans()

    threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    per_thread = [sum(s.thread == f"worker {i}" for s in tracer.spans()) for i in range(4)]
    assert per_thread == [200] * 4


def test_the_chrome_trace_names_processes_and_threads(tmp_path: Path) -> None:
    tracer = Tracer()
    tracer.add("forward", "compute", 2_000, 5_000, layer=1)
    path = tmp_path / "trace.json"
    write_chrome_trace(path, {"rank 0": tracer, "rank 1": tracer.spans()})
    events: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["traceEvents"]
    work = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["ts"], e["dur"], e["args"]) for e in work] == [
        (1, 2.0, 3.0, {"layer": 1}),
        (2, 2.0, 3.0, {"layer": 1}),
    ]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["process_name", 2, 0] == "rank 1"
    assert names["thread_name", 1, work[0]["tid"]] == threading.current_thread().name
    assert tracer.chrome_events(1, "rank 0") == events[: len(events) // 2]
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
