"""Loops of zero-value compression with instructions of x86 processors.

Elements of one and two bytes are processed eight bytes at a time (BMI2). Elements of four bytes are
processed eight elements at a time (AVX2).
"""

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

# Constants for a word of elements of one byte (_1) and of two bytes (_2): the highest bit of every
# element (_HIGH), all other bits (_LOW), all bits of the lowest element (_ALL), and the index of
# its highest bit (_TOP).
_LOW_1, _HIGH_1 = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x8080808080808080)
_LOW_2, _HIGH_2 = np.uint64(0x7FFF7FFF7FFF7FFF), np.uint64(0x8000800080008000)
_ALL_1, _ALL_2 = np.uint64(0xFF), np.uint64(0xFFFF)
_TOP_1, _TOP_2, _FOUR = np.uint64(7), np.uint64(15), np.uint64(4)


def _orders() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the permutations that pack and spread eight elements, by their mask.

    Both are int32[256, 8]: the source index for each mask and target position.
    """
    pack, spread = np.zeros((256, 8), np.int32), np.zeros((256, 8), np.int32)
    for mask in range(256):
        positions = [position for position in range(8) if mask >> position & 1]
        pack[mask, : len(positions)] = positions
        spread[mask, positions] = range(len(positions))
    return pack, spread


_PACK, _SPREAD = _orders()


@compiled(encoder_types(1), nogil=True)
def _encode_gathering_1(source: Any, mask: Any, values: Any) -> Any:
    nonzero: Any = 0
    for group in range(source.size // 8):
        word = load_word(source, group * 8)
        # Set the highest bit of every non-zero byte. No byte carries into the next one.
        top_bits = (((word & _LOW_1) + _LOW_1) | word) & _HIGH_1
        mask[group] = np.uint8(gather_bits(top_bits, _HIGH_1))
        store_word(values, nonzero, gather_bits(word, (top_bits >> _TOP_1) * _ALL_1))
        nonzero += np.int64(count_bits(top_bits))
    return encode_rest(source, mask, values, nonzero)


@compiled(encoder_types(2), nogil=True)
def _encode_gathering_2(source: Any, mask: Any, values: Any) -> Any:
    nonzero: Any = 0
    for group in range(source.size // 8):
        # Two words of four elements each make one byte of the mask.
        word = load_word(source, group * 16)
        top_bits = (((word & _LOW_2) + _LOW_2) | word) & _HIGH_2
        store_word(values, nonzero * 2, gather_bits(word, (top_bits >> _TOP_2) * _ALL_2))
        nonzero += np.int64(count_bits(top_bits))
        bits = gather_bits(top_bits, _HIGH_2)
        word = load_word(source, group * 16 + 8)
        top_bits = (((word & _LOW_2) + _LOW_2) | word) & _HIGH_2
        store_word(values, nonzero * 2, gather_bits(word, (top_bits >> _TOP_2) * _ALL_2))
        nonzero += np.int64(count_bits(top_bits))
        mask[group] = np.uint8(bits | (gather_bits(top_bits, _HIGH_2) << _FOUR))
    return encode_rest(source, mask, values, nonzero)


@compiled(decoder_types(1), nogil=True)
def _decode_scattering_1(mask: Any, values: Any, out: Any) -> Any:
    groups, group = out.size // 8, 0
    nonzero: Any = 0
    # Every group reads eight values, even if it uses fewer.
    while group < groups and nonzero + 8 <= values.size:
        top_bits = scatter_bits(np.uint64(mask[group]), _HIGH_1)
        word = load_word(values, nonzero)
        store_word(out, group * 8, scatter_bits(word, (top_bits >> _TOP_1) * _ALL_1))
        nonzero += np.int64(count_bits(top_bits))
        group += 1
    return decode_rest(mask, values, out, group, nonzero)


@compiled(decoder_types(2), nogil=True)
def _decode_scattering_2(mask: Any, values: Any, out: Any) -> Any:
    groups, group = out.size // 8, 0
    nonzero: Any = 0
    while group < groups and nonzero + 8 <= values.size:
        bits = np.uint64(mask[group])
        top_bits = scatter_bits(bits, _HIGH_2)
        word = load_word(values, nonzero * 2)
        store_word(out, group * 16, scatter_bits(word, (top_bits >> _TOP_2) * _ALL_2))
        nonzero += np.int64(count_bits(top_bits))
        top_bits = scatter_bits(bits >> _FOUR, _HIGH_2)
        word = load_word(values, nonzero * 2)
        store_word(out, group * 16 + 8, scatter_bits(word, (top_bits >> _TOP_2) * _ALL_2))
        nonzero += np.int64(count_bits(top_bits))
        group += 1
    return decode_rest(mask, values, out, group, nonzero)


@compiled(encoder_types(4), nogil=True)
def _encode_packing_4(source: Any, mask: Any, values: Any) -> Any:
    nonzero: Any = 0
    for group in range(source.size // 8):
        bits = pack_elements(source, group * 32, values, nonzero * 4, _PACK)
        mask[group] = np.uint8(bits)
        nonzero += np.int64(count_bits(bits))
    return encode_rest(source, mask, values, nonzero)


@compiled(decoder_types(4), nogil=True)
def _decode_spreading_4(mask: Any, values: Any, out: Any) -> Any:
    groups, group = out.size // 8, 0
    nonzero: Any = 0
    while group < groups and nonzero + 8 <= values.size:
        bits = np.uint64(mask[group])
        spread_elements(values, nonzero * 4, bits, out, group * 32, _SPREAD)
        nonzero += np.int64(count_bits(bits))
        group += 1
    return decode_rest(mask, values, out, group, nonzero)


ENCODERS: dict[int, Any] = {}
DECODERS: dict[int, Any] = {}
if has_fast_bit_gather():
    ENCODERS |= {1: _encode_gathering_1, 2: _encode_gathering_2}
    DECODERS |= {1: _decode_scattering_1, 2: _decode_scattering_2}
if has_avx2():
    ENCODERS[4], DECODERS[4] = _encode_packing_4, _decode_spreading_4
