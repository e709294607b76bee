"""Tables of the messages of gradient synchronisation: a row for each payload."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

_ROW = struct.Struct("<qqq")


def packed(rows: Iterable[Sequence[int]]) -> bytes:
    """Return the table of rows of unit, part and size."""
    return b"".join(_ROW.pack(*row) for row in rows)


def unpacked(table: bytes) -> list[tuple[int, ...]]:
    """Return the rows of a table."""
    return list(_ROW.iter_unpack(table))
