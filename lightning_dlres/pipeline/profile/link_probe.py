"""Measurement of the links between ranks: latency, bandwidth, and the cost of a message."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch

from lightning_dlres.core.comm.mailbox import Channel, Mailbox
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.profile.cluster import Link
from lightning_dlres.pipeline.profile.cpu_cache import CpuCacheFlusher

# Messages that one rank sends or receives in a round trip: there, back, and the measured time.
_MESSAGES_PER_ROUND_TRIP = 3
# Bytes of the first and of the largest bandwidth probe.
_FIRST_PROBE, _LARGEST_PROBE = 1 << 18, 1 << 24
# Largest `rounds` and `min_message_seconds` of a probe. A short profile uses smaller values.
MAX_ROUNDS, MAX_MESSAGE_SECONDS = 8, 0.05


def pairs_to_measure(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return one pair of ranks for every pair of hosts, and for every host of two or more ranks.

    Args:
        hosts: Host of every rank.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    return list(_pairs(list(by_host.values())))


def _pairs(groups: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    for a, b in combinations_with_replacement(groups, 2):
        if a is not b:
            yield a[0], b[0]
        elif len(a) > 1:
            yield a[0], a[1]


@dataclass(frozen=True)
class Probe:
    """Measurement of one link, on one of its two ranks.

    Attributes:
        link: The link, with its latency and bandwidth.
        message_seconds: Processor seconds for sending or receiving one message: of this process if
            it has one compute thread, else of the calling thread.
    """

    link: Link
    message_seconds: float


def probe_link(
    mailbox: Mailbox,
    a: int,
    b: int,
    message_bytes: int,
    flusher: CpuCacheFlusher,
    *,
    rounds: int = MAX_ROUNDS,
    min_message_seconds: float = MAX_MESSAGE_SECONDS,
) -> Probe | None:
    """Return the measured link between two ranks; None on all other ranks.

    All ranks may call this; only the two ranks exchange messages.

    Args:
        mailbox: This rank's mailbox.
        a: First rank; it starts each round trip.
        b: Second rank.
        message_bytes: Size of a typical message, for `Probe.message_seconds`.
        flusher: Flushes the caches before each typical message, as layers do in training.
        rounds: Number of round trips for the latency, and for `Probe.message_seconds`.
        min_message_seconds: Bandwidth is measured with messages that take at least this time, since
            shorter ones are inaccurate. The messages grow until then, or up to 16 MiB.
    """
    if mailbox.rank not in (a, b):
        return None
    pings = _Pings(mailbox, b if mailbox.rank == a else a, leads=mailbox.rank == a)
    pings.round_trip(1)  # opens the connection
    latency = statistics.median(pings.round_trip(1) for _ in range(rounds)) / 2
    size = _FIRST_PROBE
    while (seconds := pings.round_trip(size) / 2) < min_message_seconds and size < _LARGEST_PROBE:
        size *= 4
    seconds = statistics.median([seconds, pings.round_trip(size) / 2, pings.round_trip(size) / 2])
    bandwidth = size / max(seconds - latency, 1e-9)
    # Other threads carry the messages. A process with one compute thread may have a single core, or
    # a part of one. These threads then slow the computation, so the whole process's time counts.
    now = time.process_time if torch.get_num_threads() == 1 else time.thread_time
    spent = 0.0
    for _ in range(rounds):
        flusher.overwrite()
        start = now()
        pings.round_trip(max(message_bytes, 1))
        spent += now() - start
    return Probe(
        Link(ranks=(a, b), latency=latency, bytes_per_second=bandwidth),
        spent / (_MESSAGES_PER_ROUND_TRIP * rounds),
    )


class _Pings:
    """Round trips between two ranks; `leads` is set on the rank that starts them."""

    def __init__(self, mailbox: Mailbox, peer: int, leads: bool) -> None:
        self._mailbox, self._peer, self._leads = mailbox, peer, leads
        self._count = 0

    def round_trip(self, nbytes: int) -> float:
        """Send this many bytes there and back; return the same seconds on both ranks."""
        self._count += 1
        start = time.perf_counter()
        if self._leads:
            self._send("there", torch.zeros(nbytes, dtype=torch.uint8))
            self._receive("back")
            seconds = time.perf_counter() - start
            self._send("took", seconds)
            return seconds
        self._send("back", self._receive("there"))
        return float(self._receive("took"))

    def _send(self, word: str, tree: Tree) -> None:
        self._mailbox.send(self._peer, Channel.PROBE, (word, self._count), tree)

    def _receive(self, word: str) -> Tree:
        key = (word, self._count)
        return self._mailbox.receive(self._peer, Channel.PROBE, key, "the link's measurement")
