"""Process that measures layers on request, for a test that throttles it first."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from benchmarks.support.rpc import RankRpc
from lightning_dlres.pipeline.profile.layer_times import ComputeClock, measure_layers


def main(rpc: RankRpc) -> None:
    torch.set_num_threads(1)
    layers, inputs = [nn.Linear(256, 256) for _ in range(4)], torch.randn(64, 256)
    for _ in rpc.orders():
        clock = ComputeClock(torch.device("cpu"))
        measure_layers(
            layers,
            lambda _, layer: layer,
            inputs,
            clock.device,
            nullcontext,
            seconds=0.6,
            clock=clock,
        )
        rpc.reply({"wall_per_cpu_second": clock.wall_per_cpu_second()})
