"""Process of benchmarks/parameter_server.py with the servers of one host."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.support.parameter_server.processor_time import thread_seconds
from benchmarks.support.rpc import Message, RankRpc
from lightning_dlres.paramserver.execute.server import key_state
from lightning_dlres.paramserver.execute.server.service import ParameterServer


def main(rpc: RankRpc) -> None:
    """Follow orders until the benchmark ends.

    There are three orders. "open" starts a server at the address "bind", with snapshots in the
    directory "snapshot" if it is not None. "used" asks for the result of `used`. "stop counting"
    ends the count of copies, which takes time.
    """
    torch.set_num_threads(1)
    servers: list[ParameterServer] = []
    counter, stop_counting = count_copies()
    for order in rpc.orders():
        if order["do"] == "open":
            snapshot = order.get("snapshot")
            server = ParameterServer(
                bind=order["bind"],
                insecure=True,
                snapshot=None if snapshot is None else Path(snapshot),
                snapshot_every=3600.0,
            )
            servers.append(server)
            rpc.reply({"address": server.address})
            continue
        if order["do"] == "stop counting":
            stop_counting()
        rpc.reply(used(counter))


def used(counter: Counter[str]) -> Message:
    """Return processor seconds of the process and its threads, and the counts of `count_copies`.

    All figures are totals since the process started.
    """
    return {
        "cpu": time.process_time(),
        "threads": thread_seconds(threading.enumerate()),
        "copied": dict(counter),
    }


def count_copies() -> tuple[Counter[str], Callable[[], None]]:
    """Count the bytes that are read by the merge ("merged"), and copied before it ("staged").

    Small keys in the messages of others are always copied.

    Returns:
        The counter, and a function that ends the count.
    """
    counter: Counter[str] = Counter(merged=0, staged=0)
    as_tensor = key_state.as_tensor

    def counted(data: memoryview) -> torch.Tensor:
        values = as_tensor(data)
        counter["merged"] += len(data)
        address = np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0
        counter["staged"] += len(data) * (address != values.data_ptr())
        return values

    def stop() -> None:
        key_state.as_tensor = as_tensor

    key_state.as_tensor = counted
    return counter, stop
