"""Messages between the cache and storage nodes; each is one frame of `core.wire.frames`.

- "hello" is answered by "welcome" (`Welcome`): the data set, and the place of the node.
- "table" (`TableRows`) is answered by "table": these rows, in the format of a store's manifest.
- "get" (sample ids, uint32, little-endian) is answered by "data": the samples one behind the other.
  If another try may help, the answer is "failed" (text). If a file is gone or has another size, it
  is "lost" (text). Each answer has the sequence number of the request.
- Anything else is answered by "failed".

An answer holds at most `REPLY_BYTES`, or a single sample. It may therefore be only the beginning of
the requested samples; the client requests the rest again. So a request costs a node a bounded
amount of memory, whatever it asks for.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.prefetch.order.sequence import MOST_SAMPLES, SampleIds

VERSION = 4
# Most bytes of an answer, unless it is a single sample that is larger.
REPLY_BYTES = 64 << 20
# Most samples of a "get"; four bytes each.
REQUEST_SAMPLES = 1 << 16
# Most bytes of a request, and of what an answer has beside its samples.
MESSAGE_BYTES = 1 << 20
HELLO, WELCOME, TABLE, GET = "hello", "welcome", "table", "get"
DATA, FAILED, LOST = "data", "failed", "lost"

_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_SAMPLES)]


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description that a node gives of itself.

    Attributes:
        version: Version of this protocol.
        samples: Number of samples in the data set.
        digest: Hash of the table, see `SampleTable`.
        node: Index of the node.
        nodes: Number of nodes.
        content_digest: Hash of the beginnings of some samples, see `Reader`.
    """

    version: int
    samples: _Count
    digest: str
    node: _Count
    nodes: _Count
    content_digest: str = ""


class TableRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request for the rows of `count` samples of the table, from sample_id `first` on."""

    first: _Count
    count: _Count


def pack_sample_ids(sample_ids: SampleIds) -> bytes:
    """Return the payload of a "get"."""
    return np.ascontiguousarray(sample_ids, "<u4").tobytes()


def samples_in_reply(sizes: NDArray[np.int64]) -> int:
    """Return the number of samples, of those with these sizes in bytes, that one answer holds.

    Both sides compute it, so that an answer need not say which samples it has.
    """
    ends = np.cumsum(sizes)
    return max(1, int(np.searchsorted(ends, REPLY_BYTES, side="right")))


def unpack_sample_ids(payload: bytes, samples: int, peer: str) -> SampleIds:
    """Return the sample ids of a "get".

    Args:
        payload: The payload.
        samples: Number of samples in the data set.
        peer: Name of the client, for errors.

    Raises:
        ProtocolError: If the payload is no "get", or an id is out of range.
    """
    if not 0 < len(payload) <= 4 * REQUEST_SAMPLES or len(payload) % 4:
        raise ProtocolError(
            f"{peer} sent a get of {len(payload)} bytes, expected 1 to {REQUEST_SAMPLES} sample "
            "ids of 4 bytes."
        )
    sample_ids = np.frombuffer(payload, dtype="<u4").astype(np.uint32, copy=False)
    if int(sample_ids.max()) >= samples:
        raise ProtocolError(
            f"{peer} asked for sample_id {int(sample_ids.max())}, expected less than {samples}. "
            "Let it read the same data set."
        )
    return sample_ids
