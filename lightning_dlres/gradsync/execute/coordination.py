"""The coordinator of all ranks, and the link of each rank to it. Only metadata travels here.

A rank reports the payloads that are ready: destination, step, unit, part and size. The coordinator
plans messages that do not collide, and broadcasts its plans. When a message has arrived, its
receiver reports that the links of both ranks are free again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lightning_dlres.core.comm.mailbox import Channel, Item, Mailbox
from lightning_dlres.core.errors import PeerLostError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.gradsync.plan.transmissions import Transfer, Transmission, TransmissionPlanner

_READY, _ARRIVED = "ready", "arrived"
_KEY = ("coordination",)


class CoordinatorLink:
    """Link of one rank to the coordinator, which runs on rank `coordinator`.

    Args:
        mailbox: Messages to the other ranks.
        coordinator: Rank of the coordinator.

    Attributes:
        log: On the coordinator's rank, all plans in order; elsewhere empty.
    """

    def __init__(self, mailbox: Mailbox, coordinator: int = 0) -> None:
        self._mailbox, self._coordinator = mailbox, coordinator
        self._is_coordinator = mailbox.rank == coordinator
        self._planner = TransmissionPlanner()
        # Guards the planner, and keeps the plans of all ranks in one order.
        self._lock = threading.Lock()
        self._on_plan: Callable[[Transmission], None] = lambda transmission: None
        self._on_failure: Callable[[BaseException], None] = lambda error: None
        self.log: list[Transmission] = []

    def open(
        self,
        on_plan: Callable[[Transmission], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Connect to the coordinator, or to all ranks on its own rank.

        Args:
            on_plan: Called from another thread with each planned message of any rank.
            on_failure: Called if the coordinator, or on its rank another rank, is lost.
        """
        self._on_plan, self._on_failure = on_plan, on_failure
        mailbox = self._mailbox
        if not self._is_coordinator:
            mailbox.connect(self._coordinator, Channel.SYNC_REPORT)
            mailbox.subscribe(self._coordinator, Channel.SYNC_PLAN, self._receive_plans)
            return
        for rank in range(len(mailbox.names)):
            if rank != mailbox.rank:
                mailbox.connect(rank, Channel.SYNC_PLAN)
                mailbox.subscribe(rank, Channel.SYNC_REPORT, self._receiver(rank))

    def report_ready(self, transfers: Sequence[Transfer]) -> None:
        """Report payloads that this rank can send."""
        self._report([_READY, [[t.destination, *t.entry, t.nbytes] for t in transfers]])

    def report_arrival(self, source: int, destination: int) -> None:
        """Report a message that this rank has received."""
        self._report([_ARRIVED, [[source, destination]]])

    def _report(self, report: Tree) -> None:
        if self._is_coordinator:
            self._handle(self._mailbox.rank, report)
        else:
            self._mailbox.send(self._coordinator, Channel.SYNC_REPORT, _KEY, report)

    def _handle(self, rank: int, report: Tree) -> None:
        """Plan after a report, and broadcast the plans; runs on the coordinator only."""
        kind, rows = report
        with self._lock:
            if kind == _READY:
                self._planner.add(
                    Transfer(rank, row[0], (row[1], row[2], row[3]), row[4]) for row in rows
                )
            else:
                for source, destination in rows:
                    self._planner.finish(source, destination)
            plans = self._planner.next_transmissions()
            if not plans:
                return
            self.log += plans
            message = [[p.source, p.destination, [list(e) for e in p.entries]] for p in plans]
            for other in range(len(self._mailbox.names)):
                if other != self._mailbox.rank:
                    self._mailbox.send(other, Channel.SYNC_PLAN, _KEY, message)
        for plan in plans:
            self._on_plan(plan)

    def _receiver(self, rank: int) -> Callable[[Item], None]:
        def receive(item: Item) -> None:
            try:
                self._handle(rank, _content(item, self._mailbox.names[rank]))
            except Exception as error:
                self._on_failure(error)

        return receive

    def _receive_plans(self, item: Item) -> None:
        try:
            plans = _content(item, self._mailbox.names[self._coordinator])
            for source, destination, entries in plans:
                rows = tuple((entry[0], entry[1], entry[2]) for entry in entries)
                self._on_plan(Transmission(source, destination, rows))
        except Exception as error:
            self._on_failure(error)


def _content(item: Item, name: str) -> Tree:
    """Return the content of a message.

    Raises:
        PeerLostError: If the item is the error that ended the connection to a rank.
    """
    if isinstance(item, BaseException):
        raise PeerLostError(f"lost {name} while gradients were synchronised: {item}") from item
    return item[1]
