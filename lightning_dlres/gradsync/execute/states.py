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
        # Step and copy of the states at its start, for `undo`; None for a state that was new.
        self._before: dict[StateKey, tuple[int, State | None]] = {}

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

    def remember(self, step: int, unit: SyncUnit) -> None:
        """Copy the states of a unit before a step that may be undone."""
        for part in Part:
            key = unit.gradient, unit.start, unit.stop, part
            state = self._states.get(key)
            _, copies = self._before.get(key, (step, None))
            if state is not None and copies is not None:
                for name, tensor in state.items():
                    copies[name].copy_(tensor)
            elif state is not None:
                copies = {name: tensor.clone() for name, tensor in state.items()}
            self._before[key] = step, copies if state is not None else None

    def undo(self, step: int) -> None:
        """Give the states that were copied before a step their old values."""
        for key, (copied, before) in self._before.items():
            if copied != step:
                continue
            if before is None:
                self._states.pop(key, None)
                continue
            for name, tensor in before.items():
                self._states[key][name].copy_(tensor)

    def items(self) -> dict[StateKey, State]:
        """Return all states by key."""
        return self._states

    def clear(self) -> None:
        """Forget all states."""
        self._states.clear()
