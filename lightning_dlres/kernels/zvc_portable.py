"""The loops of zero-value compression for any processor.

No branch depends on the data, which would cost a factor of four: every element is written where the
next one to keep belongs, and the place moves on if it was one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from lightning_dlres.core.compiled import compiled, part

_WIDTHS = (1, 2, 4)
_ELEMENTS: dict[int, Any] = {1: types.uint8, 2: types.uint16, 4: types.uint32}


def encoder_types(width: int) -> tuple[Any, Any, Any]:
    """Return Numba's types of what an encoder of elements of so many bytes is called with."""
    elements = _ELEMENTS[width][::1]
    return elements, types.uint8[::1], elements


def decoder_types(width: int) -> tuple[Any, Any, Any]:
    """Return Numba's types of what a decoder is called with."""
    elements = _ELEMENTS[width][::1]
    return types.uint8[::1], elements, elements


@compiled(*map(encoder_types, _WIDTHS), nogil=True)
def _encode_elements(source: Any, mask: Any, values: Any) -> Any:
    kept: Any = 0
    for first in range(0, source.size - 7, 8):
        bits = np.uint8(0)
        for place in range(8):
            value = source[first + place]
            values[kept] = value
            is_set = np.uint8(value != 0)
            bits |= is_set << place
            kept += is_set
        mask[first // 8] = bits
    return encode_rest(source, mask, values, kept)


@part
def encode_rest(source: Any, mask: Any, values: Any, kept: Any) -> Any:
    """Encode what is behind the last group of eight elements; return how many are kept of all."""
    first = source.size // 8 * 8
    if first < source.size:
        bits = np.uint8(0)
        for place in range(source.size - first):
            value = source[first + place]
            values[kept] = value
            is_set = np.uint8(value != 0)
            bits |= is_set << place
            kept += is_set
        mask[first // 8] = bits
    return kept


@compiled(*map(decoder_types, _WIDTHS), nogil=True)
def _decode_elements(mask: Any, values: Any, out: Any) -> Any:
    groups, group, kept = out.size // 8, 0, 0
    while group < groups and kept + 8 <= values.size:
        bits = mask[group]
        for place in range(8):
            is_set = (bits >> place) & 1
            out[group * 8 + place] = values[kept] * is_set
            kept += is_set
        group += 1
    return decode_rest(mask, values, out, group, kept)


@part
def decode_rest(mask: Any, values: Any, out: Any, group: Any, kept: Any) -> Any:
    """Decode from a group of eight elements on; return how many are kept of all."""
    # Here nothing may be read ahead: there is less than a group of values left.
    for index in range(group * 8, out.size):
        is_set = (mask[index // 8] >> (index % 8)) & 1
        out[index] = values[kept] if is_set else 0
        kept += is_set
    return kept


ENCODERS: dict[int, Any] = dict.fromkeys(_WIDTHS, _encode_elements)
DECODERS: dict[int, Any] = dict.fromkeys(_WIDTHS, _decode_elements)
