"""Reading typed data in any thread.

msgspec works out what a struct's fields are when it first reads one, and two threads that do so at
once crash the process (seen with 0.22). So it is done here, by one thread at a time.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

_making = threading.Lock()
_decoders: dict[tuple[Any, Any], Any] = {}


def from_msgpack(data: Buffer, expected: type[T]) -> T:
    """Return what msgpack data holds.

    Raises:
        msgspec.MsgspecError: it holds something else.
    """
    found: T = _decoder(msgspec.msgpack.Decoder, expected).decode(data)
    return found


def from_json(data: Buffer | str, expected: type[T]) -> T:
    """Return what JSON data holds.

    Raises:
        msgspec.MsgspecError: it holds something else.
    """
    found: T = _decoder(msgspec.json.Decoder, expected).decode(data)
    return found


def _decoder(kind: Any, expected: Any) -> Any:
    known = _decoders.get((kind, expected))
    if known is None:
        with _making:
            known = _decoders.setdefault((kind, expected), kind(expected))
    return known
