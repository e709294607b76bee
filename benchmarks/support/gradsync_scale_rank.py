"""Rank of benchmarks/gradsync_scale.py: it measures costs, and trains one model with a plan.

All ranks measure and train at the same time, since they share the machine's processors.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.gradsync_rank import LAYERS, SAMPLES, WIDTH
from benchmarks.support.rpc import Message, RankRpc
from lightning_dlres.codecs import base as registry
from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.comm.mailbox import Channel, Mailbox
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.ddp_hook import compressed_hook
from lightning_dlres.gradsync.execute.ddp_state import GradientSyncState
from lightning_dlres.gradsync.plan.plan import RAW

# Elements of the units that are measured.
SMALL, LARGE = 4096, 1 << 18
# Times that a task or an exchange of messages is repeated. The least time counts, because other
# processes on the machine only add to it.
_TIMES = 12
# Bytes of messages, and large ones in a row: as many bytes as in a step wait for each other.
_SMALL_BYTES, _LARGE_BYTES, _LARGE_MESSAGES, _LARGE_TIMES = 512, 1 << 20, 8, 4


class TimedState(GradientSyncState):
    """State that records when each gradient is ready.

    Attributes:
        started: Start of the step, set by the caller, from `time.perf_counter`.
        ready: Seconds from `started` at which the gradients of each bucket were ready, for each
            step, by the parameter's name.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(**options)
        self.started = 0.0
        self.ready: dict[str, list[float]] = defaultdict(list)
        self._known = {parameter: name for name, parameter in module.named_parameters()}
        self.name_parameters(module.named_parameters())

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Record the time, and synchronise the bucket."""
        seconds = time.perf_counter() - self.started
        for parameter in bucket.parameters():
            self.ready[self._known[parameter]].append(seconds)  # type: ignore[index]
        return super().reduce(bucket)


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
        self.state = TimedState(self.model.module, algorithm=algorithm, timeout=60.0, **options)
        self.model.register_comm_hook(self.state, compressed_hook)

    def steps(self, count: int, batch: Tensor) -> list[float]:
        """Train `count` steps; return the seconds of each from a barrier to the last gradient."""
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
            rpc.reply(measure(order["measure"]))
        else:
            rpc.reply(train(order, trainings, batch))


def train(order: Message, trainings: dict[str, Training], batch: Tensor) -> Message:
    """Train with a plan, made in the first order; return the plan, and the times of each step."""
    name = order["contender"]
    if name not in trainings:
        trainings[name] = Training(order["algorithm"], order["options"])
    training = trainings[name]
    seconds = training.steps(order["steps"], batch)
    plan = training.state.plan
    assert plan is not None
    return {
        "seconds": seconds,
        "ready": dict(training.state.ready),
        "units": [[u.gradient, u.start, u.stop, u.codec, u.owner] for u in plan.units],
    }


def measure(codecs: list[str]) -> Message:
    """Return the seconds of tasks and messages on this rank.

    Returns:
        "codecs": for each codec, the seconds of encode, merge and decode of `SMALL` and of `LARGE`
        elements. "small", "burst", "large": for each of several exchanges, the seconds until a
        small message, each of many small ones, and each of many with "large_bytes" have arrived.
        "call": seconds to hand over a small message.
    """
    times: dict[str, list[list[float]]] = {}
    for name in (RAW, *codecs):
        dist.barrier()
        times[name] = [[_least(task) for task in _tasks(name, count)] for count in (SMALL, LARGE)]
    return {"codecs": times, "large_bytes": _LARGE_BYTES, **_message_seconds()}


def _tasks(name: str, count: int) -> tuple[Callable[[], object], ...]:
    """Return encode, merge and decode of a codec, as `UnitRun` calls them."""
    values, total = torch.randn(count), torch.zeros(count)
    if name == RAW:
        return (
            lambda: values.view(torch.uint8),
            lambda: total.add_(values),
            lambda: torch.mul(values, 0.5, out=total),
        )
    codec = registry.codec(name)
    assert isinstance(codec, GradientCodec)
    state = codec.new_state(count, values.device)
    payload = torch.empty(codec.payload_bytes(count), dtype=torch.uint8)
    codec.compress(values, state, payload)
    return (
        lambda: codec.compress(values, state, payload),
        lambda: codec.expand(payload, total, accumulate=True),
        lambda: codec.expand(payload, total, scale=0.5),
    )


def _least(task: Callable[[], object]) -> float:
    task()
    seconds = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        task()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _message_seconds() -> Message:
    """Exchange messages with the neighbours; every link carries one in each direction."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    group = dist.new_group(backend="gloo")
    names = [f"rank {other}" for other in range(world_size)]
    mailbox = Mailbox(
        group, rank, names, timeout=60.0, check=lambda: None, tracer=Tracer(enabled=False)
    )

    def exchange(nbytes: int, count: int = 1) -> tuple[float, float]:
        """Return the seconds of a message, and of its hand-over."""
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            mailbox.send(following, Channel.GRADIENT, ("probe",), tensor)
        handed_over = time.perf_counter()
        for _ in range(count):
            mailbox.receive(previous, Channel.GRADIENT, ("probe",), "a probe")
        return (time.perf_counter() - start) / count, (handed_over - start) / count

    exchange(_SMALL_BYTES)
    small = [exchange(_SMALL_BYTES) for _ in range(_TIMES)]
    burst = [exchange(_SMALL_BYTES, 20) for _ in range(_TIMES)]
    large = [exchange(_LARGE_BYTES, _LARGE_MESSAGES) for _ in range(_LARGE_TIMES)]
    dist.barrier()
    mailbox.close(orderly=True)
    dist.destroy_process_group(group)
    return {
        "small": [seconds for seconds, _ in small],
        "burst": [seconds for seconds, _ in burst],
        "large": [seconds for seconds, _ in large],
        "call": min(call for _, call in burst),
    }
