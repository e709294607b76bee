"""Result of a simulation: times of all ranks, and spans that a trace viewer draws."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_dlres.core.trace import Span
from lightning_dlres.gradsync.plan.transmissions import Transmission


@dataclass(frozen=True, slots=True)
class SimulatedSpan:
    """Work of one queue or link direction of a rank.

    Attributes:
        rank: The rank.
        name: "encode", "merge", "decode", "send" or "receive".
        start: Start in seconds.
        end: End in seconds.
        payloads: Unit and number of the `Part` of the task, or of each payload of the message.
        peer: The other rank of a message, or the rank whose gradient is merged; else None.
    """

    rank: int
    name: str
    start: float
    end: float
    payloads: tuple[tuple[int, int], ...]
    peer: int | None

    @property
    def is_transfer(self) -> bool:
        """True if the span is a message on a link."""
        return self.name in ("send", "receive")


@dataclass(frozen=True, kw_only=True)
class SimulatedSync:
    """Times of one simulated step; all sequences are by rank.

    Attributes:
        finish: Time at which the rank's last task was done, in seconds.
        exposed: Seconds from the end of the rank's backward to `finish`, at least 0.
        compute_busy: Seconds in which the queue of compute tasks was at work.
        sending_busy: Seconds of work of the link's sending direction.
        receiving_busy: Seconds of work of the link's receiving direction.
        messages: Number of messages with payloads.
        reports: Number of reports to the coordinator, the coordinator's own ones included.
        order: Messages in the order in which they were planned or sent.
        spans: Spans of all tasks and messages in the order of their ends; empty if the simulation
            was not traced.
    """

    finish: tuple[float, ...]
    exposed: tuple[float, ...]
    compute_busy: tuple[float, ...]
    sending_busy: tuple[float, ...]
    receiving_busy: tuple[float, ...]
    messages: int
    reports: int
    order: tuple[Transmission, ...]
    spans: tuple[SimulatedSpan, ...]

    @property
    def seconds(self) -> float:
        """Time at which the last rank has finished."""
        return max(self.finish)

    def processes(self, ranks: Iterable[int] | None = None) -> dict[str, list[Span]]:
        """Return the spans by rank, as `core.trace.write_chrome_trace` takes them.

        Compute tasks have one row, and messages one row for each other rank: a link carries several
        messages at once.

        Args:
            ranks: Ranks to return; None for all.
        """
        chosen = range(len(self.finish)) if ranks is None else ranks
        processes: dict[str, list[Span]] = {f"rank {rank}": [] for rank in chosen}
        for span in self.spans:
            row = processes.get(f"rank {span.rank}")
            if row is not None:
                row.append(_trace_span(span))
        return processes


def _trace_span(span: SimulatedSpan) -> Span:
    preposition = "to" if span.name == "send" else "from"
    thread = f"{span.name} {preposition} {span.peer}" if span.is_transfer else "compute"
    unit, part = span.payloads[0]
    return Span(
        name=span.name,
        category="transfer" if span.is_transfer else "compute",
        start_ns=round(1e9 * span.start),
        end_ns=round(1e9 * span.end),
        thread=thread,
        args={"unit": unit, "part": part, "peer": span.peer, "units": len(span.payloads)},
    )
