"""Processor time of the threads of this process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from threading import Thread


def thread_seconds(threads: Iterable[Thread]) -> dict[str, float]:
    """Return the processor seconds of each thread so far, and of all others as "other".

    Others are those of ZeroMQ and gloo, which Python does not know. Threads whose names differ only
    in digits and hyphens at the end count together, under the name without these.
    """
    seconds: dict[str, float] = {}
    for thread in threads:
        if thread.ident is None:
            continue
        clock = time.pthread_getcpuclockid(thread.ident)
        name = thread.name.rstrip("0123456789-") or thread.name
        seconds[name] = seconds.get(name, 0.0) + time.clock_gettime(clock)
    seconds["other"] = time.process_time() - sum(seconds.values())
    return seconds
