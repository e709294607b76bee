"""Worker of benchmarks/parameter_server.py: it exchanges gradients as an order says."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.support.gradsync_rank import sent_bytes
from benchmarks.support.parameter_server.contenders import (
    AllReduce,
    ParameterServers,
    timed_steps,
)
from benchmarks.support.parameter_server.processor_time import thread_seconds
from benchmarks.support.parameter_server.pull_timer import PullTimer
from benchmarks.support.rpc import Message, RankRpc


def main(rpc: RankRpc) -> None:
    """Follow orders until the benchmark ends.

    An order with "pulls", a number, measures pulls from the server at the address "server" in a job
    with the "token". If "in_snapshot" is true, only pulls during a snapshot into the directory
    "snapshot" count; else only pulls outside of one. `follow` describes the other orders.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rpc.rank, world_size=rpc.world_size)
    contenders: dict[str, AllReduce | ParameterServers] = {}
    timers: dict[str, PullTimer] = {}
    for order in rpc.orders():
        if "pulls" in order:
            address = order["server"]
            if address not in timers:
                timers[address] = PullTimer(address, order["token"], Path(order["snapshot"]))
            rpc.reply(
                {"seconds": timers[address].pull(order["pulls"], in_snapshot=order["in_snapshot"])}
            )
        else:
            rpc.reply(follow(order, contenders, rpc.rank, rpc.world_size))


def follow(
    order: Message, contenders: dict[str, AllReduce | ParameterServers], rank: int, workers: int
) -> Message:
    """Run steps with a contender, which is created at its first order.

    Args:
        order: "contender" (its name); "bucket_mb" of `AllReduce`, or "servers", "token" and
            "key_bytes" of `ParameterServers`; "steps".
        contenders: Contenders by name.
        rank: Index of this worker.
        workers: Number of workers.

    Returns:
        "seconds" of a step; bytes "sent" by the host and processor seconds ("cpu") in a step, and
        those of each thread ("threads"); a "digest" of the parameters.
    """
    name = order["contender"]
    if name not in contenders:
        if "bucket_mb" in order:
            contenders[name] = AllReduce(rank, workers, order["bucket_mb"])
        else:
            contenders[name] = ParameterServers(
                rank,
                workers,
                servers=order["servers"],
                token=order["token"],
                key_bytes=order["key_bytes"],
            )
    contender, steps = contenders[name], order["steps"]
    dist.barrier()
    sent, used, threads = sent_bytes(), time.process_time(), thread_seconds(threading.enumerate())
    seconds = timed_steps(contender, steps)
    after = thread_seconds(threading.enumerate())
    return {
        "seconds": seconds,
        "sent": (sent_bytes() - sent) / steps,
        "cpu": (time.process_time() - used) / steps,
        "threads": {one: (after[one] - threads.get(one, 0.0)) / steps for one in after},
        "digest": float(sum(p.double().sum() for p in contender.parameters.values())),
    }
