"""Times of the compute tasks of codecs on this rank: encode, merge and decode.

All ranks measure at the same time, as they compute at the same time in training. The tasks work on
several units in turn, since a unit is in no cache when its step comes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.gradsync.plan.costs import CodecCosts
from lightning_dlres.gradsync.plan.plan import RAW
from lightning_dlres.gradsync.profile.linear_fit import linear_cost
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages

# Elements of the small unit, whose time is mostly the fixed time.
_SMALL = 4096
# Units in turn. The largest ones fill more than the caches of a processor's core.
_UNITS = 4
# Least and most measurements of each task.
_LEAST_REPEATS, _MOST_REPEATS = 3, 16
# Step whose codec is measured: after any warm-up.
_STEP = 1 << 30


def measure_codecs(
    codecs: Mapping[str, GradientCodec],
    messages: ProbeMessages,
    device: torch.device,
    *,
    unit_elements: int,
    seconds: float,
) -> dict[str, CodecCosts]:
    """Return the costs of codecs, and of raw elements, on the slowest rank; called by all ranks.

    Args:
        codecs: Codecs by name, the same on all ranks.
        messages: Messages to the other ranks.
        device: Device of the gradients.
        unit_elements: Elements of a large unit.
        seconds: Time for all codecs. A slow codec may exceed it.

    Raises:
        PeerError: If a rank is late or lost.
    """
    counts = _SMALL, max(unit_elements, 4 * _SMALL)
    names = [RAW, *codecs]
    for name in codecs:
        # The first calls compile kernels or load them.
        first = _CodecTasks(codecs[name], _Gradients(1, _SMALL, device))
        for task in (first.encode, first.merge, first.decode):
            task(0)
    messages.gather([])
    budget = seconds / (3 * len(counts) * len(names))
    own = []
    for count in counts:
        gradients = _Gradients(_UNITS, count, device)
        for name in names:
            tasks = _RawTasks(gradients) if name == RAW else _CodecTasks(codecs[name], gradients)
            # The first step of a codec may differ. It also makes the payloads.
            tasks.encode_all()
            for task in (tasks.encode, tasks.merge, tasks.decode):
                own.append(_task_seconds(task, device, budget))
    slowest = messages.slowest(own)
    middle = len(slowest) // 2
    lines = [
        linear_cost((counts[0], small), (counts[1], large))
        for small, large in zip(slowest[:middle], slowest[middle:], strict=True)
    ]
    return {
        name: CodecCosts(encode=encode, merge=merge, decode=decode)
        for name, encode, merge, decode in zip(
            names, lines[::3], lines[1::3], lines[2::3], strict=True
        )
    }


def _task_seconds(task: Callable[[int], None], device: torch.device, budget: float) -> float:
    """Return the lower quartile of a task's times, because pauses by other processes lengthen some
    of them."""
    seconds: list[float] = []
    while len(seconds) < _LEAST_REPEATS or (len(seconds) < _MOST_REPEATS and sum(seconds) < budget):
        _synchronise(device)
        start = time.perf_counter()
        task(len(seconds) % _UNITS)
        _synchronise(device)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 4]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Gradients:
    """Gradients and sums of some units."""

    def __init__(self, units: int, count: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(count, generator=generator).to(device)
        self.count, self.device = count, device
        self.values = [values.roll(unit) for unit in range(units)]
        self.sums = [torch.zeros_like(values).copy_(values) for _ in range(units)]


class _Tasks(ABC):
    """The compute tasks of some units, with the allocations that the executor makes.

    Args:
        gradients: Gradients and sums of the units.
    """

    def __init__(self, gradients: _Gradients) -> None:
        self._gradients = gradients

    @abstractmethod
    def encode(self, unit: int) -> None:
        """Encode the gradient of a unit."""

    @abstractmethod
    def merge(self, unit: int) -> None:
        """Decode the payload of a unit, and add it to the sum."""

    @abstractmethod
    def decode(self, unit: int) -> None:
        """Decode the payload of a unit, and divide it by the number of ranks."""

    def encode_all(self) -> None:
        """Encode the gradients of all units once."""
        for unit in range(len(self._gradients.values)):
            self.encode(unit)


class _CodecTasks(_Tasks):
    """Tasks of a codec."""

    def __init__(self, codec: GradientCodec, gradients: _Gradients) -> None:
        super().__init__(gradients)
        self._codec = codec.at_step(_STEP)
        count, device = gradients.count, gradients.device
        self._states = [codec.new_state(count, device) for _ in gradients.values]
        self._payloads: dict[int, Tensor] = {}

    @override
    def encode(self, unit: int) -> None:
        values = self._gradients.values[unit]
        nbytes = self._codec.payload_bytes(self._gradients.count)
        payload = torch.empty(nbytes, dtype=torch.uint8, device=values.device)
        self._codec.compress(values, self._states[unit], payload, seed=unit)
        self._payloads[unit] = payload

    @override
    def merge(self, unit: int) -> None:
        self._codec.expand(self._payloads[unit], self._gradients.sums[unit], accumulate=True)

    @override
    def decode(self, unit: int) -> None:
        self._codec.expand(self._payloads[unit], self._gradients.sums[unit], scale=0.5)


class _RawTasks(_Tasks):
    """Tasks of elements that are sent as they are."""

    @override
    def encode(self, unit: int) -> None:
        self._gradients.values[unit].view(torch.uint8)

    @override
    def merge(self, unit: int) -> None:
        self._gradients.sums[unit].add_(self._gradients.values[unit])

    @override
    def decode(self, unit: int) -> None:
        torch.mul(self._gradients.values[unit], 0.5, out=self._gradients.sums[unit])
