"""Measured costs that plans and the simulator of gradient synchronisation start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """Time of a task that grows with its size.

    Attributes:
        fixed_seconds: Seconds of a task of size 0.
        seconds_per_item: Seconds of each item: an element in a compute task, a byte in a transfer.
    """

    fixed_seconds: float
    seconds_per_item: float

    def seconds(self, size: float) -> float:
        """Return the seconds of a task of `size` items."""
        return self.fixed_seconds + self.seconds_per_item * size


@dataclass(frozen=True, kw_only=True)
class CodecCosts:
    """Times of one codec on the slowest rank; sizes are elements.

    Attributes:
        encode: Encoding a gradient, with its residual.
        merge: Decoding a payload and adding it to a sum.
        decode: Decoding the sum.
    """

    encode: LinearCost
    merge: LinearCost
    decode: LinearCost


@dataclass(frozen=True, kw_only=True)
class LinkCosts:
    """Links of all ranks to a network without other limits.

    Attributes:
        message_seconds: Fixed seconds for which a message takes the sender's and the receiver's
            link, added to the seconds of its bytes.
        bandwidths: Bytes per second of each rank's link, in each direction.
        latency_seconds: Seconds from then, when the two links are free again, until the message
            arrives.
        incast_share: Share of the bandwidth that is left while several ranks send to the same rank
            (incast), because packets get lost. A coordinator prevents that.
    """

    message_seconds: float
    bandwidths: tuple[float, ...]
    latency_seconds: float = 0.0
    incast_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SyncCosts:
    """All costs of synchronisation.

    Attributes:
        codecs: Costs by the name of the codec; "raw" for elements that are sent as they are.
        links: Links of the ranks.
        all_reduce: Time of torch's own all-reduce on all ranks; sizes are bytes.
    """

    codecs: Mapping[str, CodecCosts]
    links: LinkCosts
    all_reduce: LinearCost
