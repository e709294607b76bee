"""Contender of benchmarks/gradsync.py: a model with one way of synchronising its gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.blocking_codec import BlockingCodec, blocking_hook
from lightning_dlres.gradsync.hook import planner
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.hook.lazy_hook import LazyHook

# Width and number of the layers: 25.2 MB of gradients in float32, or 100.8 MB with wide layers.
WIDTH, WIDE, LAYERS = 512, 1024, 24
# Larger than the model, so that all gradients are in one bucket. With several buckets, PowerSGD's
# hook deadlocks gloo.
ONE_BUCKET_MB = 1000.0
# Size of a bucket of the algorithms that `_BUCKETS_MB` does not name, as in
# `CompressedDDPStrategy`.
_OWN_BUCKETS_MB = 8.0
# Size of a bucket by algorithm; None: the default of DistributedDataParallel. "none" is the
# algorithm of `GradientSyncState` that leaves the all-reduce to torch.
_BUCKETS_MB = {"ddp": None, "fp16 hook": None, "none": None, "powersgd": ONE_BUCKET_MB}
# Rank of PowerSGD's matrices, in the middle of those that its authors use (Vogels et al., 2019).
_POWERSGD_RANK = 2


class EmulatedCompute(torch.autograd.Function):
    """Identity function that sleeps in forward and backward.

    It stands for computation on a device of the rank's own: it takes time, but none of the
    processors that all hosts of the testbed share.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:  # type: ignore[override]
        """Sleep `forward` seconds, and return `x`; backward will sleep `backward` seconds."""
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Sleep, and pass the gradient on."""
        time.sleep(ctx.seconds)
        return gradient, None, None


class Layer(nn.Module):
    """Linear layer and ReLU, with emulated compute.

    Args:
        width: Number of inputs and of outputs.

    Attributes:
        seconds: Emulated seconds of forward and backward together; backward takes two thirds.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        y = self.linear(x).relu()
        if self.seconds:
            # Backward sleeps before the layer's gradients are ready.
            y = EmulatedCompute.apply(y, self.seconds / 3, self.seconds * 2 / 3)
        return y


class Contender:
    """A model with one way of synchronising its gradients.

    Args:
        algorithm: "alone" (no synchronisation), "ddp", "fp16 hook", "powersgd", "blocking" followed
            by a gradient codec (see `BlockingCodec`), or an algorithm of `GradientSyncState`.
        options: Further arguments of `GradientSyncState`, and two of this class. `bucket_cap_mb` is
            for DistributedDataParallel; without it, buckets are as in `_BUCKETS_MB`. `batches` set
            to False sends the payload of each unit in a message of its own, if "topology" is given.
        layers: Number of the model's layers.
        width: Width of the layers.

    Attributes:
        model: The model, wrapped in DistributedDataParallel unless it is "alone".
        nbytes: Bytes of the gradients in float32.
        state: State of our hook; None without it.
    """

    def __init__(
        self, algorithm: str, options: dict[str, Any], layers: int = LAYERS, width: int = WIDTH
    ) -> None:
        torch.manual_seed(0)
        options = dict(options)
        self.model: nn.Module = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self._layers = list(self.model.children())
        self.nbytes = sum(4 * p.numel() for p in self.model.parameters())
        self.state: GradientSyncState | None = None
        self._hook: LazyHook | None = None
        self._batches = options.pop("batches", True)
        if algorithm != "alone":
            cap = options.pop("bucket_cap_mb", _BUCKETS_MB.get(algorithm, _OWN_BUCKETS_MB))
            wrapped = DistributedDataParallel(
                self.model, gradient_as_bucket_view=True, bucket_cap_mb=cap
            )
            self._register(wrapped, algorithm, options)
            self.model = wrapped
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def _register(
        self, wrapped: DistributedDataParallel, algorithm: str, options: dict[str, Any]
    ) -> None:
        if algorithm == "fp16 hook":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif algorithm == "powersgd":
            state = PowerSGDState(None, _POWERSGD_RANK, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook)
        elif algorithm.startswith("blocking "):
            blocking = BlockingCodec(algorithm.removeprefix("blocking "))
            wrapped.register_comm_hook(blocking, blocking_hook)
        elif algorithm != "ddp":
            self.state = GradientSyncState(algorithm=algorithm, timeout=60.0, **options)
            self.state.name_parameters(wrapped.module.named_parameters())
            # As in `CompressedDDPStrategy`.
            self.state.open(torch.device("cpu"))
            self._hook = LazyHook(self.state, wrapped)

    def steps(self, count: int, batch: Tensor, emulated: float = 0.0) -> float:
        """Train `count` steps after a barrier of all ranks; return the mean seconds of a step.

        There is no barrier between steps, as there is none in a training. All ranks share the
        machine's processors. At a barrier, early ranks would wait and leave the processors to the
        late ones, which would then compute too fast.

        Args:
            count: Number of steps.
            batch: Input of the model, float32[samples, width].
            emulated: Emulated seconds of computation in a step.
        """
        for layer in self._layers:
            layer.seconds = emulated / len(self._layers)  # type: ignore[assignment]
        with _batched(self._batches):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                self._optimizer.zero_grad()
                loss = self.model(batch).square().mean()
                with nullcontext() if self._hook is None else self._hook.backward():
                    loss.backward()
                self._optimizer.step()
            return (time.perf_counter() - start) / count

    def chosen(self) -> str:
        """Return the choices of our cost model: algorithm, topology, and "replay" if a coordinator
        plans the messages. Other contenders have no choices: ""."""
        if self.state is None or self.state.plan is None:
            return self.state.algorithm if self.state is not None else ""
        synchroniser = self.state.synchroniser
        is_coordinated = synchroniser is not None and synchroniser.coordinator is not None
        parts = [self.state.algorithm, self.state.plan.topology, "replay" * is_coordinated]
        return " ".join(filter(None, parts))


@contextmanager
def _batched(is_batched: bool) -> Iterator[None]:
    """Context manager in which plans of a fixed topology send each payload as a message of its own,
    unless `is_batched`."""
    before = planner.make_plan
    if not is_batched:
        planner.make_plan = partial(before, message_bytes=1)
    try:
        yield
    finally:
        planner.make_plan = before
