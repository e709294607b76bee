"""Data parallel training of several ranks in one process, with the arithmetic of the real ranks.

A unit is a range of elements of a gradient. It has an owner, as with a parameter server. The owner
adds the decoded gradients of the other ranks to its own, in the order of the ranks. If the codec
transforms gradients, the owner also encodes and decodes its own. The owner encodes the sum, and all
ranks decode it. The results are bitwise those of `GradientSyncState(topology="ps")`, but need no
processes or messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.codecs import codec
from lightning_dlres.codecs.gradient import GradientCodec, State
from lightning_dlres.gradsync.plan.graph import Part
from lightning_dlres.gradsync.plan.plan import RAW, choices_by_size, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec, SyncUnit
from lightning_dlres.kernels.gradients.layout import BLOCK


class VirtualRanks:
    """Codec states of several ranks, which compute the mean of their gradients as real ranks do.

    Args:
        parameters: Parameters by name.
        world_size: Number of ranks.
        algorithm: Name of a gradient codec, or "raw".
        options: Keyword arguments of the codec.
        min_bytes: Gradients with fewer bytes are not compressed.
        has_error_feedback: False drops the codec states of the ranks' gradients after each step, so
            that their residuals are lost.
        has_sum_feedback: False drops the codec states of the sums, likewise.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        world_size: int,
        algorithm: str,
        options: Mapping[str, Any] | None = None,
        *,
        min_bytes: int = 0,
        has_error_feedback: bool = True,
        has_sum_feedback: bool = True,
    ) -> None:
        self._world_size, self._algorithm = world_size, algorithm
        self._codec: GradientCodec | None = None
        if algorithm != RAW:
            new_codec = type(codec(algorithm))(**(options or {}))
            assert isinstance(new_codec, GradientCodec)
            self._codec = new_codec
        self._feedback = {Part.GRADIENT: has_error_feedback, Part.SUM: has_sum_feedback}
        specs = [GradientSpec(name=n, count=p.numel()) for n, p in parameters.items()]
        choices = choices_by_size(
            specs, self._codec, least_elements=-(-min_bytes // 4), world_size=world_size
        )
        self.plan = make_plan(specs, choices, world_size=world_size, topology="ps", alignment=BLOCK)
        self._states: dict[tuple[int, int, Part], State] = {}
        self._step = 0

    def mean(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the decoded means of the ranks' gradients, and advance by a step."""
        means = {name: torch.empty_like(g) for name, g in gradients[0].items()}
        for unit in self.plan.units:
            values = [g[unit.gradient].reshape(-1)[unit.start : unit.stop] for g in gradients]
            target = means[unit.gradient].view(-1)[unit.start : unit.stop]
            target.copy_(self._mean_of_unit(unit, values))
        self._step += 1
        return means

    def _mean_of_unit(self, unit: SyncUnit, values: Sequence[Tensor]) -> Tensor:
        """Return the mean of a unit, given its values on each rank."""
        if unit.codec == RAW or self._codec is None:
            total = values[0].clone()
            for own in values[1:]:
                total += own
            return total * (1 / self._world_size)
        step_codec = self._codec.at_step(self._step)
        total = torch.empty(unit.count)
        for rank, own in enumerate(values):
            if rank == unit.owner and not step_codec.transforms_gradient:
                total = own.clone() if rank == 0 else total + own
                continue
            payload = self._compress(step_codec, unit, Part.GRADIENT, rank, own)
            step_codec.expand(payload, total, accumulate=rank > 0)
        payload = self._compress(step_codec, unit, Part.SUM, unit.owner, total)
        mean = torch.empty(unit.count)
        step_codec.expand(payload, mean, scale=1 / self._world_size)
        return mean

    def _compress(
        self, step_codec: GradientCodec, unit: SyncUnit, part: Part, rank: int, values: Tensor
    ) -> Tensor:
        key = unit.index, rank, part
        if key not in self._states or not self._feedback[part]:
            self._states[key] = step_codec.new_state(
                unit.count, values.device, is_aggregator=part is Part.SUM
            )
        payload = torch.empty(step_codec.payload_bytes(unit.count), dtype=torch.uint8)
        seed = zlib.crc32(repr((self._step, rank, unit.index, int(part))).encode())
        step_codec.compress(values.contiguous(), self._states[key], payload, seed=seed)
        return payload
