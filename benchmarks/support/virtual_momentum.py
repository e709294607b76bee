"""`OneBitAdam` on several ranks in one process, with the arithmetic of the real ranks.

Each rank has an optimizer and a model of its own. The optimizers step in threads, and meet where
real ranks exchange their momenta. The means come from `VirtualRanks`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.support.virtual_ranks import VirtualRanks
from lightning_dlres.gradsync.optimizers import MomentumSync, OneBitAdam
from lightning_dlres.gradsync.plan.plan import RAW


class MomentumRanks:
    """Ranks that train with `OneBitAdam`, each with its own gradients.

    Args:
        model: Model of rank 0; the other ranks have copies of it.
        world_size: Number of ranks.
        algorithm: Name of the momentum's codec.
        options: Arguments of `OneBitAdam`.
        ranks_options: Further arguments of `VirtualRanks`.

    Attributes:
        optimizers: Optimizer of each rank.
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        algorithm: str,
        options: Mapping[str, Any],
        **ranks_options: Any,
    ) -> None:
        models = [model, *(copy.deepcopy(model) for _ in range(world_size - 1))]
        self._parameters = [dict(m.named_parameters()) for m in models]
        self._warm_up = VirtualRanks(self._parameters[0], world_size, RAW)
        # A thread for each rank, since each one waits for the others.
        self._threads = ThreadPoolExecutor(world_size)
        meeting = self._meeting = _Meeting(world_size, algorithm, ranks_options)
        self.optimizers = [
            OneBitAdam(m.parameters(), sync=_VirtualSync(meeting, rank), **options)
            for rank, m in enumerate(models)
        ]

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        """Update the models of all ranks, given each rank's own gradients.

        Raises:
            Exception: The error of a rank.
        """
        if not self.optimizers[0].is_frozen:
            gradients = [self._warm_up.mean(gradients)] * len(gradients)
        for parameters, own in zip(self._parameters, gradients, strict=True):
            for name, gradient in own.items():
                parameters[name].grad = gradient
        steps = [self._threads.submit(self._step_of_rank, one) for one in self.optimizers]
        errors = [step.exception() for step in steps]
        # The other ranks only report that one rank has failed.
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        for error in filter(None, errors):
            raise error

    def _step_of_rank(self, optimizer: OneBitAdam) -> None:
        try:
            optimizer.step()
        except BaseException:
            self._meeting.abort()
            raise


class _Meeting:
    """Place where the threads of all ranks exchange flags and momenta."""

    def __init__(self, world_size: int, algorithm: str, options: Mapping[str, Any]) -> None:
        self.momenta: list[Mapping[str, Tensor]] = [{}] * world_size
        self.means: dict[str, Tensor] = {}
        self.flags: list[Sequence[bool]] = [()] * world_size
        self.flag_barrier = threading.Barrier(world_size)
        self.momentum_barrier = threading.Barrier(world_size, action=self._average)
        self._algorithm, self._options = algorithm, options
        self._ranks: VirtualRanks | None = None

    def abort(self) -> None:
        """Let no rank wait for one that failed."""
        self.flag_barrier.abort()
        self.momentum_barrier.abort()

    def _average(self) -> None:
        if self._ranks is None:
            # `VirtualRanks` needs only names and sizes: those of the momenta.
            parameters = {name: nn.Parameter(m.detach()) for name, m in self.momenta[0].items()}
            self._ranks = VirtualRanks(
                parameters, len(self.momenta), self._algorithm, **self._options
            )
        self.means = self._ranks.mean(self.momenta)


class _VirtualSync(MomentumSync):
    """Synchronisation of one virtual rank."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        super().__init__()
        self._meeting, self._rank = meeting, rank
        self.has_hook = True

    @property
    @override
    def world_size(self) -> int:
        return len(self._meeting.momenta)

    @override
    def agree(self, flag: bool) -> bool:
        # The ranks are equal bit for bit, and so are their flags.
        return flag

    @override
    def require_same(self, parameters: Sequence[Tensor]) -> None:
        """Do nothing: the models are copies of one."""

    @override
    def begin_step(self, flags: Sequence[bool]) -> list[bool]:
        self._meeting.flags[self._rank] = flags
        self._meeting.flag_barrier.wait()
        return [any(of_ranks) for of_ranks in zip(*self._meeting.flags, strict=True)]

    @override
    def average(self, momenta: Mapping[str, Tensor]) -> None:
        if not momenta:
            # The warm-up synchronises none.
            return
        self._meeting.momenta[self._rank] = momenta
        self._meeting.momentum_barrier.wait()
        with torch.no_grad():
            for name, momentum in momenta.items():
                momentum.copy_(self._meeting.means[name])
