"""A stranger's connection is closed, but never a later one that has got its id."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import zmq
from typing_extensions import override

from lightning_dlres.core.comm.rank_sockets import RankSockets
from lightning_dlres.core.wire.endpoint import ConnectionEvent
from tests.support.rank_sockets import TOKENS
from tests.support.waiting import wait_until


class ScriptedSockets(RankSockets):
    """Sockets that see each connection closed, and another one opened with its id, when told so.

    Attributes:
        changes_hands: True lets the next look at the connections see that, once.
        dropped: Ids of the connections that were closed for a message.
    """

    def __init__(self) -> None:
        super().__init__({TOKENS[1]: 1}, bind="127.0.0.1", keys=None, allowed=())
        self.changes_hands = False
        self.dropped: list[int] = []

    def has_message(self) -> bool:
        return bool(self._socket.poll(0))

    @override
    def drop(self, connection: int, reason: str) -> None:
        self.dropped.append(connection)

    @override
    def _read_monitor(self) -> None:
        super()._read_monitor()
        if self.changes_hands and self._open:
            self.changes_hands = False
            for connection in list(self._open):
                self._note_event(ConnectionEvent(False, connection))
                self._note_event(ConnectionEvent(True, connection))


@pytest.mark.parametrize(
    ("changes_hands", "is_read_before", "is_dropped"),
    [(False, False, True), (True, False, False), (True, True, True)],
)
def test_only_the_connection_of_a_stranger_is_closed(
    stack: ExitStack, changes_hands: bool, is_read_before: bool, is_dropped: bool
) -> None:
    """`is_read_before`: the id has changed hands before the queue was seen empty."""
    sockets = ScriptedSockets()
    stack.callback(sockets.close_after, 0.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    stranger = context.socket(zmq.DEALER)
    stranger.connect(sockets.address)
    if is_read_before:
        # The connection opens, and its id changes hands. Then the queue is empty.
        sockets.changes_hands = changes_hands
        wait_until(lambda: not (sockets.next_message(0.05) or sockets.changes_hands), "a look")
        assert sockets.next_message(0.0) is None
    stranger.send(b"hello")
    wait_until(sockets.has_message, "the message came")
    sockets.changes_hands = changes_hands and not is_read_before
    before = sockets.refusals.count
    assert sockets.next_message(1.0) is None
    assert bool(sockets.dropped) == is_dropped
    assert (sockets.refusals.count > before) != is_dropped
