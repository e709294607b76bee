"""Slow definition of 1-bit Adam in NumPy: all ranks in one loop, with two-way error feedback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Arrays = dict[str, Floats]
# First element, end, owner and flag of compression of the partitions of a parameter.
Partitions = Sequence[tuple[int, int, int, bool]]


class OneBitAdamOracle:
    """State of all ranks. `decoded` returns what a codec makes of float32 values."""

    def __init__(
        self,
        parameters: Arrays,
        world_size: int,
        partitions: Mapping[str, Partitions],
        decoded: Callable[[Floats], Floats],
        *,
        topology: str,
        freeze_step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: Mapping[str, float],
    ) -> None:
        self.parameters = {name: value.copy() for name, value in parameters.items()}
        self.momentum = {name: np.zeros_like(value) for name, value in parameters.items()}
        self.variance = {name: np.zeros_like(value) for name, value in parameters.items()}
        self.errors: dict[tuple[str, int, str | int], Floats] = {}
        self.world_size, self.partitions, self.decoded = world_size, partitions, decoded
        self.is_ring = topology == "ring"
        self.freeze_step, self.lr, self.betas, self.eps = freeze_step, lr, betas, eps
        self.weight_decay = weight_decay
        self.steps = 0

    def step(self, gradients: Sequence[Arrays]) -> None:
        """Update the parameters with the gradients of all ranks."""
        self.steps += 1
        beta1, beta2 = self.betas
        for name in self.parameters:
            own = [rank[name] for rank in gradients]
            if self.steps <= self.freeze_step:
                mean = sum(own) / self.world_size
                self.momentum[name] = beta1 * self.momentum[name] + (1 - beta1) * mean
                self.variance[name] = beta2 * self.variance[name] + (1 - beta2) * mean**2
                update = self.momentum[name] / self.root(name)
            else:
                # The momentum is in units of the update from here on.
                local = [
                    beta1 * self.momentum[name] + (1 - beta1) * g / self.root(name) for g in own
                ]
                update = self.momentum[name] = self.mean(name, local)
            self.parameters[name] *= 1 - self.lr * self.weight_decay[name]
            self.parameters[name] -= self.lr * update / (1 - beta1**self.steps)
            if self.steps == self.freeze_step:
                self.momentum[name] /= self.root(name)

    def root(self, name: str) -> Floats:
        counted = min(self.steps, self.freeze_step)
        return np.sqrt(self.variance[name] / (1 - self.betas[1] ** counted)) + self.eps

    def mean(self, name: str, values: Sequence[Floats]) -> Floats:
        result = np.empty_like(values[0])
        for start, stop, owner, is_compressed in self.partitions[name]:
            parts = [value[start:stop] for value in values]
            if not is_compressed:
                result[start:stop] = sum(parts) / self.world_size
                continue
            if self.is_ring:
                order = [(owner + i) % self.world_size for i in range(self.world_size)]
                total = parts[order[0]]
                for rank, following in pairwise(order):
                    total = self.sent(name, start, rank, total) + parts[following]
            else:
                # The owner has its own part without any error.
                total = sum(
                    part if rank == owner else self.sent(name, start, rank, part)
                    for rank, part in enumerate(parts)
                )
            result[start:stop] = self.sent(name, start, "sum", total) / self.world_size
        return result

    def sent(self, name: str, start: int, role: str | int, values: Floats) -> Floats:
        key = name, start, role
        exact = values + self.errors.get(key, 0)
        sent = self.decoded(exact)
        self.errors[key] = exact - sent
        return sent
