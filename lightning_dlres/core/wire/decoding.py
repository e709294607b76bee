"""Reading typed data in any thread, whoever sent it.

Nesting is bounded: msgspec counts it against the interpreter's recursion limit, and what exceeds
that is an error of the data like any other.

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
    return _decode(msgspec.msgpack.Decoder, data, expected)


def from_json(data: Buffer | str, expected: type[T]) -> T:
    """Return what JSON data holds.

    Raises:
        msgspec.MsgspecError: it holds something else.
    """
    return _decode(msgspec.json.Decoder, data, expected)


def _decode(kind: Any, data: Buffer | str, expected: type[T]) -> T:
    try:
        found: T = _decoder(kind, expected).decode(data)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deep") from error
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"text that is not UTF-8 ({error})") from error
    return found


def _decoder(kind: Any, expected: Any) -> Any:
    known = _decoders.get((kind, expected))
    if known is None:
        with _making:
            known = _decoders.setdefault((kind, expected), kind(expected))
    return known
