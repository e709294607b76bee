"""Window of the device: the units whose parameters are on the device now.

A copy that is dropped is not overwritten as long as other code holds a tensor over it, such as
the graph of a forward that ran without the mirror's hooks. So a wrong order costs memory or time,
but never changes a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core._compat import (
    dispatch_modes_disabled,
    storage_key,
    storage_owner_count,
    version_of,
)
from lightning_dlres.core.device.clock import Clock
from lightning_dlres.mirror.execute.fetching import Fetcher, StartedFetch
from lightning_dlres.mirror.profile.units import ParameterUnit


@dataclass(eq=False)
class DeviceCopy:
    """Copy of a unit's parameters on the device.

    Attributes:
        memory: Memory that begins with the values, uint8[at least nbytes].
        nbytes: Bytes of the values.
        versions: Version of each parameter when the fetch was started.
        fetch: Fetch of the values from the mirror; None once it is done.
        views: Value of each parameter.
    """

    memory: Tensor
    nbytes: int
    versions: tuple[int, ...]
    fetch: StartedFetch | None
    views: list[Tensor]


class Window:
    """Copies of some units' parameters on the device.

    Args:
        units: All units.
        sources: Values of each unit in the mirror, uint8[nbytes].
        fetcher: Copier to the device.
        device: The device.
        limit: Bytes that the copies may take. A unit that is needed comes in any case.
        clock: Clock of the device.
        next_use: Returns the position of a unit's next use, for the choice of the unit that leaves;
            infinity if it is not known.

    Attributes:
        units: All units.
        device: The device.
        limit: See above; it may be changed between steps.
        bytes_now: Bytes of all copies.
        peak_bytes: Largest value of `bytes_now`.
        stalls: Marks of the clock before and after each wait for a copy, since `forget_times`.
        fetched_bytes: Bytes that were copied to the device.
        fetches: Bytes of each fetch that has ended, and the fetch, since `forget_times`.
    """

    def __init__(
        self,
        units: Sequence[ParameterUnit],
        sources: Sequence[Tensor],
        fetcher: Fetcher,
        device: torch.device,
        *,
        limit: float,
        clock: Clock,
        next_use: Callable[[int], float] = lambda unit: float("inf"),
    ) -> None:
        self.units, self._sources, self._fetcher, self.device = units, sources, fetcher, device
        self.limit, self._next_use = limit, next_use
        self._copies: dict[int, DeviceCopy] = {}
        # Units that are in use, with the number of uses.
        self._in_use: dict[int, int] = {}
        # Memory of dropped copies, for later ones.
        self._free: list[Tensor] = []
        # Units on the device by the storage key of their copies.
        self._unit_at: dict[int, int] = {}
        self.bytes_now = self.peak_bytes = self.fetched_bytes = 0
        self.clock = clock
        self.stalls: list[tuple[Any, Any]] = []
        self.fetches: list[tuple[int, StartedFetch]] = []

    def __contains__(self, unit: int) -> bool:
        return unit in self._copies

    def hold(self, unit: int) -> None:
        """Keep a unit on the device until `let_go` is called as often."""
        self._in_use[unit] = self._in_use.get(unit, 0) + 1

    def let_go(self, unit: int) -> None:
        """End a use of a unit."""
        self._in_use[unit] -= 1
        if not self._in_use[unit]:
            del self._in_use[unit]

    def unit_at(self, tensor: Tensor) -> int | None:
        """Return the unit on whose copy a tensor lies, or None."""
        return self._unit_at.get(storage_key(tensor))

    def require(self, unit: int) -> DeviceCopy:
        """Return the copy of a unit, after it has arrived."""
        copy = self._copies.get(unit)
        is_held = unit in self._in_use
        if copy is not None and not is_held and copy.versions != self._versions(unit):
            # The parameters have changed since, in the mirror.
            self.drop(unit)
            copy = None
        if copy is None:
            self._make_room(unit)
            copy = self._start(unit)
        self._finish(copy)
        return copy

    def prefetch(self, unit: int) -> None:
        """Start to copy a unit to the device, unless it is there."""
        if unit not in self._copies:
            self._start(unit)

    def drop(self, unit: int) -> None:
        """Drop the copy of a unit that is not in use; no effect without one."""
        copy = self._copies.pop(unit, None)
        if copy is None:
            return
        self._finish(copy)
        self.bytes_now -= self.units[unit].nbytes
        memory = copy.memory
        del self._unit_at[storage_key(memory)]
        copy.views.clear()
        del copy
        # Other code may hold a tensor over this memory; then it is not used again.
        if storage_owner_count(memory) == 1:
            self._free.append(memory)

    def drop_idle(self) -> None:
        """Drop all copies that are not in use."""
        for unit in [unit for unit in self._copies if unit not in self._in_use]:
            self.drop(unit)

    def drop_all(self) -> None:
        """Drop all copies that are not in use, and their memory."""
        self.drop_idle()
        self._free.clear()

    def forget_times(self) -> None:
        """Forget what was measured."""
        self.stalls.clear()
        self.fetches.clear()

    def close(self) -> None:
        """Drop everything, and release the copier."""
        self._in_use.clear()
        self.drop_all()
        self._fetcher.close()

    def _versions(self, unit: int) -> tuple[int, ...]:
        return tuple(version_of(parameter) for parameter in self.units[unit].parameters)

    def _make_room(self, unit: int) -> None:
        """Drop the units that are needed last, until a unit fits."""
        needed = self.units[unit].nbytes
        while self.bytes_now + needed > self.limit:
            idle = [other for other in self._copies if other not in self._in_use]
            if not idle:
                return
            self.drop(max(idle, key=self._next_use))

    def _start(self, unit: int) -> DeviceCopy:
        nbytes = self.units[unit].nbytes
        # Tensors made in inference mode could not be saved for backward later.
        # The user's modes, such as that of selective checkpointing, do not concern it.
        with torch.inference_mode(False), dispatch_modes_disabled():
            memory = self._memory(nbytes)
            views = self.units[unit].views(memory)
        fetch = self._fetcher.start(self._sources[unit], memory[:nbytes])
        copy = DeviceCopy(memory, nbytes, self._versions(unit), fetch, views)
        self._unit_at[storage_key(memory)] = unit
        self._copies[unit] = copy
        self.bytes_now += nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)
        self.fetched_bytes += nbytes
        return copy

    def _memory(self, nbytes: int) -> Tensor:
        """Return memory for a copy: free one of this size, as a larger one would exceed the limit,
        or new one."""
        for index, memory in enumerate(self._free):
            if memory.numel() == nbytes:
                return self._free.pop(index)
        # Free memory of other sizes would take part of the device for nothing.
        spare = self.limit - self.bytes_now - nbytes
        while self._free and sum(memory.numel() for memory in self._free) > max(spare, 0):
            self._free.pop(0)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _finish(self, copy: DeviceCopy) -> None:
        if copy.fetch is None:
            return
        start = self.clock.mark()
        copy.fetch.wait()
        self.stalls.append((start, self.clock.mark()))
        self.fetches.append((copy.nbytes, copy.fetch))
        copy.fetch = None
