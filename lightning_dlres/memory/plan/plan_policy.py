"""Carries out plans, event by event (Method A, A4, A5): what leaves when it is saved, what must
have left by when, and what is brought back ahead of its use."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf

from torch import Tensor

from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.copies import Copies, DirectCopies
from lightning_dlres.memory.execute.gpu import Gpu
from lightning_dlres.memory.execute.saved import ByteCounter, Placement, SavedStorage
from lightning_dlres.memory.execute.spans import ByteSpan, dtype_name
from lightning_dlres.memory.execute.tiers import Tier
from lightning_dlres.memory.plan.plan import MemoryPlan, StorageDecision

_DIRECT = DirectCopies()
_KEEP = Placement(MemoryAction.KEEP)


class PlanPolicy:
    """A policy that follows that one of several plans whose data are saved.

    Args:
        plans: for steps like those to come; none: nothing is known of them.
        tiers, copies: of every tier that the plans use.
        fallback: where data go that no plan knows; None: they stay.
        ledger: the bytes of data on the device.
        gpu: the device, if it is a GPU.

    Attributes:
        plan: the one that is followed.
        unlike: what was unlike all plans in the latest step, if anything was.
        without_room: how many data stayed since their tier had no room for them.
        seen: of the latest step, when something happened and the bytes of data there were then.
    """

    def __init__(
        self,
        plans: Sequence[MemoryPlan],
        tiers: Mapping[str, Tier],
        copies: Mapping[str, Copies],
        fallback: Tier | None = None,
        ledger: ByteCounter | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        self._tiers, self._copies, self._fallback = tiers, copies, fallback
        self._courses = [_Course(plan) for plan in plans] or [_Course(None)]
        self._course = self._before = self._courses[0]
        # The course that followed on each one the last time: steps may take turns.
        self._next: dict[int, _Course] = {}
        self.unlike: str | None = None
        self.without_room = 0
        self._data: dict[int, weakref.ref[SavedStorage]] = {}
        self._leaving: deque[tuple[int, SavedStorage]] = deque()
        # A GPU compresses them; the originals are planned to go behind the next event.
        self._packing: deque[tuple[int, SavedStorage]] = deque()
        self._wanted: deque[int] = deque()
        self._saved: list[tuple[int, str]] = []
        self._ledger, self._gpu = ledger, gpu
        self.seen: list[tuple[float, int]] = []

    @property
    def plan(self) -> MemoryPlan | None:
        """Return the plan of the latest step."""
        return self._course.plan

    def start(self) -> None:
        """See `OffloadPolicy`."""
        self._wait_offloaded(inf)
        self._data.clear()
        self._saved.clear()
        self.unlike, self.seen = None, []
        self._follow(self._next.get(id(self._before), self._before))

    def _follow(self, course: _Course) -> None:
        self._course = course
        self._wanted = deque(course.order)

    def finish(self) -> None:
        """The step is over."""
        self._wait_offloaded(inf)
        if self.unlike is None and len(self._saved) != len(self._course.signature):
            exact = [c for c in self._courses if c.signature == self._saved]
            if exact:
                self._course = exact[0]
            else:
                planned = len(self._course.signature)
                self.unlike = f"{len(self._saved)} data were saved, {planned} were planned"
        if self.unlike is None:
            self._next[id(self._before)] = self._course
            self._before = self._course

    def begin_save(self, tensor: Tensor, span: ByteSpan, number: int) -> Placement:
        """See `OffloadPolicy`."""
        decision = self._known(number, (span.stop - span.start, dtype_name(tensor.dtype)))
        if decision is None:
            if self._fallback is None:
                return _KEEP
            return Placement(MemoryAction.OFFLOAD, self._fallback, None, _DIRECT)
        self._free_packed(decision.saved)
        if decision.action is MemoryAction.KEEP:
            return _KEEP
        if decision.action is MemoryAction.COMPRESS:
            return Placement(decision.action, self._fallback, room=decision.room, gpu=self._gpu)
        assert decision.tier is not None
        return Placement(
            decision.action,
            self._tiers[decision.tier],
            decision.offset,
            self._copies[decision.tier],
            decision.room,
            self._gpu,
        )

    def _known(self, number: int, found: tuple[int, str]) -> StorageDecision | None:
        """Return what is planned for a saved_storage; None where no plan knows it."""
        self._saved.append(found)
        if self.unlike is not None:
            return None
        course = self._course
        if number < len(course.signature) and course.signature[number] == found:
            return course.decisions[number]
        for other in self._courses:
            if other.signature[: number + 1] == self._saved:
                self._follow(other)
                return other.decisions[number]
        text = _named(found)
        if number >= len(course.signature):
            self.unlike = f"saved_storage {number} ({text}) was not planned"
        else:
            planned = _named(course.signature[number])
            self.unlike = f"saved_storage {number}: {text} were saved, {planned} were planned"
        return None

    def end_save(self, saved_storage: SavedStorage, done: bool) -> None:
        """See `OffloadPolicy`."""
        if not done:
            self.without_room += 1
        if self.unlike is not None:
            return
        decision = self._course.decisions[saved_storage.number]
        self._data[saved_storage.number] = weakref.ref(saved_storage)
        if decision.left_by is not None:
            self._leaving.append((decision.left_by, saved_storage))
        elif decision.action is MemoryAction.COMPRESS:
            self._packing.append((decision.saved + 1, saved_storage))
        self._wait_offloaded(decision.saved)
        self._fetch(decision.saved)
        self._note()

    def save_again(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """See `OffloadPolicy`."""

    def begin_use(self, saved_storage: SavedStorage) -> None:
        """See `OffloadPolicy`."""
        if self._packing:
            uses = self._uses_of(saved_storage)
            if uses:
                self._free_packed(uses[min(saved_storage.uses + 1, len(uses)) - 1])

    def end_use(self, saved_storage: SavedStorage) -> None:
        """See `OffloadPolicy`."""
        uses = self._uses_of(saved_storage)
        if not uses:
            return
        place = uses[min(saved_storage.uses, len(uses)) - 1]
        self._wait_offloaded(place)
        self._fetch(place)
        self._note()

    def _uses_of(self, saved_storage: SavedStorage) -> tuple[int, ...]:
        """Return when a saved_storage was planned to be used; nothing for one of an earlier step."""
        known, decisions = self._data.get(saved_storage.number), self._course.decisions
        if known is None or known() is not saved_storage or saved_storage.number >= len(decisions):
            return ()
        return decisions[saved_storage.number].uses

    def take_ownership(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """See `OffloadPolicy`."""
        self._note()

    def _note(self) -> None:
        if self._ledger is not None:
            self.seen.append((time.perf_counter(), self._ledger.now))

    def _wait_offloaded(self, place: float) -> None:
        """Free what must have left by this event."""
        self._free_packed(place)
        while self._leaving and self._leaving[0][0] <= place:
            self._leaving.popleft()[1].wait_offloaded()

    def _free_packed(self, place: float) -> None:
        """Free the originals of what was compressed before this event, ahead of what it brings."""
        while self._packing and self._packing[0][0] <= place:
            self._packing.popleft()[1].wait_offloaded()

    def _fetch(self, place: int) -> None:
        """Begin to bring back what may come by now."""
        while self._wanted:
            number = self._wanted[0]
            when = self._course.decisions[number].fetch_at
            if when is None or when > place:
                return
            self._wanted.popleft()
            reference = self._data.get(number)
            saved_storage = reference() if reference is not None else None
            if saved_storage is not None and not saved_storage.uses:
                saved_storage.fetch()


class _Course:
    """A plan, and what its steps save."""

    def __init__(self, plan: MemoryPlan | None) -> None:
        self.plan = plan
        self.decisions: tuple[StorageDecision, ...] = plan.decisions if plan is not None else ()
        self.signature = [(d.nbytes, d.dtype) for d in self.decisions]
        self.order = sorted(
            (number for number, d in enumerate(self.decisions) if d.fetch_at is not None),
            key=lambda number: self.decisions[number].first_use or 0,
        )


def _named(found: tuple[int, str]) -> str:
    return f"{found[0]} bytes of torch.{found[1]}"
