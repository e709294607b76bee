"""Policy that follows memory plans, event by event.

An event is the saving or the use of a saved storage. The plan says which storages are offloaded
when they are saved. For each of these, it names the event at whose end the storage must have left
the device, and the event at whose end its prefetch starts.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf

from torch import Tensor

from lightning_dlres.core.device.copiers import Copier
from lightning_dlres.core.device.gpu import Gpu
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.byte_counter import ByteCounter
from lightning_dlres.memory.execute.policy import Placement
from lightning_dlres.memory.execute.saved_storage import SavedStorage
from lightning_dlres.memory.execute.spans import ByteSpan, dtype_name
from lightning_dlres.memory.execute.transfer.tiers import Tier
from lightning_dlres.memory.plan.plan import MemoryPlan, StorageDecision

_KEEP = Placement(MemoryAction.KEEP)


class PlanPolicy:
    """Policy that follows, in each step, the plan that matches the saved storages.

    Args:
        plans: Plans, one for each kind of step; empty: no storage is planned.
        tiers: Tiers that the plans use, by name.
        copiers: Copiers of these tiers, by name.
        fallback: Tier for unplanned storages; None: they stay on the device.
        byte_counter: Counter of the bytes of saved storages on the device; None: no curve.
        gpu: GPU that compresses, if the device is a GPU.

    Attributes:
        mismatch: First difference between the latest step and its plan; None: a plan matched.
        overflow_count: Number of storages that stayed on the device because their placement was not
            possible, such as in a full tier.
        curve: (`time.perf_counter` time, bytes of saved storages on the device) for the latest
            step: after every event that the plan knows, and whenever a backward function takes over
            the memory of a storage.
    """

    def __init__(
        self,
        plans: Sequence[MemoryPlan],
        *,
        tiers: Mapping[str, Tier],
        copiers: Mapping[str, Copier],
        fallback: Tier | None = None,
        byte_counter: ByteCounter | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        self._tiers, self._copiers, self._fallback = tiers, copiers, fallback
        self._alternatives = [_PlannedStep(plan) for plan in plans] or [_PlannedStep(None)]
        self._current = self._previous = self._alternatives[0]
        # Steps of several kinds may alternate. Maps the `id` of each planned step to the planned
        # step that came after it most recently.
        self._successors: dict[int, _PlannedStep] = {}
        self.mismatch: str | None = None
        self.overflow_count = 0
        self._storages: dict[int, weakref.ref[SavedStorage]] = {}
        # Storages on their way to a tier, in the order of saving. Each has the event at whose end
        # it must have left the device. Plans let storages leave in this order, except those whose
        # copy does not overlap: such a storage has left when its save ends.
        self._leaving: deque[tuple[int, SavedStorage]] = deque()
        # Storages in compression on a GPU, each with the event before which its original is freed.
        self._compressing: deque[tuple[int, SavedStorage]] = deque()
        self._to_prefetch: deque[int] = deque()
        # Bytes and dtype of every storage that the step has saved so far.
        self._signature: list[tuple[int, str]] = []
        self._byte_counter, self._gpu = byte_counter, gpu
        self.curve: list[tuple[float, int]] = []

    @property
    def plan(self) -> MemoryPlan | None:
        """Return the plan of the latest step."""
        return self._current.plan

    def start(self) -> None:
        """See `OffloadPolicy`."""
        self._wait_offloaded(inf)
        self._storages.clear()
        self._signature.clear()
        self.mismatch, self.curve = None, []
        self._switch_to(self._successors.get(id(self._previous), self._previous))

    def _switch_to(self, planned: _PlannedStep) -> None:
        self._current = planned
        self._to_prefetch = deque(planned.prefetch_order)

    def finish(self) -> None:
        """Finish a step.

        A step that saved fewer storages than planned may match another plan; else set `mismatch`.
        """
        self._wait_offloaded(inf)
        if self.mismatch is None and len(self._signature) != len(self._current.signature):
            matching = [p for p in self._alternatives if p.signature == self._signature]
            if matching:
                self._current = matching[0]
            else:
                planned = len(self._current.signature)
                self.mismatch = f"{len(self._signature)} storages were saved, {planned} planned"
        if self.mismatch is None:
            self._successors[id(self._previous)] = self._current
            self._previous = self._current

    def begin_save(self, tensor: Tensor, span: ByteSpan, number: int) -> Placement:
        """See `OffloadPolicy`."""
        decision = self._decide(number, (span.stop - span.start, dtype_name(tensor.dtype)))
        if decision is None:
            if self._fallback is None:
                return _KEEP
            return Placement(MemoryAction.OFFLOAD, self._fallback)
        self._free_compressed(decision.saved)
        if decision.action is MemoryAction.KEEP:
            return _KEEP
        if decision.action is MemoryAction.COMPRESS:
            return Placement(
                decision.action, self._fallback, capacity=decision.capacity, gpu=self._gpu
            )
        assert decision.tier is not None
        return Placement(
            decision.action,
            self._tiers[decision.tier],
            offset=decision.offset,
            copier=self._copiers[decision.tier],
            capacity=decision.capacity,
            gpu=self._gpu,
        )

    def _decide(self, number: int, size_and_dtype: tuple[int, str]) -> StorageDecision | None:
        """Add a storage to the step's signature, and return the decision about it.

        If the current plan does not match, switch to one that matches the whole step so far. If
        there is none, set `mismatch` and return None.

        Args:
            number: Index of the storage in the step.
            size_and_dtype: Size of the storage in bytes, and name of the dtype.
        """
        self._signature.append(size_and_dtype)
        if self.mismatch is not None:
            return None
        current = self._current
        if number < len(current.signature) and current.signature[number] == size_and_dtype:
            return current.decisions[number]
        for other in self._alternatives:
            if other.signature[: number + 1] == self._signature:
                self._switch_to(other)
                return other.decisions[number]
        text = _described(size_and_dtype)
        if number >= len(current.signature):
            self.mismatch = f"storage {number} ({text}) was not planned"
        else:
            planned = _described(current.signature[number])
            self.mismatch = f"storage {number}: {text} were saved, {planned} planned"
        return None

    def end_save(self, saved_storage: SavedStorage, is_placed: bool) -> None:
        """See `OffloadPolicy`."""
        if not is_placed:
            self.overflow_count += 1
        if self.mismatch is not None:
            return
        decision = self._current.decisions[saved_storage.number]
        self._storages[saved_storage.number] = weakref.ref(saved_storage)
        if decision.offloaded_by is not None:
            self._leaving.append((decision.offloaded_by, saved_storage))
        elif decision.action is MemoryAction.COMPRESS:
            self._compressing.append((decision.saved + 1, saved_storage))
        self._wait_offloaded(decision.saved)
        self._prefetch(decision.saved)
        self._record_bytes()

    def save_again(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """See `OffloadPolicy`."""

    def begin_use(self, saved_storage: SavedStorage) -> None:
        """See `OffloadPolicy`."""
        if self._compressing:
            uses = self._planned_uses(saved_storage)
            if uses:
                # Uses beyond the planned ones count as the last planned one.
                self._free_compressed(uses[min(saved_storage.uses + 1, len(uses)) - 1])

    def end_use(self, saved_storage: SavedStorage) -> None:
        """See `OffloadPolicy`."""
        uses = self._planned_uses(saved_storage)
        if not uses:
            return
        event = uses[min(saved_storage.uses, len(uses)) - 1]
        self._wait_offloaded(event)
        self._prefetch(event)
        self._record_bytes()

    def _planned_uses(self, saved_storage: SavedStorage) -> tuple[int, ...]:
        """Return the events that are planned as uses of a storage.

        A storage of an earlier step has none.
        """
        number, decisions = saved_storage.number, self._current.decisions
        reference = self._storages.get(number)
        if reference is None or reference() is not saved_storage or number >= len(decisions):
            return ()
        return decisions[number].uses

    def take_ownership(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """See `OffloadPolicy`."""
        self._record_bytes()

    def _record_bytes(self) -> None:
        if self._byte_counter is not None:
            self.curve.append((time.perf_counter(), self._byte_counter.now))

    def _wait_offloaded(self, event: float) -> None:
        """Wait until the storages that are due at this event or earlier have left the device."""
        self._free_compressed(event)
        while self._leaving and self._leaving[0][0] <= event:
            self._leaving.popleft()[1].wait_offloaded()

    def _free_compressed(self, event: float) -> None:
        """Free the originals of storages that were compressed before this event.

        The plan counts on this before the event allocates its own memory.
        """
        while self._compressing and self._compressing[0][0] <= event:
            self._compressing.popleft()[1].wait_offloaded()

    def _prefetch(self, event: int) -> None:
        """Start the prefetches that are planned at this event or earlier."""
        while self._to_prefetch:
            number = self._to_prefetch[0]
            planned = self._current.decisions[number].prefetch_at
            if planned is None or planned > event:
                return
            self._to_prefetch.popleft()
            reference = self._storages.get(number)
            saved_storage = reference() if reference is not None else None
            if saved_storage is not None and not saved_storage.uses:
                saved_storage.prefetch()


class _PlannedStep:
    """Plan of one kind of step.

    Attributes:
        plan: The plan; None: no storage is planned.
        decisions: Decisions of the plan.
        signature: Bytes and dtype of every storage, in the order of saving.
        prefetch_order: Indices of the storages to prefetch, by first use.
    """

    def __init__(self, plan: MemoryPlan | None) -> None:
        self.plan = plan
        self.decisions: tuple[StorageDecision, ...] = plan.decisions if plan is not None else ()
        self.signature = [(d.nbytes, d.dtype) for d in self.decisions]
        self.prefetch_order = sorted(
            (number for number, d in enumerate(self.decisions) if d.prefetch_at is not None),
            key=lambda number: self.decisions[number].first_use or 0,
        )


def _described(size_and_dtype: tuple[int, str]) -> str:
    nbytes, dtype = size_and_dtype
    return f"{nbytes} bytes of torch.{dtype}"
