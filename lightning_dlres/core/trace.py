"""Spans of time, recorded cheaply while training runs and shown in Perfetto afterwards.

Engines record what they did and when; reports and pictures read it back. `perf_counter_ns` is one
clock for all processes of a machine on Linux, so that the spans of local ranks line up.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from lightning_dlres.core.errors import ConfigError, got_expected

Scalar = str | int | float | bool | None

# One shared object: a disabled tracer allocates nothing per span.
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Span:
    """One stretch of work on one thread; times are `time.perf_counter_ns` values."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    thread: str
    args: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return (self.end_ns - self.start_ns) / 1e9


class Tracer:
    """A thread-safe ring of the last `capacity` spans; the oldest give way to the newest.

    Raises:
        ConfigError: the capacity is not a positive integer.
    """

    def __init__(self, capacity: int = 100_000, *, enabled: bool = True) -> None:
        if capacity < 1:
            raise ConfigError(got_expected("capacity", capacity, "at least 1 span", "100_000"))
        self.enabled = enabled
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._recorded = 0
        self._lock = threading.Lock()

    def span(self, name: str, category: str, /, **args: Scalar) -> AbstractContextManager[None]:
        """Record the time from entering to leaving the `with` block, also where it raises."""
        return _Open(self, name, category, args) if self.enabled else _NOTHING

    def add(self, name: str, category: str, /, start_ns: int, end_ns: int, **args: Scalar) -> None:
        """Record a span whose times the caller took itself; it counts for the calling thread."""
        if self.enabled:
            self._record(name, category, start_ns, end_ns, args)

    def spans(self) -> tuple[Span, ...]:
        """Return what the ring holds, in the order in which the spans ended."""
        with self._lock:
            return tuple(self._spans)

    @property
    def dropped(self) -> int:
        """How many spans the ring has forgotten."""
        with self._lock:
            return self._recorded - len(self._spans)

    def clear(self) -> None:
        """Forget all spans."""
        with self._lock:
            self._spans.clear()
            self._recorded = 0

    def chrome_events(self, pid: int, process_name: str) -> list[dict[str, object]]:
        """Return the spans as trace events of one process; see the function of the same name."""
        return chrome_events(self.spans(), pid, process_name)

    def _record(
        self, name: str, category: str, start_ns: int, end_ns: int, args: Mapping[str, Scalar]
    ) -> None:
        span = Span(name, category, start_ns, end_ns, threading.current_thread().name, args)
        with self._lock:
            self._spans.append(span)
            self._recorded += 1


class _Open:
    """The `with` block of an enabled tracer."""

    __slots__ = ("_args", "_category", "_name", "_start_ns", "_tracer")

    def __init__(self, tracer: Tracer, name: str, category: str, args: Mapping[str, Scalar]):
        self._tracer = tracer
        self._name = name
        self._category = category
        self._args = args

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_ns = time.perf_counter_ns()
        args = self._args if kind is None else {**self._args, "error": kind.__name__}
        self._tracer._record(self._name, self._category, self._start_ns, end_ns, args)


def chrome_events(spans: Iterable[Span], pid: int, process_name: str) -> list[dict[str, object]]:
    """Return Chrome trace events (times in microseconds), one row per thread, named."""
    events: list[dict[str, object]] = [_label("process_name", pid, 0, process_name)]
    threads: dict[str, int] = {}
    for span in spans:
        if span.thread not in threads:
            threads[span.thread] = len(threads) + 1
            events.append(_label("thread_name", pid, threads[span.thread], span.thread))
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                "pid": pid,
                "tid": threads[span.thread],
                "ts": span.start_ns / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "args": dict(span.args),
            }
        )
    return events


def write_chrome_trace(
    path: str | os.PathLike[str], processes: Mapping[str, Tracer | Iterable[Span]]
) -> None:
    """Write one trace file for chrome://tracing or ui.perfetto.dev, one group per process name.

    The file appears whole or not at all. Raises OSError where the path cannot be written.
    """
    events: list[dict[str, object]] = []
    for pid, (name, source) in enumerate(processes.items(), start=1):
        spans = source.spans() if isinstance(source, Tracer) else source
        events += chrome_events(spans, pid, name)
    partial = Path(f"{os.fspath(path)}.{os.getpid()}.partial")
    partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), "utf-8")
    os.replace(partial, path)


def _label(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
