"""Rank of benchmarks/gradsync.py: it trains one model with the contender that an order names.

All contenders take turns in the same processes, each with a DistributedDataParallel module of its
own around a model of its own.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.gradsync_contender import WIDE, Contender
from benchmarks.support.rpc import Message, RankRpc

# Largest number of samples of a rank in a step.
SAMPLES = 16


def main(rpc: RankRpc) -> None:
    """Follow orders until the benchmark ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rpc.rank, world_size=rpc.world_size)
    batch = torch.randn(SAMPLES, WIDE, generator=torch.Generator().manual_seed(rpc.rank))
    contenders: dict[str, Contender] = {}
    for order in rpc.orders():
        rpc.reply(follow(order, contenders, batch))


def follow(order: Message, contenders: dict[str, Contender], batch: Tensor) -> Message:
    """Train with a contender, which its first order makes.

    Args:
        order: "contender" (its name); "algorithm" and "options", see `Contender`; "layers" of the
            model, and their "width"; "steps", "samples" of this rank in a step, and "emulated"
            seconds of computation in a step.
        contenders: Contenders by name.
        batch: Input of the model, float32[SAMPLES, WIDE]; its first samples and columns are used.

    Returns:
        "seconds" of a step; bytes "sent" and processor seconds ("cpu") of a step;
        "gradient_bytes" of the model; and the choices of the cost model ("chosen").
    """
    name = order["contender"]
    if name not in contenders:
        contenders[name] = Contender(
            order["algorithm"], order["options"], order["layers"], order["width"]
        )
    contender = contenders[name]
    inputs = batch[: order.get("samples", SAMPLES), : order["width"]].contiguous()
    sent, used = sent_bytes(), time.process_time()
    seconds = contender.steps(order["steps"], inputs, order.get("emulated", 0.0))
    return {
        "seconds": seconds,
        "sent": (sent_bytes() - sent) / order["steps"],
        "cpu": (time.process_time() - used) / order["steps"],
        "gradient_bytes": contender.nbytes,
        "chosen": contender.chosen(),
    }


def sent_bytes() -> int:
    """Return the bytes that this host's interface has sent, by the kernel's counter."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"interface {interface} is not in /proc/net/dev")
