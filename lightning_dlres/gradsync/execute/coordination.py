"""The coordinator of all ranks, and the link of each rank to it. Only metadata travels here.

A rank reports the payloads that are ready: destination, step, unit, part and size. The coordinator
plans messages that do not collide, and broadcasts its plans. When a message has arrived, its
receiver reports that the links of both ranks are free again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_dlres.core.comm.mailbox import Channel, Item, Mailbox
from lightning_dlres.gradsync.execute.messages import check_link, content_of, plans_of, report_of
from lightning_dlres.gradsync.plan.transmissions import Transfer, Transmission, TransmissionPlanner

_READY, _ARRIVED, _LEARNED = "ready", "arrived", "learned"
_KEY = ("coordination",)
# Numbers in a row of each kind of report.
_KINDS = {_READY: 5, _ARRIVED: 2, _LEARNED: 1}


@dataclass(frozen=True)
class LearnedPlan:
    """All messages of one step, in the order in which the coordinator planned them."""

    messages: tuple[Transmission, ...]


# A message to send now, or a step's messages to repeat.
Plan = Transmission | LearnedPlan


class CoordinatorLink:
    """Link of one rank to the coordinator; on the coordinator's rank, it is the coordinator, too.

    Args:
        mailbox: Messages to the other ranks.
        coordinator: Rank of the coordinator.

    Attributes:
        log: On the coordinator's rank, the messages planned in the last two steps, in order;
            elsewhere empty.
    """

    def __init__(self, mailbox: Mailbox, coordinator: int = 0) -> None:
        self._mailbox, self._coordinator = mailbox, coordinator
        self._is_coordinator = mailbox.rank == coordinator
        self._planner = TransmissionPlanner()
        # Guards the planner, and keeps the plans of all ranks in one order.
        self._lock = threading.Lock()
        # Ranks that have finished the step whose plan is to be repeated.
        self._finished: set[int] = set()
        self._on_plan: Callable[[Plan], None] = lambda plan: None
        self._on_failure: Callable[[BaseException], None] = lambda error: None
        self.log: list[Transmission] = []
        self._newest_step = 0

    @property
    def name(self) -> str:
        """Name of the coordinator's rank in errors."""
        return self._mailbox.names[self._coordinator]

    def open(
        self,
        on_plan: Callable[[Plan], None],
        on_failure: Callable[[BaseException], None],
        message_bytes: int,
    ) -> list[tuple[int, Channel]]:
        """Connect to the coordinator; on the coordinator's rank, to all other ranks.

        Args:
            on_plan: Called with each planned message of any rank, and with a plan to repeat.
            on_failure: Called if a rank that this link receives from is lost, or sends a broken
                message.
            message_bytes: Size in bytes at which a planned message takes no more payloads.

        Returns:
            Ranks and channels to which this link sends.
        """
        self._on_plan, self._on_failure = on_plan, on_failure
        self._planner.message_bytes = message_bytes
        mailbox = self._mailbox
        if not self._is_coordinator:
            mailbox.connect(self._coordinator, Channel.SYNC_REPORT)
            mailbox.subscribe(self._coordinator, Channel.SYNC_PLAN, self._receive_plans)
            return [(self._coordinator, Channel.SYNC_REPORT)]
        others = [rank for rank in range(len(mailbox.names)) if rank != mailbox.rank]
        # A report of the first rank may bring plans for all of them.
        for rank in others:
            mailbox.connect(rank, Channel.SYNC_PLAN)
        for rank in others:
            mailbox.subscribe(rank, Channel.SYNC_REPORT, self._receiver(rank))
        return [(rank, Channel.SYNC_PLAN) for rank in others]

    def report_ready(self, transfers: Sequence[Transfer]) -> None:
        """Report payloads that this rank can send."""
        self._report(_READY, [[t.destination, *t.entry, t.nbytes] for t in transfers])

    def report_arrival(self, source: int, destination: int) -> None:
        """Report a message that this rank has received."""
        self._report(_ARRIVED, [[source, destination]])

    def report_learned(self, step: int) -> None:
        """Report that this rank has finished a step whose messages it will repeat."""
        self._report(_LEARNED, [[step]])

    def _report(self, kind: str, rows: list[list[int]]) -> None:
        if self._is_coordinator:
            self._handle(self._mailbox.rank, kind, rows)
        else:
            self._mailbox.send(self._coordinator, Channel.SYNC_REPORT, _KEY, [kind, rows])

    def _handle(self, rank: int, kind: str, rows: Sequence[Sequence[int]]) -> None:
        """Plan after a report, and broadcast the plans; runs on the coordinator only."""
        with self._lock:
            if kind == _READY:
                self._planner.add(
                    Transfer(rank, destination, (step, unit, part), nbytes)
                    for destination, step, unit, part, nbytes in rows
                )
            elif kind == _ARRIVED:
                # A rank can free only the link to itself.
                for source, _ in rows:
                    self._planner.finish(source, rank)
            else:
                self._finished.add(rank)
                if len(self._finished) == len(self._mailbox.names):
                    step = rows[0][0]
                    learned = [message for message in self.log if _step_of(message) == step]
                    self._broadcast(learned, is_learned=True)
                return
            messages = self._planner.next_transmissions()
            self._record(messages)
            if messages:
                self._broadcast(messages)

    def _record(self, messages: list[Transmission]) -> None:
        """Add messages to the log. A rank may be a step ahead of others, so two steps are kept."""
        self.log += messages
        newest = max(map(_step_of, messages), default=0)
        if newest > self._newest_step:
            self._newest_step = newest
            self.log = [message for message in self.log if _step_of(message) >= newest - 1]

    def _broadcast(self, messages: list[Transmission], *, is_learned: bool = False) -> None:
        rows = [[m.source, m.destination, [list(e) for e in m.entries]] for m in messages]
        for other in range(len(self._mailbox.names)):
            if other != self._mailbox.rank:
                self._mailbox.send(other, Channel.SYNC_PLAN, _KEY, [is_learned, rows])
        self._pass_on(messages, is_learned)

    def _pass_on(self, messages: Sequence[Transmission], is_learned: bool) -> None:
        for plan in [LearnedPlan(tuple(messages))] if is_learned else messages:
            self._on_plan(plan)

    def _receiver(self, rank: int) -> Callable[[Item], None]:
        def receive(item: Item) -> None:
            try:
                self._handle_message(rank, item)
            except Exception as error:
                self._on_failure(error)

        return receive

    def _handle_message(self, rank: int, item: Item) -> None:
        names = self._mailbox.names
        kind, rows = report_of(content_of(item, names[rank]), _KINDS, names[rank])
        for row in rows:
            if kind == _READY:
                check_link(rank, row[0], len(names), names[rank])
            elif kind == _ARRIVED:
                check_link(row[0], row[1], len(names), names[rank])
        self._handle(rank, kind, rows)

    def _receive_plans(self, item: Item) -> None:
        try:
            is_learned, rows = plans_of(
                content_of(item, self.name), len(self._mailbox.names), self.name
            )
            self._pass_on([Transmission(*row) for row in rows], is_learned)
        except Exception as error:
            self._on_failure(error)


def _step_of(message: Transmission) -> int:
    """Return the step of a message, which all of its entries have."""
    return message.entries[0][0]
