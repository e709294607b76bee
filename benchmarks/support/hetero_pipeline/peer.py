"""Rank of the peer: `torch.distributed.pipelining` with Schedule1F1B in a plain loop.

The benchmark sends it orders over `support.rpc`: to prepare a setting, or to run steps of a
prepared one. It keeps a model for each setting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.support.hetero_pipeline.model import (
    loss_of,
    make_loader,
    make_net,
    make_optimizer,
    task_of,
)
from benchmarks.support.rpc import Message, RankRpc


class SettingRun:
    """Stage of this rank under one setting of the peer, with its optimizer and batches.

    Args:
        order: Order to prepare the setting: the fields of `contenders.Setting`, and the task.
        rank: This rank.
    """

    def __init__(self, order: Message, rank: int) -> None:
        task, split, ranks = task_of(order), order["split"], order["ranks"]
        index = ranks.index(rank)
        first = sum(split[:index])
        layers = make_net(task)[first : first + split[index]]
        device = torch.device("cpu")
        stage = PipelineStage(layers, index, len(split), device)
        # By default, stage i would be on rank i.
        stage.stage_index_to_group_rank = dict(enumerate(ranks))
        self.threads = order["threads"]
        self.schedule = Schedule1F1B(stage, order["microbatches"], loss_fn=loss_of)
        self.optimizer = make_optimizer(layers.parameters())
        self.is_first, self.is_last = index == 0, index == len(split) - 1
        self.batches: Iterator[list[Tensor]] = iter(make_loader(task))
        self.layers: nn.Module = layers

    def run(self, steps: int) -> Message:
        """Run steps; return their seconds, the processor time of all threads in them, and on the
        last stage their losses."""
        torch.set_num_threads(self.threads)
        starts, losses = [time.perf_counter()], []
        busy = [time.process_time()]
        for _ in range(steps):
            tokens, targets = next(self.batches)
            self.optimizer.zero_grad()
            parts: list[Tensor] = []
            args = (tokens,) if self.is_first else ()
            target = targets if self.is_last else None
            self.schedule.step(*args, target=target, losses=parts, return_outputs=False)
            self.optimizer.step()
            if self.is_last:
                losses.append(float(torch.stack(parts).mean()))
            starts.append(time.perf_counter())
            busy.append(time.process_time())
        seconds = [end - start for start, end in pairwise(starts)]
        processor_seconds = [end - start for start, end in pairwise(busy)]
        return {"seconds": seconds, "processor_seconds": processor_seconds, "losses": losses}


def main(rpc: RankRpc) -> None:
    """Follow the benchmark's orders. Only an order to prepare a setting has a "split"."""
    settings: dict[str, SettingRun] = {}
    for order in rpc.orders():
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        name = order["name"]
        if "split" in order:
            settings[name] = SettingRun(order, rpc.rank)
            rpc.reply({})
        else:
            rpc.reply(settings[name].run(order["steps"]))
