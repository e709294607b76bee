"""Loops of zero-value compression for any processor.

In the loops over groups of eight elements, no branch depends on the data: mispredicted branches
would cost a factor of four. The encoder writes each element, also a zero, at the end of the values.
Only a non-zero element advances this end; the next element overwrites a zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from lightning_dlres.core.compiled import compiled, subroutine

_WIDTHS = (1, 2, 4)
_NUMBA_TYPES: dict[int, Any] = {1: types.uint8, 2: types.uint16, 4: types.uint32}


def encoder_types(width: int) -> tuple[Any, Any, Any]:
    """Return the Numba types of the arguments of an encoder for elements of `width` bytes."""
    elements = _NUMBA_TYPES[width][::1]
    return elements, types.uint8[::1], elements


def decoder_types(width: int) -> tuple[Any, Any, Any]:
    """Return the Numba types of the arguments of a decoder for elements of `width` bytes."""
    elements = _NUMBA_TYPES[width][::1]
    return types.uint8[::1], elements, elements


@compiled(*map(encoder_types, _WIDTHS), nogil=True)
def _encode_elements(source: Any, mask: Any, values: Any) -> Any:
    nonzero: Any = 0
    for first in range(0, source.size - 7, 8):
        bits = np.uint8(0)
        for bit in range(8):
            value = source[first + bit]
            values[nonzero] = value
            is_set = np.uint8(value != 0)
            bits |= is_set << bit
            nonzero += is_set
        mask[first // 8] = bits
    return encode_rest(source, mask, values, nonzero)


@subroutine
def encode_rest(source: Any, mask: Any, values: Any, nonzero: Any) -> Any:
    """Encode the elements after the last whole group of eight.

    Args:
        source: All elements.
        mask: Mask of all elements.
        values: Receives the non-zero elements.
        nonzero: Number of non-zero elements before these.

    Returns:
        Number of non-zero elements in `source`.
    """
    first = source.size // 8 * 8
    if first < source.size:
        bits = np.uint8(0)
        for bit in range(source.size - first):
            value = source[first + bit]
            values[nonzero] = value
            is_set = np.uint8(value != 0)
            bits |= is_set << bit
            nonzero += is_set
        mask[first // 8] = bits
    return nonzero


@compiled(*map(decoder_types, _WIDTHS), nogil=True)
def _decode_elements(mask: Any, values: Any, out: Any) -> Any:
    groups, group, nonzero = out.size // 8, 0, 0
    while group < groups and nonzero + 8 <= values.size:
        bits = mask[group]
        for bit in range(8):
            is_set = (bits >> bit) & 1
            out[group * 8 + bit] = values[nonzero] * is_set
            nonzero += is_set
        group += 1
    return decode_rest(mask, values, out, group, nonzero)


@subroutine
def decode_rest(mask: Any, values: Any, out: Any, group: Any, nonzero: Any) -> Any:
    """Decode the elements that the loop over groups of eight has left.

    That loop reads up to eight values for a group, so it stops when fewer than eight are left.

    Args:
        mask: Mask of all elements.
        values: Non-zero elements.
        out: Receives all elements.
        group: First group to decode.
        nonzero: Number of non-zero elements before this group.

    Returns:
        Number of non-zero elements in `out`.
    """
    for index in range(group * 8, out.size):
        is_set = (mask[index // 8] >> (index % 8)) & 1
        out[index] = values[nonzero] if is_set else 0
        nonzero += is_set
    return nonzero


ENCODERS: dict[int, Any] = dict.fromkeys(_WIDTHS, _encode_elements)
DECODERS: dict[int, Any] = dict.fromkeys(_WIDTHS, _decode_elements)
