"""What the ranks' measurements say about the cluster (Method E, E1, E3): kinds of devices, their
power, and the links between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch

from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.comm.mailbox import Channel, Mailbox
from lightning_dlres.pipeline.profile.cluster import Link
from lightning_dlres.pipeline.profile.cpu_cache import CpuCacheFlusher

_MESSAGES_OF_A_TRIP = 3
_FIRST_PROBE, _LARGEST_PROBE = 1 << 18, 1 << 24
# Of a probe: of a longer profile no more.
MOST_ROUNDS, MOST_SECONDS = 8, 0.05


def pairs_to_measure(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return one pair of ranks for every pair of hosts, and one within every host that has two
    ranks."""
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
    """What one rank saw of a link.

    Attributes:
        link: the way.
        message: seconds that sending or receiving a message took from this process.
    """

    link: Link
    message: float


def probe(
    mailbox: Mailbox,
    a: int,
    b: int,
    nbytes: int,
    caches: CpuCacheFlusher,
    rounds: int = MOST_ROUNDS,
    long_enough: float = MOST_SECONDS,
) -> Probe | None:
    """Measure the way between two ranks; called by all, and None for those that it does not
    concern.

    Args:
        nbytes: size of a typical message, for what a message takes from the process.
        caches: they are cold when a message comes.
        rounds: number of messages of each kind that are timed.
        long_enough: seconds that a message takes whose bandwidth is believed; larger ones are
            tried until then.
    """
    if mailbox.rank not in (a, b):
        return None
    pings = _Pings(mailbox, b if mailbox.rank == a else a, leads=mailbox.rank == a)
    pings.trip(1)
    latency = statistics.median(pings.trip(1) for _ in range(rounds)) / 2
    size = _FIRST_PROBE
    while (seconds := pings.trip(size) / 2) < long_enough and size < _LARGEST_PROBE:
        size *= 4
    seconds = statistics.median([seconds, pings.trip(size) / 2, pings.trip(size) / 2])
    bandwidth = size / max(seconds - latency, 1e-9)
    # Other threads carry the messages. Where the processor is a fraction of a core, they take it
    # from the computing.
    now = time.process_time if torch.get_num_threads() == 1 else time.thread_time
    spent = 0.0
    for _ in range(rounds):
        caches.overwrite()
        start = now()
        pings.trip(max(nbytes, 1))
        spent += now() - start
    return Probe(
        Link(ranks=(a, b), latency=latency, bytes_per_second=bandwidth),
        spent / (_MESSAGES_OF_A_TRIP * rounds),
    )


class _Pings:
    def __init__(self, mailbox: Mailbox, peer: int, leads: bool) -> None:
        self._mailbox, self._peer, self._leads = mailbox, peer, leads
        self._count = 0

    def trip(self, nbytes: int) -> float:
        """Send so many bytes there and back, and return the seconds, the same on both ranks."""
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
