"""Carries out a plan, event by event (Method A, A4, A5): what leaves when it is saved, what must
have left by when, and what is brought back ahead of its use."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping

from torch import Tensor

from lightning_dlres.memory.actions import Action
from lightning_dlres.memory.copies import Copies, DirectCopies
from lightning_dlres.memory.gpu import Gpu
from lightning_dlres.memory.plan import Decision, MemoryPlan
from lightning_dlres.memory.saved import Datum, Ledger, Order
from lightning_dlres.memory.spans import Span
from lightning_dlres.memory.tiers import Tier

_DIRECT = DirectCopies()


class Follower:
    """A conductor that follows a plan.

    Args:
        plan: for a step like the one to come.
        tiers, copies: of every tier that the plan uses.
        fallback: where data go that the plan does not know; None: they stay.
        ledger: the bytes of data on the device.
        gpu: the device, if it is a GPU.

    Attributes:
        unlike: what was unlike the planned step, if anything was; None before.
        without_room: how many data stayed since their tier had no room for them.
        seen: of the latest step, when something happened and the bytes of data there were then.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        tiers: Mapping[str, Tier],
        copies: Mapping[str, Copies],
        fallback: Tier | None = None,
        ledger: Ledger | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        self._plan, self._tiers, self._copies, self._fallback = plan, tiers, copies, fallback
        self._order = sorted(
            (number for number, d in enumerate(plan.decisions) if d.fetch_at is not None),
            key=lambda number: plan.decisions[number].first_use or 0,
        )
        self.unlike: str | None = None
        self.without_room = 0
        self._data: weakref.WeakValueDictionary[int, Datum] = weakref.WeakValueDictionary()
        self._leaving: deque[tuple[int, Datum]] = deque()
        # A GPU compresses them; the originals are planned to go behind the next event.
        self._packing: deque[tuple[int, Datum]] = deque()
        self._wanted: deque[int] = deque()
        self._saves = 0
        self._ledger, self._gpu = ledger, gpu
        self.seen: list[tuple[float, int]] = []

    def start(self) -> None:
        """See `Conductor`."""
        self._settle(len(self._plan.held))
        self._data.clear()
        self._wanted = deque(self._order)
        self._saves = 0
        self.seen = []

    def finish(self) -> None:
        """The step is over."""
        self._settle(len(self._plan.held))
        if self._saves != len(self._plan.decisions) and self.unlike is None:
            self.unlike = f"{self._saves} data were saved, {len(self._plan.decisions)} were planned"

    def begin_save(self, tensor: Tensor, span: Span, number: int) -> Order:
        """See `Conductor`."""
        self._saves += 1
        decision = self._known(number, tensor, span)
        if decision is None:
            if self._fallback is None:
                return Order(Action.KEEP)
            return Order(Action.OFFLOAD, self._fallback, None, _DIRECT)
        self._free_packed(decision.saved)
        if decision.action is Action.COMPRESS:
            return Order(decision.action, self._fallback, room=decision.room, gpu=self._gpu)
        if decision.tier is None:
            return Order(decision.action)
        return Order(
            decision.action,
            self._tiers[decision.tier],
            decision.offset,
            self._copies[decision.tier],
            decision.room,
            self._gpu,
        )

    def _known(self, number: int, tensor: Tensor, span: Span) -> Decision | None:
        """Return what is planned for a datum; None where it is not the planned one."""
        if self.unlike is None:
            found = f"{span.nbytes} bytes of {tensor.dtype}"
            if number >= len(self._plan.decisions):
                self.unlike = f"datum {number} ({found}) was not planned"
            else:
                decision = self._plan.decisions[number]
                planned = f"{decision.nbytes} bytes of torch.{decision.dtype}"
                if found == planned:
                    return decision
                self.unlike = f"datum {number}: {found} were saved, {planned} were planned"
        return None

    def end_save(self, datum: Datum, done: bool) -> None:
        """See `Conductor`."""
        if not done:
            self.without_room += 1
        if self.unlike is not None:
            return
        decision = self._plan.decisions[datum.number]
        self._data[datum.number] = datum
        if decision.left_by is not None:
            self._leaving.append((decision.left_by, datum))
        elif decision.action is Action.COMPRESS:
            self._packing.append((decision.saved + 1, datum))
        self._settle(decision.saved)
        self._fetch(decision.saved)
        self._note()

    def save_again(self, datum: Datum, tensor: Tensor) -> None:
        """See `Conductor`."""

    def begin_use(self, datum: Datum) -> None:
        """See `Conductor`."""
        if self._packing and self._data.get(datum.number) is datum:
            uses = self._plan.decisions[datum.number].uses
            if uses:
                self._free_packed(uses[min(datum.uses + 1, len(uses)) - 1])

    def end_use(self, datum: Datum) -> None:
        """See `Conductor`."""
        if self._data.get(datum.number) is not datum:
            return  # of an earlier step
        uses = self._plan.decisions[datum.number].uses
        if not uses:
            return
        place = uses[min(datum.uses, len(uses)) - 1]
        self._settle(place)
        self._fetch(place)
        self._note()

    def give_up(self, datum: Datum, tensor: Tensor) -> None:
        """See `Conductor`."""
        self._note()

    def _note(self) -> None:
        if self._ledger is not None:
            self.seen.append((time.perf_counter(), self._ledger.now))

    def _settle(self, place: int) -> None:
        """Free what must have left by this event."""
        self._free_packed(place)
        while self._leaving and self._leaving[0][0] <= place:
            self._leaving.popleft()[1].settle()

    def _free_packed(self, place: int) -> None:
        """Free the originals of what was compressed before this event, ahead of what it brings."""
        while self._packing and self._packing[0][0] <= place:
            self._packing.popleft()[1].settle()

    def _fetch(self, place: int) -> None:
        """Begin to bring back what may come by now."""
        while self._wanted:
            number = self._wanted[0]
            when = self._plan.decisions[number].fetch_at
            if when is None or when > place:
                return
            self._wanted.popleft()
            datum = self._data.get(number)
            if datum is not None and not datum.uses:
                datum.fetch()
