"""Checksum of messages, for damage on the way and not against attackers."""

from __future__ import annotations

import xxhash

# MessagePack schemas limit whole numbers to 63 bits.
_MASK = (1 << 63) - 1


def checksum_of(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """Return the checksum of some bytes, from 0 to 2^63 - 1.

    Args:
        data: The bytes, in contiguous memory.
        start: Checksum of what comes before them.
    """
    return int(xxhash.xxh3_64_intdigest(data, seed=start)) & _MASK
