"""Order of transmissions without collisions, planned from metadata alone.

A rank can send and receive at once. The planner lets each rank send at most one message at a time,
and receive at most one. Waiting transfers of a step with the same source and destination share
messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

# Size in bytes at which a message takes no more transfers. It is so small that a rank decodes one
# message while the next one is on its way, and so large that the fixed time per message does not
# matter.
MESSAGE_BYTES = 256 << 10
# The same on slow links, where such a message would take long: the bytes that the slowest link
# carries in these seconds, but at least this many bytes.
_MESSAGE_SECONDS, _LEAST_MESSAGE_BYTES = 0.01, 32 << 10
# Longest time that a ready payload waits, so that others share its message, in seconds. Payloads
# wait only for compute tasks that may lead to others, and until those for one rank fill a message.
# A message takes processor time on both sides, most of which does not depend on its size.
COALESCE_SECONDS = 0.005


# Step, number of the unit, and number of the `Part`.
Entry = tuple[int, int, int]


def message_bytes_for(bandwidths: Sequence[float]) -> int:
    """Return the size in bytes at which a message takes no more transfers.

    Args:
        bandwidths: Bytes per second of each rank's link, in each direction.
    """
    carried = round(_MESSAGE_SECONDS * min(bandwidths))
    return max(_LEAST_MESSAGE_BYTES, min(MESSAGE_BYTES, carried))


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
        message_bytes: Size in bytes from which a message takes no more transfers.
    """

    message_bytes: int = MESSAGE_BYTES
    _waiting: dict[tuple[int, int], deque[Transfer]] = field(default_factory=dict)
    _sending: set[int] = field(default_factory=set)
    _receiving: set[int] = field(default_factory=set)

    def add(self, transfers: Iterable[Transfer]) -> None:
        """Add transfers that are ready."""
        for transfer in transfers:
            pair = transfer.source, transfer.destination
            self._waiting.setdefault(pair, deque()).append(transfer)

    def finish(self, source: int, destination: int) -> None:
        """Mark the message between two ranks as arrived."""
        self._sending.discard(source)
        self._receiving.discard(destination)

    def next_transmissions(self) -> list[Transmission]:
        """Return messages between ranks that are free to send and to receive, and mark these ranks
        as busy until `finish`.

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
