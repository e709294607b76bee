"""States of the codecs when the plan changes between two steps.

A rank keeps what it has not sent, so ranks exchange no residuals. A state is kept if the new plan
has the same unit, codec and part. Any other residual goes to the state for this rank's own
gradient. A rank that completes a unit's sum may encode no gradient of its own; then the residual
goes to the state for the sum. Either way, a residual counts once in the sum of all ranks. Where no
state can take it, as with torch's all-reduce, it is added to this rank's next gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_dlres.codecs.gradient import RESIDUAL, GradientCodec
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.execute.unit_graphs import unit_graph
from lightning_dlres.gradsync.plan.graph import Part, TaskKind
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan
from lightning_dlres.gradsync.plan.units import SyncUnit


def carried_states(
    states: CodecStates,
    old_plan: SyncPlan,
    new_plan: SyncPlan | None,
    codecs: Mapping[str, GradientCodec],
    rank: int,
    device: torch.device,
) -> tuple[CodecStates, dict[str, Tensor]]:
    """Return this rank's states for a new plan, and residuals to be added to its next gradients.

    Args:
        states: States under the old plan, which must not be used afterwards.
        old_plan: Plan until now.
        new_plan: Plan of the same gradients and ranks; None for torch's all-reduce.
        codecs: Codecs of the new plan by name.
        rank: This rank.
        device: Device of the gradients.

    Returns:
        The states, and residuals without the loss scale, float32[elements] by gradient. Without a
        new plan, every gradient has one, on all ranks alike.
    """
    carried, unsent = CodecStates(), _Unsent(old_plan, device)
    if new_plan is None:
        # The ranks gather residuals for a checkpoint only if there are some. All ranks must take
        # part, so each one gets some, even if they are zeros.
        unsent.add_zeros()
    remaining = dict(states.by_key)
    parts = {} if new_plan is None else _encoded_parts(new_plan, codecs, rank)
    old_codecs, new_codecs = _codecs_of(old_plan.units), _codecs_of(parts)
    for key in [(u.gradient, u.start, u.stop, part) for u in parts for part in parts[u]]:
        if key in remaining and old_codecs[key[:3]] == new_codecs[key[:3]]:
            carried.by_key[key] = remaining.pop(key)
    for (gradient, start, stop, _), state in remaining.items():
        residual = state.get(RESIDUAL)
        if residual is None:
            continue
        units = [] if new_plan is None else new_plan.units_of(gradient)
        for unit in units:
            first, end = max(start, unit.start), min(stop, unit.stop)
            if first >= end:
                continue
            piece = residual[first - start : end - start]
            target = None
            if parts.get(unit):
                # This rank's own gradient rather than the sum.
                part = Part.GRADIENT if Part.GRADIENT in parts[unit] else Part.SUM
                target = carried.of(unit, part, codecs[unit.codec], device).get(RESIDUAL)
            if target is None:
                unsent.add(gradient, first, piece)
            else:
                target[first - unit.start : end - unit.start] += piece
        if not units:
            unsent.add(gradient, start, residual)
    return carried, unsent.values


def _codecs_of(units: Iterable[SyncUnit]) -> dict[tuple[str, int, int], str]:
    """Return the name of each unit's codec by gradient, first element and end of the elements."""
    return {(unit.gradient, unit.start, unit.stop): unit.codec for unit in units}


def _encoded_parts(
    plan: SyncPlan, codecs: Mapping[str, GradientCodec], rank: int
) -> dict[SyncUnit, set[Part]]:
    """Return the parts of each compressed unit that a rank encodes, and so has states for."""
    return {
        unit: {
            task.part
            for task in unit_graph(plan, unit, rank, codecs)
            # A gradient for another rank of the host is sent as it is.
            if task.kind is TaskKind.ENCODE and task.part is not Part.HOST
        }
        for unit in plan.units
        if unit.codec != RAW
    }


class _Unsent:
    """Residuals by gradient that no state can take.

    Args:
        plan: Plan whose units have all elements of the gradients.
        device: Device of the gradients.

    Attributes:
        values: float32[elements] by gradient.
    """

    def __init__(self, plan: SyncPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self.values: dict[str, Tensor] = {}

    def add_zeros(self) -> None:
        """Add zeros for every gradient of the plan."""
        for gradient, count in self._plan.gradient_counts().items():
            self._add_zeros(gradient, count)

    def add(self, gradient: str, start: int, piece: Tensor) -> None:
        """Add a piece that begins at element `start` of a gradient."""
        if gradient not in self.values:
            self._add_zeros(gradient, self._plan.gradient_counts()[gradient])
        self.values[gradient][start : start + piece.numel()] += piece

    def _add_zeros(self, gradient: str, count: int) -> None:
        self.values[gradient] = torch.zeros(count, device=self._device)
