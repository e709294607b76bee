"""Rank of benchmarks/gradsync.py: it trains one model with the contender that an order names.

All contenders take turns in the same processes, each with a DistributedDataParallel module of its
own around the same model.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.rpc import Message, RankRpc
from lightning_dlres.gradsync.execute.ddp_hook import compressed_hook
from lightning_dlres.gradsync.execute.ddp_state import GradientSyncState

# Width and number of the layers: 25.2 MB of gradients in float32.
WIDTH, LAYERS = 512, 24
SAMPLES = 16


class Contender:
    """A model with one way of synchronising its gradients.

    Args:
        name: "ddp", "fp16 hook", "alone" (no synchronisation), or a gradient codec.
        options: Further arguments of `GradientSyncState`.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
        self.model: nn.Module = nn.Sequential(*layers)
        self.nbytes = sum(4 * p.numel() for p in self.model.parameters())
        self.state: GradientSyncState | None = None
        if name != "alone":
            wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            self.model = wrapped
            if name == "fp16 hook":
                wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
            elif name != "ddp":
                self.state = GradientSyncState(
                    **{"algorithm": name, "topology": "ps", "coordinator": "none", **options},
                    timeout=60.0,
                )
                wrapped.register_comm_hook(self.state, compressed_hook)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def steps(self, count: int, batch: Tensor) -> list[float]:
        """Train `count` steps; return the seconds of each, from a barrier on."""
        seconds = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            self._optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self._optimizer.step()
            seconds.append(time.perf_counter() - start)
        return seconds


def main(rpc: RankRpc) -> None:
    """Follow orders until the benchmark ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rpc.rank, world_size=rpc.world_size)
    batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(rpc.rank))
    contenders: dict[str, Contender] = {}
    for order in rpc.orders():
        rpc.reply(follow(order, contenders, batch))


def follow(order: Message, contenders: dict[str, Contender], batch: Tensor) -> Message:
    """Train with a contender, made by its first order; return seconds, bytes and processor time."""
    name = order["contender"]
    if name not in contenders:
        contenders[name] = Contender(order["algorithm"], order["options"])
    contender = contenders[name]
    sent, used = sent_bytes(), time.process_time()
    seconds = contender.steps(order["steps"], batch)
    return {
        "seconds": seconds,
        "sent": (sent_bytes() - sent) / order["steps"],
        "cpu": (time.process_time() - used) / order["steps"],
        "gradient_bytes": contender.nbytes,
    }


def sent_bytes() -> int:
    """Return the bytes that this host's interface has sent, by the kernel's counter."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"interface {interface} is not in /proc/net/dev")
