"""What the cache and storage nodes say to each other; each message is a frame of `core.frames`.

- "hello" -> "welcome" (`Welcome`): which data set, which node of how many.
- "table" (`PartWish`) -> "table": so many samples of the table, as its file holds them.
- "get" (uint32 numbers, little-endian) -> "data": the samples one behind the other, or "failed"
  (text). The reply has the request's sequence number.
- anything else -> "failed".
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.prefetch.sequence import Positions

VERSION = 1
HELLO, WELCOME, TABLE, GET, DATA, FAILED = "hello", "welcome", "table", "get", "data", "failed"

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Welcome(msgspec.Struct, frozen=True):
    """What a node serves; `digest` as in `SampleTable`."""

    version: int
    samples: _Count
    digest: str
    node: _Count
    nodes: _Count


class PartWish(msgspec.Struct, frozen=True):
    """A part of the table."""

    first: _Count
    count: _Count


def pack_numbers(numbers: Positions) -> bytes:
    """Return the payload of a "get"."""
    return np.ascontiguousarray(numbers, "<u4").tobytes()


def unpack_numbers(payload: bytes, samples: int, peer: str) -> Positions:
    """Return the numbers of a "get".

    Raises:
        ProtocolError: the payload is not that, or asks for samples that there are not.
    """
    if not payload or len(payload) % 4:
        raise ProtocolError(f"{peer} sent {len(payload)} bytes, expected numbers of 4 bytes.")
    numbers = np.frombuffer(payload, dtype="<u4").astype(np.uint32, copy=False)
    if int(numbers.max()) >= samples:
        raise ProtocolError(
            f"{peer} asked for sample {int(numbers.max())}, expected less than {samples}. Does it "
            "read another data set?"
        )
    return numbers
