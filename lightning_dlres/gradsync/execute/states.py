"""States of the codecs between steps: what each unit has not sent yet.

Compression in two directions makes two errors. A rank keeps a state for its own gradient, and the
rank that completes a unit's sum keeps another one for the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

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

    @property
    def by_key(self) -> dict[StateKey, State]:
        """All states of this rank; changes to the dict change the states."""
        return self._states


class StateCopies:
    """Copies of states from before some steps, so that these can be undone.

    Args:
        states: States that the steps change.
    """

    def __init__(self, states: CodecStates) -> None:
        self._states = states.by_key
        # Memory of the copies is used again in later steps. None for a state that did not exist.
        self._copies: dict[StateKey, State | None] = {}
        self._saved: set[StateKey] = set()

    def save(self, units: Iterable[SyncUnit]) -> None:
        """Copy the states of units, unless they are saved already."""
        keys = {(u.gradient, u.start, u.stop, part) for u in units for part in Part}
        for key in keys - self._saved:
            state, copies = self._states.get(key), self._copies.get(key)
            if state is None:
                self._copies[key] = None
            elif copies is None:
                self._copies[key] = {name: tensor.clone() for name, tensor in state.items()}
            else:
                for name, tensor in state.items():
                    copies[name].copy_(tensor)
            self._saved.add(key)

    def restore(self, gradients: Collection[str] | None = None) -> None:
        """Give the states their saved values; those that did not exist are removed.

        Args:
            gradients: Names of the gradients whose states are restored; None for all.
        """
        for key in self._saved:
            if gradients is not None and key[0] not in gradients:
                continue
            copies = self._copies[key]
            if copies is None:
                self._states.pop(key, None)
                continue
            for name, tensor in copies.items():
                self._states[key][name].copy_(tensor)

    def forget(self) -> None:
        """Begin anew: the next `save` copies all states."""
        self._saved.clear()
