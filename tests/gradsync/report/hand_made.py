"""Spans of two ranks as a step of synchronisation would leave them, with round times."""

from __future__ import annotations

from lightning_dlres.core.trace import Span
from lightning_dlres.gradsync.report.rank_steps import BACKWARD, SYNC, WAIT

MS = 1_000_000
Spans = dict[int, list[Span]]


def span(name: str, category: str, start: float, end: float, **args: int | float) -> Span:
    """Return a span with times in milliseconds."""
    return Span(name, category, round(start * MS), round(end * MS), "thread", args)


def step_spans(number: int, at: float, rank: int, **wait: float) -> list[Span]:
    """Return the spans of a step of 20 ms that begins at `at` ms, in the order of their ends.

    Rank 0 sends 100 bytes from 4 to 5 ms, which arrive at 9 ms. Rank 1 sends 50 bytes from 8 to
    9 ms, which arrive at 14 ms. Backward ends at 10 ms, and all gradients are means at 18 ms. The
    compute tasks of a rank take 3 + 2 + 4 ms, of which 2 + 4 - 1 ms are exposed.
    """
    send = (4, 5, 100) if rank == 0 else (8, 9, 50)
    receive = (13.5, 14, 50) if rank == 0 else (8.5, 9, 100)
    own = [
        span("encode", "compute", at + 1, at + 4, unit=0),
        span(
            "send",
            "transfer",
            at + send[0],
            at + send[1],
            peer=1 - rank,
            step=number,
            nbytes=send[2],
            raw_nbytes=16 * send[2],
        ),
        span("merge", "compute", at + 9, at + 11, unit=0),
        span(
            "receive",
            "transfer",
            at + receive[0],
            at + receive[1],
            peer=1 - rank,
            step=number,
            nbytes=receive[2],
        ),
        # One span may cover several tasks.
        span("decode", "compute", at + 14, at + 18, units=3),
        span(BACKWARD, "compute", at, at + 18),
        span(WAIT, SYNC, at + 10, at + 18, step=number, **wait),
        span("step", "step", at - 2, at + 18, step=number),
    ]
    # What other parts of the program record.
    return [*own, span("receive gradient_sync", "transfer", at + 8, at + 9, peer=1 - rank)]


def run_spans(steps: int) -> Spans:
    """Return the spans of some steps of two ranks, one every 20 ms."""
    return {
        rank: [s for number in range(steps) for s in step_spans(number, 20 * number, rank)]
        for rank in range(2)
    }
