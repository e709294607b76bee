"""Order of transmissions without collisions, planned from metadata alone.

Every link has two directions. A plan fills both of them, and gives each direction one message at
a time: no rank sends two messages at once, and none receives two at once. Transfers with the same
source and destination share messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

# Size in bytes at which a message is full, and takes no more transfers. Small enough that a rank
# decodes one message while the next one is on its way; large enough that the fixed time per message
# is negligible.
MESSAGE_BYTES = 256 << 10
# Without a coordinator: for so long after a message to a rank, further payloads to it may wait, so
# that they share a message. A slow link is still busy then; on a fast one, the time is negligible.
FOLLOWING_SECONDS = 0.003
# Without a coordinator: bytes of waiting payloads to one rank at which they no longer wait.
WAITING_BYTES = 128 << 10


# Step, number of the unit, and number of the `Part`.
Entry = tuple[int, int, int]


@dataclass(frozen=True)
class Transfer:
    """Metadata of a transfer that is ready.

    Attributes:
        source: Sending rank.
        destination: Receiving rank.
        entry: Step, unit, and number of the `Part`.
        nbytes: Size of the payload.
    """

    source: int
    destination: int
    entry: Entry
    nbytes: int


@dataclass(frozen=True)
class Transmission:
    """Transfers that travel as one message.

    Attributes:
        source: Sending rank.
        destination: Receiving rank.
        entries: Step, unit and part of each transfer; all of one step.
    """

    source: int
    destination: int
    entries: tuple[Entry, ...]


@dataclass
class TransmissionPlanner:
    """Planner that forms messages of ready transfers while links are free.

    It has no clock and no sockets: the caller reports what is ready and what has arrived.

    Attributes:
        message_bytes: Size in bytes at which a message is full, and takes no more transfers.
    """

    message_bytes: int = MESSAGE_BYTES
    _waiting: dict[tuple[int, int], deque[Transfer]] = field(default_factory=dict)
    _sending: set[int] = field(default_factory=set)
    _receiving: set[int] = field(default_factory=set)

    def add(self, transfers: Iterable[Transfer]) -> None:
        """Report transfers that are ready."""
        for transfer in transfers:
            pair = transfer.source, transfer.destination
            self._waiting.setdefault(pair, deque()).append(transfer)

    def finish(self, source: int, destination: int) -> None:
        """Report that the message between two ranks has arrived."""
        self._sending.discard(source)
        self._receiving.discard(destination)

    def next_transmissions(self) -> list[Transmission]:
        """Return messages for free links; each link stays busy until its message has arrived.

        The pair of ranks with the most waiting bytes goes first.
        """
        messages = []
        waiting = {
            pair: sum(transfer.nbytes for transfer in transfers)
            for pair, transfers in self._waiting.items()
            if transfers
        }
        for source, destination in sorted(waiting, key=lambda pair: (-waiting[pair], pair)):
            if source in self._sending or destination in self._receiving:
                continue
            self._sending.add(source)
            self._receiving.add(destination)
            entries = tuple(self._take(source, destination))
            messages.append(Transmission(source, destination, entries))
        return messages

    @property
    def is_idle(self) -> bool:
        """True if nothing waits and nothing is under way."""
        return not self._sending and not any(self._waiting.values())

    def _take(self, source: int, destination: int) -> Iterator[Entry]:
        transfers, nbytes = self._waiting[source, destination], 0
        step = transfers[0].entry[0]
        while transfers and nbytes < self.message_bytes and transfers[0].entry[0] == step:
            transfer = transfers.popleft()
            nbytes += transfer.nbytes
            yield transfer.entry
