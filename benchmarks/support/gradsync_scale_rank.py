"""Rank of benchmarks/gradsync_scale.py: it measures costs, and trains one model with a plan.

All ranks measure and train at the same time, since they share the machine's processors.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.gradsync_contender import LAYERS, WIDTH
from benchmarks.support.gradsync_rank import SAMPLES
from benchmarks.support.rpc import Message, RankRpc
from lightning_dlres.codecs import base as registry
from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.session import SyncSession
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.hook.gradient_fusion import FUSED_BYTES, GradientFusion
from lightning_dlres.gradsync.plan.units import GradientSpec
from lightning_dlres.gradsync.profile.measurement import measure_costs
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages

# Gradients with fewer bytes are not compressed, as by default.
_MIN_BYTES = 16384
# Options that leave the cost model no choice of topology, and use no coordinator.
_DEFAULTS = {"topology": "ps", "coordinator": "none", "min_bytes": _MIN_BYTES}


class TimedState(GradientSyncState):
    """State that records when each gradient is ready.

    Attributes:
        started: Start of the step, set by the caller, from `time.perf_counter`.
        ready: For each parameter, by name, and each step: seconds from `started` until the bucket
            with its gradient was ready.
    """

    ready: dict[str, list[float]]

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(**options)
        self.started = 0.0
        self.ready = defaultdict(list)
        self._name_by_parameter = {p: name for name, p in module.named_parameters()}
        self.name_parameters(module.named_parameters())
        self._fusion = GradientFusion(
            [GradientSpec(name=n, count=p.numel()) for n, p in module.named_parameters()],
            most_elements=_MIN_BYTES // 4 - 1,
            fused_elements=FUSED_BYTES // 4,
        )

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Record the time, and synchronise the bucket."""
        seconds = time.perf_counter() - self.started
        for parameter in bucket.parameters():
            self.ready[self._name_by_parameter[parameter]].append(seconds)  # type: ignore[index]
        return super().reduce(bucket)

    def ready_in_plan(self) -> dict[str, list[float]]:
        """Return `ready` for the plan's gradients; a fused one is ready with its last member."""
        return {
            spec.name: [
                max(times)
                for times in zip(
                    *(self.ready[name] for name in self._fusion.members(spec.name)), strict=True
                )
            ]
            for spec in self._fusion.specs
        }


class Training:
    """A model whose gradients are synchronised.

    Args:
        algorithm: Codec of the gradients, or "raw".
        options: Further arguments of `GradientSyncState`.
    """

    def __init__(self, algorithm: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
        self.model = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)
        self.state = TimedState(
            self.model.module, algorithm=algorithm, timeout=60.0, **_DEFAULTS | options
        )
        self.model.register_comm_hook(self.state, compressed_hook)

    def steps(self, count: int, batch: Tensor) -> list[float]:
        """Train `count` steps; return the seconds of each.

        A step lasts from a barrier of all ranks until all gradients are means.
        """
        seconds = []
        for times in self.state.ready.values():
            times.clear()
        for _ in range(count):
            dist.barrier()
            self.state.started = time.perf_counter()
            self.model(batch).square().mean().backward()
            seconds.append(time.perf_counter() - self.state.started)
            self.model.zero_grad()
        return seconds


def main(rpc: RankRpc) -> None:
    """Follow orders until the benchmark ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rpc.rank, world_size=rpc.world_size)
    batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(rpc.rank))
    trainings: dict[str, Training] = {}
    for order in rpc.orders():
        if "measure" in order:
            rpc.reply(measure(order["measure"], order["elements"]))
        else:
            rpc.reply(train(order, trainings, batch))


def train(order: Message, trainings: dict[str, Training], batch: Tensor) -> Message:
    """Train with the plan of a contender, which its first order makes.

    Args:
        order: "contender" (its name), "algorithm", "options" and "steps"; see `Training`.
        trainings: Trainings by contender.
        batch: Input of the model, float32[SAMPLES, WIDTH].

    Returns:
        "seconds" of each step; "ready", see `TimedState.ready_in_plan`; and the "units" of the
        plan, each as [gradient, start, stop, codec, owner].
    """
    name = order["contender"]
    if name not in trainings:
        trainings[name] = Training(order["algorithm"], order["options"])
    training = trainings[name]
    seconds = training.steps(order["steps"], batch)
    plan = training.state.plan
    assert plan is not None
    return {
        "seconds": seconds,
        "ready": training.state.ready_in_plan(),
        "units": [[u.gradient, u.start, u.stop, u.codec, u.owner] for u in plan.units],
    }


def measure(codecs: list[str], elements: int) -> Message:
    """Measure the costs with all ranks, and return them as plain data.

    Args:
        codecs: Names of the codecs.
        elements: Elements of all gradients.
    """
    session = SyncSession(timeout=60.0, check=lambda: None, tracer=Tracer(enabled=False))
    costs = measure_costs(
        ProbeMessages(session.mailbox),
        gradient_codecs_of(codecs),
        torch.device("cpu"),
        elements=elements,
    )
    dist.barrier()
    session.close(orderly=True)
    return asdict(costs)


def gradient_codecs_of(names: list[str]) -> dict[str, GradientCodec]:
    """Return codecs by name, with their default options."""
    codecs = {name: registry.codec(name) for name in names}
    return {name: codec for name, codec in codecs.items() if isinstance(codec, GradientCodec)}
