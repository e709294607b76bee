"""The loops of zero-value compression with instructions of x86 processors: eight bytes at a time of
elements of one and two bytes (BMI2), and eight elements of four bytes (AVX2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.compiled import compiled
from lightning_dlres.kernels.x86 import (
    count_bits,
    gather_bits,
    has_avx2,
    has_fast_bit_gather,
    load_word,
    pack_elements,
    scatter_bits,
    spread_elements,
    store_word,
)
from lightning_dlres.kernels.zvc_portable import (
    decode_rest,
    decoder_types,
    encode_rest,
    encoder_types,
)

_LOW_1, _HIGH_1 = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x8080808080808080)
_LOW_2, _HIGH_2 = np.uint64(0x7FFF7FFF7FFF7FFF), np.uint64(0x8000800080008000)
_ALL_1, _ALL_2 = np.uint64(0xFF), np.uint64(0xFFFF)
_TOP_1, _TOP_2, _FOUR = np.uint64(7), np.uint64(15), np.uint64(4)


def _orders() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return, for each of the 256 masks of eight elements, from where each place takes its element
    when they are packed, and when they are spread again: int32[256, 8] twice."""
    pack, spread = np.zeros((256, 8), np.int32), np.zeros((256, 8), np.int32)
    for mask in range(256):
        places = [place for place in range(8) if mask >> place & 1]
        pack[mask, : len(places)] = places
        spread[mask, places] = range(len(places))
    return pack, spread


_PACK, _SPREAD = _orders()


@compiled(encoder_types(1), nogil=True)
def _encode_gathering_1(source: Any, mask: Any, values: Any) -> Any:
    kept: Any = 0
    for group in range(source.size // 8):
        word = load_word(source, group * 8)
        # The highest bit of every byte that is not zero; the carry of no byte reaches another.
        found = (((word & _LOW_1) + _LOW_1) | word) & _HIGH_1
        mask[group] = np.uint8(gather_bits(found, _HIGH_1))
        store_word(values, kept, gather_bits(word, (found >> _TOP_1) * _ALL_1))
        kept += np.int64(count_bits(found))
    return encode_rest(source, mask, values, kept)


@compiled(encoder_types(2), nogil=True)
def _encode_gathering_2(source: Any, mask: Any, values: Any) -> Any:
    kept: Any = 0
    for group in range(source.size // 8):
        word = load_word(source, group * 16)
        found = (((word & _LOW_2) + _LOW_2) | word) & _HIGH_2
        store_word(values, kept * 2, gather_bits(word, (found >> _TOP_2) * _ALL_2))
        kept += np.int64(count_bits(found))
        bits = gather_bits(found, _HIGH_2)
        word = load_word(source, group * 16 + 8)
        found = (((word & _LOW_2) + _LOW_2) | word) & _HIGH_2
        store_word(values, kept * 2, gather_bits(word, (found >> _TOP_2) * _ALL_2))
        kept += np.int64(count_bits(found))
        mask[group] = np.uint8(bits | (gather_bits(found, _HIGH_2) << _FOUR))
    return encode_rest(source, mask, values, kept)


@compiled(decoder_types(1), nogil=True)
def _decode_scattering_1(mask: Any, values: Any, out: Any) -> Any:
    groups, group = out.size // 8, 0
    kept: Any = 0
    while group < groups and kept + 8 <= values.size:
        found = scatter_bits(np.uint64(mask[group]), _HIGH_1)
        word = load_word(values, kept)
        store_word(out, group * 8, scatter_bits(word, (found >> _TOP_1) * _ALL_1))
        kept += np.int64(count_bits(found))
        group += 1
    return decode_rest(mask, values, out, group, kept)


@compiled(decoder_types(2), nogil=True)
def _decode_scattering_2(mask: Any, values: Any, out: Any) -> Any:
    groups, group = out.size // 8, 0
    kept: Any = 0
    while group < groups and kept + 8 <= values.size:
        bits = np.uint64(mask[group])
        found = scatter_bits(bits, _HIGH_2)
        word = load_word(values, kept * 2)
        store_word(out, group * 16, scatter_bits(word, (found >> _TOP_2) * _ALL_2))
        kept += np.int64(count_bits(found))
        found = scatter_bits(bits >> _FOUR, _HIGH_2)
        word = load_word(values, kept * 2)
        store_word(out, group * 16 + 8, scatter_bits(word, (found >> _TOP_2) * _ALL_2))
        kept += np.int64(count_bits(found))
        group += 1
    return decode_rest(mask, values, out, group, kept)


@compiled(encoder_types(4), nogil=True)
def _encode_packing_4(source: Any, mask: Any, values: Any) -> Any:
    kept: Any = 0
    for group in range(source.size // 8):
        bits = pack_elements(source, group * 32, values, kept * 4, _PACK)
        mask[group] = np.uint8(bits)
        kept += np.int64(count_bits(bits))
    return encode_rest(source, mask, values, kept)


@compiled(decoder_types(4), nogil=True)
def _decode_spreading_4(mask: Any, values: Any, out: Any) -> Any:
    groups, group = out.size // 8, 0
    kept: Any = 0
    while group < groups and kept + 8 <= values.size:
        bits = np.uint64(mask[group])
        spread_elements(values, kept * 4, bits, out, group * 32, _SPREAD)
        kept += np.int64(count_bits(bits))
        group += 1
    return decode_rest(mask, values, out, group, kept)


ENCODERS: dict[int, Any] = {}
DECODERS: dict[int, Any] = {}
if has_fast_bit_gather():
    ENCODERS |= {1: _encode_gathering_1, 2: _encode_gathering_2}
    DECODERS |= {1: _decode_scattering_1, 2: _decode_scattering_2}
if has_avx2():
    ENCODERS[4], DECODERS[4] = _encode_packing_4, _decode_spreading_4
