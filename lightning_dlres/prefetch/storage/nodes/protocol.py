"""What the cache and storage nodes say to each other; each message is a frame of `core.frames`.

- "hello" -> "welcome" (`Welcome`): which data set, which node of how many.
- "table" (`PartWish`) -> "table": samples of the table from one on, as its file holds them.
- "get" (uint32 numbers, little-endian) -> "data": the samples one behind the other; "failed"
  (text), where another try may help; or "lost" (text), where a file is gone or has another size.
  The reply has the request's sequence number.
- anything else -> "failed".

A reply holds `REPLY_BYTES` at most, or a single sample: it is a beginning of what was asked for,
and the rest is asked for again. So a request costs a node a bounded amount, whatever it names.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.prefetch.order.sequence import MOST_SAMPLES, Positions

VERSION = 4
# Of a reply, but for a single sample that is larger.
REPLY_BYTES = 64 << 20
# Samples of a request, at most; four bytes each.
REQUEST_SAMPLES = 1 << 16
# Of any request; and what a reply may have beside its samples.
MESSAGE_BYTES = 1 << 20
HELLO, WELCOME, TABLE, GET = "hello", "welcome", "table", "get"
DATA, FAILED, LOST = "data", "failed", "lost"

_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_SAMPLES)]


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data set and place of a node; `digest` as in `SampleTable`, `contents` as in `Reader`."""

    version: int
    samples: _Count
    digest: str
    node: _Count
    nodes: _Count
    contents: str = ""


class PartWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the table."""

    first: _Count
    count: _Count


def pack_numbers(numbers: Positions) -> bytes:
    """Return the payload of a "get"."""
    return np.ascontiguousarray(numbers, "<u4").tobytes()


def fitting(sizes: NDArray[np.int64]) -> int:
    """Return how many of some samples, by their sizes in bytes, a reply has."""
    ends = np.cumsum(sizes)
    return max(1, int(np.searchsorted(ends, REPLY_BYTES, side="right")))


def unpack_numbers(payload: bytes, samples: int, peer: str) -> Positions:
    """Return the numbers of a "get".

    Raises:
        ProtocolError: the payload is not that, or asks for samples that there are not.
    """
    if not 0 < len(payload) <= 4 * REQUEST_SAMPLES or len(payload) % 4:
        raise ProtocolError(
            f"{peer} sent {len(payload)} bytes, expected 1 to {REQUEST_SAMPLES} numbers of 4 bytes."
        )
    numbers = np.frombuffer(payload, dtype="<u4").astype(np.uint32, copy=False)
    if int(numbers.max()) >= samples:
        raise ProtocolError(
            f"{peer} asked for sample {int(numbers.max())}, expected less than {samples}. Does it "
            "read another data set?"
        )
    return numbers
