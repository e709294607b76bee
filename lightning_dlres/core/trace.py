"""Tracer of time spans, cheap enough for training; a trace file shows them in Perfetto.

Engines record spans, and reports and charts read them. On Linux, `perf_counter_ns` is one clock for
all processes of a host. Spans of ranks on one host therefore need no alignment.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple

from lightning_dlres.core.errors import ConfigError, got_expected

Scalar = str | int | float | bool | None

# One shared object, so that a disabled tracer allocates nothing per span.
_NO_SPAN: AbstractContextManager[None] = nullcontext()


class Span(NamedTuple):
    """Work of one thread between two times.

    Attributes:
        name: Name of the work, such as "forward".
        category: Category, such as "compute".
        start_ns: Start, from `time.perf_counter_ns`.
        end_ns: End, from `time.perf_counter_ns`.
        thread: Name of the thread.
        args: Further values, shown in the trace.
    """

    name: str
    category: str
    start_ns: int
    end_ns: int
    thread: str
    args: Mapping[str, Scalar] = MappingProxyType({})

    @property
    def seconds(self) -> float:
        """Length of the span, in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


class Tracer:
    """A thread-safe ring buffer of the last `capacity` spans; new spans replace the oldest.

    A span takes 0.5 to 1 KiB. Reports read the last 20,000 at most.

    Raises:
        ConfigError: If the capacity is less than 1.
    """

    def __init__(self, capacity: int = 30_000, *, enabled: bool = True) -> None:
        if capacity < 1:
            raise ConfigError(got_expected("capacity", capacity, "at least 1 span", "30_000"))
        self.enabled = enabled
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._recorded = 0
        self._lock = threading.Lock()

    def span(self, name: str, category: str, /, **args: Scalar) -> AbstractContextManager[None]:
        """Context manager that records the time of its block, even if the block raises."""
        return _OpenSpan(self, name, category, args) if self.enabled else _NO_SPAN

    def add(self, name: str, category: str, /, start_ns: int, end_ns: int, **args: Scalar) -> None:
        """Record a span with times measured by the caller, for the calling thread."""
        if self.enabled:
            self._record(name, category, start_ns, end_ns, args)

    def spans(self) -> tuple[Span, ...]:
        """Return the spans in the buffer, in the order of their ends."""
        with self._lock:
            return tuple(self._spans)

    @property
    def dropped(self) -> int:
        """Number of spans that newer spans replaced."""
        with self._lock:
            return self._recorded - len(self._spans)

    def clear(self) -> None:
        """Remove all spans."""
        with self._lock:
            self._spans.clear()
            self._recorded = 0

    def chrome_events(self, pid: int, process_name: str) -> list[dict[str, object]]:
        """Return the spans as trace events of one process; see the module's `chrome_events`."""
        return chrome_events(self.spans(), pid, process_name)

    def _record(
        self, name: str, category: str, start_ns: int, end_ns: int, args: Mapping[str, Scalar]
    ) -> None:
        span = Span(name, category, start_ns, end_ns, threading.current_thread().name, args)
        with self._lock:
            self._spans.append(span)
            self._recorded += 1


class _OpenSpan:
    """Context manager that records one span of an enabled tracer."""

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
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_ns = time.perf_counter_ns()
        args = self._args if error_type is None else {**self._args, "error": error_type.__name__}
        self._tracer._record(self._name, self._category, self._start_ns, end_ns, args)


def chrome_events(spans: Iterable[Span], pid: int, process_name: str) -> list[dict[str, object]]:
    """Return Chrome trace events (times in microseconds), with one named row per thread."""
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
    """Write one trace file for chrome://tracing or ui.perfetto.dev, with one group per process.

    The file appears complete or not at all.

    Raises:
        OSError: If the path cannot be written.
    """
    events: list[dict[str, object]] = []
    for pid, (name, source) in enumerate(processes.items(), start=1):
        spans = source.spans() if isinstance(source, Tracer) else source
        events += chrome_events(spans, pid, name)
    temporary = Path(f"{os.fspath(path)}.{os.getpid()}.partial")
    temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), "utf-8")
    os.replace(temporary, path)


def _label(event_name: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": event_name, "pid": pid, "tid": tid, "args": {"name": name}}
