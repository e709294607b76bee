"""Latency, time for each message, and bandwidth of the ranks' links.

All ranks send at the same time, each to a rank at the same distance from it. So every link carries
one message in each direction, as in a planned transmission. A transfer between two ranks moves at
the speed of the slower link. The largest speed of a rank over several distances is therefore taken
for its link. At last, all ranks send to all others at once, which shows how much bandwidth is lost
when several ranks send to the same one.
"""

from __future__ import annotations

import statistics
import time

import torch

from lightning_dlres.gradsync.plan.costs import LinkCosts
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages

# Bytes of a message for the latency, and of one for the time of each message.
_SMALL_BYTES, _BATCH_BYTES = 512, 8 << 10
# Messages of a batch.
_BATCH = 10
# Batches of messages. The fastest one counts: other processes can only lengthen it.
_BATCHES = 5
# Bytes of the first and of the largest message for the bandwidth. The first one is larger than the
# burst that the token bucket of a shaped link lets pass at once.
_FIRST_BYTES, _LARGEST_BYTES = 256 << 10, 8 << 20
# A message of this many seconds is large enough to measure the bandwidth.
_ENOUGH_SECONDS = 0.05
# Largest number of distances between ranks that are tried.
_MOST_DISTANCES = 8
# Largest number of exchanges at each distance.
_MOST_REPEATS = 3
# Messages of each rank to each other one while all send at once, and the least bytes of one.
_INCAST_MESSAGES, _LEAST_INCAST_BYTES = 8, 4 << 10
# Rounds of these messages. Packets get lost only after a while, so rounds must not be short.
_INCAST_ROUNDS = 2


def measure_links(messages: ProbeMessages, *, seconds: float) -> LinkCosts:
    """Return the costs of all links; called by all ranks.

    Args:
        messages: Messages to the other ranks.
        seconds: Time for the bandwidth. At least one message of each rank is sent.

    Raises:
        PeerError: If a rank is late or lost.
    """
    if messages.ranks == 1:
        # No message is sent. Any bandwidth will do.
        return LinkCosts(message_seconds=0.0, bandwidths=(1e12,))
    latency = _latency(messages)
    bandwidths = _bandwidths(messages, latency, seconds)
    # The calling thread sends small messages itself, and hands larger ones to a thread, which takes
    # longer. The token bucket of a shaped link may let a whole batch pass at once, which makes the
    # time of the larger ones too short. The longer time counts.
    message_seconds = max(
        _message_seconds(messages, _SMALL_BYTES),
        _message_seconds(messages, _BATCH_BYTES) - _BATCH_BYTES / min(bandwidths),
    )
    return LinkCosts(
        message_seconds=message_seconds,
        bandwidths=bandwidths,
        latency_seconds=max(latency - message_seconds, 0.0),
        incast_share=_incast_share(messages, min(bandwidths), message_seconds, seconds),
    )


def _latency(messages: ProbeMessages) -> float:
    """Return the seconds until a small message has arrived, on the slowest link."""
    small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8)
    following, previous = _at_distance(messages, 1)
    messages.gather([])
    seconds = []
    for _ in range(2 * _BATCH):
        start = time.perf_counter()
        messages.send(following, small)
        messages.receive(previous)
        seconds.append(time.perf_counter() - start)
    return messages.slowest([sorted(seconds)[len(seconds) // 4]])[0]


def _message_seconds(messages: ProbeMessages, nbytes: int) -> float:
    """Return the seconds per message of a batch, on the slowest link."""
    payload = torch.zeros(nbytes, dtype=torch.uint8)
    following, previous = _at_distance(messages, 1)
    seconds = []
    for _ in range(_BATCHES):
        messages.gather([])
        start = time.perf_counter()
        for _ in range(_BATCH):
            messages.send(following, payload)
        for _ in range(_BATCH):
            messages.receive(previous)
        seconds.append((time.perf_counter() - start) / _BATCH)
    return messages.slowest([min(seconds)])[0]


def _bandwidths(messages: ProbeMessages, latency: float, budget: float) -> tuple[float, ...]:
    nbytes = _FIRST_BYTES
    fastest, slowest = _extremes(messages, _exchange(messages, 1, nbytes, latency))
    # A message of the slowest link is never longer than a part of the budget.
    while fastest < _ENOUGH_SECONDS and 16 * slowest < budget and nbytes < _LARGEST_BYTES:
        nbytes *= 4
        fastest, slowest = _extremes(messages, _exchange(messages, 1, nbytes, latency))
    distances = list(range(1, messages.ranks))[:_MOST_DISTANCES]
    rounds = max(1, int(budget / (2 * slowest)))
    repeats = max(1, min(rounds // len(distances), _MOST_REPEATS))
    bandwidths = [0.0] * messages.ranks
    # With little time, only the first distances are tried.
    for distance in distances[:rounds]:
        speed = nbytes / statistics.median(
            _exchange(messages, distance, nbytes, latency) for _ in range(repeats)
        )
        for receiver, (measured,) in enumerate(messages.gather([speed])):
            # Neither the sender's nor the receiver's link can be slower than the transfer.
            for rank in (receiver, (receiver - distance) % messages.ranks):
                bandwidths[rank] = max(bandwidths[rank], measured)
    return tuple(bandwidths)


def _incast_share(
    messages: ProbeMessages, bandwidth: float, message_seconds: float, budget: float
) -> float:
    """Return the part of the slowest link's bandwidth that is left when all ranks send to all.

    Each rank sends several messages to each other one. Without collisions, they would take at most
    the budget in all rounds together.
    """
    others = [rank for rank in range(messages.ranks) if rank != messages.rank]
    number = _INCAST_MESSAGES * len(others)
    if len(others) < 2:
        return 1.0
    per_message = budget / _INCAST_ROUNDS / number
    nbytes = min(max(int(bandwidth * per_message), _LEAST_INCAST_BYTES), _FIRST_BYTES)
    payload = torch.zeros(nbytes, dtype=torch.uint8)
    rounds = []
    for _ in range(_INCAST_ROUNDS):
        messages.gather([])
        start = time.perf_counter()
        for _ in range(_INCAST_MESSAGES):
            for other in others:
                messages.send(other, payload)
        for other in others:
            for _ in range(_INCAST_MESSAGES):
                messages.receive(other)
        rounds += messages.slowest([time.perf_counter() - start])
    alone = number * nbytes / bandwidth
    # Messages to different ranks fill each other's gaps.
    fixed = _INCAST_MESSAGES * message_seconds
    return alone / max(min(rounds) - fixed, alone)


def _exchange(messages: ProbeMessages, distance: int, nbytes: int, latency: float) -> float:
    """Send two messages to the rank at a distance; return the seconds of one to this rank.

    The token bucket of a shaped link lets the first bytes pass at once, so the second message
    counts. Its bytes may have come before this thread has received the first one, so it counts as
    at least the mean of both.
    """
    destination, source = _at_distance(messages, distance)
    messages.gather([])
    start = time.perf_counter()
    for _ in range(2):
        messages.send(destination, torch.zeros(nbytes, dtype=torch.uint8))
    messages.receive(source)
    first = time.perf_counter() - start
    messages.receive(source)
    both = time.perf_counter() - start
    # Ranks start at times that differ by up to the latency.
    return max(both - first, (both - latency) / 2, both / 4)


def _extremes(messages: ProbeMessages, seconds: float) -> tuple[float, float]:
    """Return the shortest and the longest time of all ranks."""
    gathered = [values[0] for values in messages.gather([seconds])]
    return min(gathered), max(gathered)


def _at_distance(messages: ProbeMessages, distance: int) -> tuple[int, int]:
    """Return the rank to which this one sends at a distance, and the one it receives from."""
    return (
        (messages.rank + distance) % messages.ranks,
        (messages.rank - distance) % messages.ranks,
    )
