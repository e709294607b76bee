"""Fusion of small gradients, such as those of biases, into one gradient of the plan.

The tasks and messages of a gradient take time on every rank, however small it is. In many models
half of the gradients have a few kilobytes. Those that are too small to be compressed travel
together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_dlres.gradsync.plan.units import GradientSpec

# Most bytes of a fused gradient. It waits for the last of its members, so it has not too many.
FUSED_BYTES = 32 << 10

# Called once: with None, or with the error that ended the synchronisation.
OnDone = Callable[[BaseException | None], None]


class Start(Protocol):
    """Function that starts the synchronisation of gradients."""

    def __call__(self, gradients: Mapping[str, Tensor], on_done: OnDone, has_data: bool) -> None:
        """Start to replace gradients by their means; see `GradientSynchroniser.start`."""


@dataclass(frozen=True, kw_only=True)
class FusedGradient:
    """Several gradients that a plan has as one.

    Attributes:
        name: Name in the plan.
        members: The gradients, in their order.
    """

    name: str
    members: tuple[GradientSpec, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return sum(member.count for member in self.members)

    def offsets(self) -> dict[str, int]:
        """Return the first element of each member, by name."""
        ends = accumulate(member.count for member in self.members)
        return {m.name: end - m.count for m, end in zip(self.members, ends, strict=True)}


class GradientFusion:
    """Fusion of the gradients of a model.

    Args:
        gradients: The gradients, in the order of the model.
        most_elements: Most elements of a gradient that is fused.
        fused_elements: Most elements of a fused gradient.

    Attributes:
        specs: The gradients as a plan has them, in the order of the model.
    """

    def __init__(
        self, gradients: Sequence[GradientSpec], *, most_elements: int, fused_elements: int
    ) -> None:
        self.specs: list[GradientSpec] = []
        self._fused: dict[str, FusedGradient] = {}
        self._fused_of: dict[str, FusedGradient] = {}
        self._offsets: dict[str, int] = {}
        small = [g for g in gradients if g.count <= most_elements]
        groups = {group[0].name: group for group in _groups(small, fused_elements)}
        is_small = {gradient.name for gradient in small}
        for gradient in gradients:
            if gradient.name in groups:
                self._add(groups[gradient.name])
            elif gradient.name not in is_small:
                self.specs.append(gradient)
        # Members of the current step that are ready, by name of the fused gradient.
        self._ready: dict[str, _Ready] = {}

    def _add(self, group: Sequence[GradientSpec]) -> None:
        if len(group) == 1:
            self.specs.append(group[0])
            return
        fused = FusedGradient(
            name=f"{group[0].name} and {len(group) - 1} more", members=tuple(group)
        )
        self.specs.append(GradientSpec(name=fused.name, count=fused.count, is_compressible=False))
        self._fused[fused.name] = fused
        self._fused_of |= {member.name: fused for member in group}
        self._offsets |= fused.offsets()

    def members(self, name: str) -> tuple[str, ...]:
        """Return the gradients of the model that a gradient of the plan consists of."""
        fused = self._fused.get(name)
        return (name,) if fused is None else tuple(member.name for member in fused.members)

    def start(
        self, gradients: Mapping[str, Tensor], start: Start, on_done: OnDone, *, has_data: bool
    ) -> None:
        """Start to replace gradients by their means, without waiting.

        A fused gradient starts with the last of its members, of whatever bucket, or in `end_step`.

        Args:
            gradients: Contiguous flat gradients by name.
            start: Starts gradients of the plan.
            on_done: Called once, when all of these gradients are means, or with an error.
            has_data: False if this rank had no samples.
        """
        own = {name: g for name, g in gradients.items() if name not in self._fused_of}
        touched: dict[str, dict[str, Tensor]] = {}
        for name in gradients.keys() - own.keys():
            touched.setdefault(self._fused_of[name].name, {})[name] = gradients[name]
        done = _Countdown(len(touched) + bool(own), on_done)
        if own:
            start(own, done, has_data)
        # In the order of the plan, which is the same on all ranks.
        for name in [name for name in self._fused if name in touched]:
            ready = self._ready.setdefault(name, _Ready(self._fused[name], start))
            ready.add(touched[name], done, has_data)
            if ready.is_complete:
                self._ready.pop(name).start()

    def end_step(self) -> None:
        """Start the fused gradients of which not all members have come in the step.

        A plan may have gradients that DistributedDataParallel does not give to the hook, for
        example those of parameters outside of its module. The others must not wait for them.
        """
        for name in [name for name in self._fused if name in self._ready]:
            self._ready.pop(name).start()

    def split(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return flat tensors of the plan's gradients as those of the model's gradients."""
        pieces: dict[str, Tensor] = {}
        for name, value in values.items():
            if name not in self._fused:
                pieces[name] = value
                continue
            members = self._fused[name].members
            parts = value.split([member.count for member in members])
            pieces |= {member.name: part for member, part in zip(members, parts, strict=True)}
        return pieces

    def fused_states(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return saved states of the model's gradients as those of the plan's gradients.

        Args:
            saved: States of all ranks of an earlier run, in the form of `save_states`.
        """
        return [{**one, "units": [self._moved(entry) for entry in one["units"]]} for one in saved]

    def _moved(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state, as one of the fused gradient if its gradient is a member."""
        fused = self._fused_of.get(entry["gradient"])
        if fused is None:
            return dict(entry)
        offset = self._offsets[entry["gradient"]]
        start, stop = entry["start"] + offset, entry["stop"] + offset
        return {**entry, "gradient": fused.name, "start": start, "stop": stop}


def _groups(gradients: Sequence[GradientSpec], fused_elements: int) -> list[list[GradientSpec]]:
    """Return neighbours whose elements together are at most `fused_elements`."""
    groups: list[list[GradientSpec]] = []
    count = 0
    for gradient in gradients:
        if not groups or count + gradient.count > fused_elements:
            groups.append([])
            count = 0
        groups[-1].append(gradient)
        count += gradient.count
    return groups


class _Ready:
    """Members of a fused gradient that are ready in a step.

    Args:
        fused: The fused gradient.
        start: Starts it.
    """

    def __init__(self, fused: FusedGradient, start: Start) -> None:
        self._fused, self._start = fused, start
        self._gradients: dict[str, Tensor] = {}
        self._waiting: list[OnDone] = []
        self._has_data = False

    @property
    def is_complete(self) -> bool:
        """True if all members are ready."""
        return len(self._gradients) == len(self._fused.members)

    def add(self, gradients: Mapping[str, Tensor], on_done: OnDone, has_data: bool) -> None:
        """Add members; `on_done` is called when they are means."""
        self._gradients |= gradients
        self._waiting.append(on_done)
        self._has_data |= has_data

    def start(self) -> None:
        """Start the fused gradient, with zeros for members that are not ready."""
        some = next(iter(self._gradients.values()))
        gradients = [
            self._gradients[m.name] if m.name in self._gradients else some.new_zeros(m.count)
            for m in self._fused.members
        ]
        fused = torch.cat(gradients)

        def finish(error: BaseException | None) -> None:
            if error is None:
                for gradient, mean in zip(
                    gradients, fused.split([len(g) for g in gradients]), strict=True
                ):
                    gradient.copy_(mean)
            for on_done in self._waiting:
                on_done(error)

        self._start({self._fused.name: fused}, finish, self._has_data)


class _Countdown:
    """Callback that calls another one after some calls without an error, or at the first error."""

    def __init__(self, count: int, on_done: OnDone) -> None:
        self._count, self._on_done = count, on_done
        self._lock = threading.Lock()

    def __call__(self, error: BaseException | None) -> None:
        with self._lock:
            self._count = self._count - 1 if error is None else min(self._count, 0)
            is_last = self._count == 0
            # No later call is the last one.
            self._count -= is_last
        if is_last:
            self._on_done(error)
