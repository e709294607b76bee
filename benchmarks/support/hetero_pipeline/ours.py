"""Rank of our pipeline: a Trainer with `HeteroPipeStrategy` that waits between its turns."""

from __future__ import annotations

import time
from itertools import accumulate, pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.support.hetero_pipeline.model import (
    Task,
    loss_of,
    make_loader,
    make_net,
    make_optimizer,
    parameter_bytes,
    task_of,
)
from benchmarks.support.rpc import Message, RankRpc
from lightning_dlres import HeteroPipeStrategy, PipelinePlan, ProfileConfig


class Net(LightningModule):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.net = make_net(task)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, targets = batch
        loss = loss_of(self.net(tokens), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters())


class Turns(Callback):
    """Callback that replies with the times and losses of each turn, and waits for the next order.

    The time of a step is from its start to the start of the next step; so is the processor time of
    all threads.

    Args:
        rpc: Connection to the benchmark.
        turns: Number of steps of each turn.
        strategy: Strategy of the Trainer. The first reply contains its plan.
    """

    def __init__(self, rpc: RankRpc, turns: list[int], strategy: HeteroPipeStrategy) -> None:
        self.rpc, self.strategy = rpc, strategy
        self.ends = {0, *accumulate(turns)}
        self.steps = 0
        self.starts: list[float] = []
        self.busy: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.starts.append(time.perf_counter())
        self.busy.append(time.process_time())
        if self.steps in self.ends:
            self.rpc.reply(self.report())
            self.rpc.next_order()
            self.starts, self.losses = [time.perf_counter()], []
            self.busy = [time.process_time()]
        self.steps += 1

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def report(self) -> Message:
        if not self.steps:
            plan = self.strategy.plan
            assert plan is not None
            return {
                "split": plan.split,
                "ranks": plan.replicas[0],
                "predicted_seconds": plan.predicted_seconds,
                "text": f"{plan.table()}\n{plan.prediction()}",
                "json": plan.to_json(),
                "bytes": self.strategy.resident_parameter_bytes,
            }
        seconds, busy = (
            [end - start for start, end in pairwise(times)] for times in (self.starts, self.busy)
        )
        return {"seconds": seconds, "processor_seconds": busy, "losses": self.losses}


def main(rpc: RankRpc) -> None:
    """Run trainings one after the other.

    An order that is read here starts a training. `Turns` reads the orders during the training: one
    for each turn, and one to end it.
    """
    torch.set_num_threads(1)
    for order in rpc.orders():
        train(rpc, order)


def train(rpc: RankRpc, order: Message) -> None:
    task, world_size = task_of(order), rpc.world_size
    strategy = HeteroPipeStrategy(
        stages=world_size,
        microbatches=order["microbatches"],
        schedule="1f1b",
        recompute="never",
        plan=PipelinePlan.from_json(order["plan"]) if order.get("plan") else None,
        profile=ProfileConfig(seconds=order["profile_seconds"]),
        timeout=order["timeout"],
    )
    turns = Turns(rpc, order["turns"], strategy)
    net = Net(task)
    whole_bytes = parameter_bytes(net)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=world_size,
        strategy=strategy,
        # One more step, because the last turn ends when the next step starts.
        max_steps=sum(order["turns"]) + 1,
        callbacks=[turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, make_loader(task))
    rpc.reply({"whole_bytes": whole_bytes})
