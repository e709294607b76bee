"""States of the codecs between steps: what each unit has not sent yet.

Compression in two directions makes two errors. A rank keeps a state for its own gradient, and the
rank that completes a unit's sum keeps another one for the sum.
"""

from __future__ import annotations

import torch

from lightning_dlres.codecs.gradient import GradientCodec, State
from lightning_dlres.gradsync.plan.graph import Part
from lightning_dlres.gradsync.plan.units import SyncUnit

# Gradient, first element, end of the elements, and part of a state.
StateKey = tuple[str, int, int, Part]


class CodecStates:
    """The states of one rank, by (gradient, partition, part)."""

    def __init__(self) -> None:
        self._states: dict[StateKey, State] = {}

    def of(self, unit: SyncUnit, part: Part, codec: GradientCodec, device: torch.device) -> State:
        """Return the state of a unit's own gradient or of its sum; a new one at first.

        Args:
            unit: The unit.
            part: `Part.GRADIENT` for this rank's gradient, `Part.SUM` for the sum.
            codec: Codec of the unit.
            device: Device of the gradient.
        """
        key = unit.gradient, unit.start, unit.stop, part
        if key not in self._states:
            is_sum = part is Part.SUM
            self._states[key] = codec.new_state(unit.count, device, is_aggregator=is_sum)
        return self._states[key]

    def items(self) -> dict[StateKey, State]:
        """Return all states by key."""
        return self._states

    def clear(self) -> None:
        """Forget all states."""
        self._states.clear()
