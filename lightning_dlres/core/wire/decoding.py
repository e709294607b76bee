"""Decoding of msgpack and JSON data into values of given types.

Any thread may decode, and the data may be malformed.

msgspec counts nesting against the interpreter's recursion limit. Deeper data raises `DecodeError`,
as other invalid data does.

msgspec inspects the fields of a struct when its first decoder is created. Two threads that do so at
once crash the process (seen with 0.22). A lock therefore lets only one thread create a decoder.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

_creation_lock = threading.Lock()
_decoders: dict[tuple[Any, Any], Any] = {}


def from_msgpack(data: Buffer, expected: type[T]) -> T:
    """Return msgpack data as a value of the expected type.

    Raises:
        msgspec.MsgspecError: If the data is invalid or of another type.
    """
    return _decode(msgspec.msgpack.Decoder, data, expected)


def from_json(data: Buffer | str, expected: type[T]) -> T:
    """Return JSON data as a value of the expected type.

    Raises:
        msgspec.MsgspecError: If the data is invalid or of another type.
    """
    return _decode(msgspec.json.Decoder, data, expected)


def _decode(decoder_type: Any, data: Buffer | str, expected: type[T]) -> T:
    try:
        value: T = _decoder(decoder_type, expected).decode(data)
    except RecursionError as error:
        raise msgspec.DecodeError("data nested deeper than the recursion limit") from error
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"text that is not UTF-8 ({error})") from error
    return value


def _decoder(decoder_type: Any, expected: Any) -> Any:
    decoder = _decoders.get((decoder_type, expected))
    if decoder is None:
        with _creation_lock:
            decoder = _decoders.setdefault((decoder_type, expected), decoder_type(expected))
    return decoder
