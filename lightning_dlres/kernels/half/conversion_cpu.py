"""Kernels of `conversion`: 16-bit floating-point numbers on the CPU.

They work on the bits of float32 numbers in loops without branches, which the compiler turns into
vector instructions. Each loop has its own pass over a block, which stays in the L1 cache. No number
is subnormal in float32, so it does not matter if the processor flushes those to zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, types, uint16, uint32

from lightning_dlres.core.compiled import compiled, subroutine
from lightning_dlres.kernels.gradients.layout import LARGEST
from lightning_dlres.kernels.words import (
    add_words,
    bitwise_and,
    bitwise_or,
    shift_left,
    shift_right,
    subtract_words,
)

# Elements of a pass; its arrays have 4 KiB each.
_PASS = 1024
_SIGN, _MAGNITUDE = 0x80000000, 0x7FFFFFFF
_INFINITY = 0x7F800000
# float16: bits of the float32 numbers 2**-14 (smallest normal one) and 65520 (first one that would
# round to infinity); exponents of float32 minus those of float16.
_SMALLEST_NORMAL, _OVERFLOW = 0x38800000, 0x477FF000
_EXPONENTS = 112 << 23
# A subnormal float16 is a multiple of 2**-24. Added to 0.5, whose unit in the last place is 2**-24,
# a number is rounded to such a multiple.
_HALF_BITS = 0x3F000000
_SUBNORMAL_STEP = 2.0**-24


def _add(gradient: Any, residual: Any, exact: Any, scale: Any) -> None:
    for i in range(gradient.size):
        exact[i] = residual[i] + gradient[i] * scale


_adder = subroutine(_add, nogil=True)


def _keep_errors(residual: Any, exact: Any, sent: Any) -> None:
    for i in range(residual.size):
        error = exact[i] - sent[i]
        # False for NaN, too.
        residual[i] = error if abs(error) <= float32(LARGEST) else residual[i]


_error_keeper = subroutine(_keep_errors, nogil=True)


def _bfloat16_codes(bits: Any, codes: Any) -> None:
    for i in range(codes.size):
        value = bits[i]
        magnitude = bitwise_and(value, uint32(_MAGNITUDE))
        sign = shift_right(bitwise_and(value, uint32(_SIGN)), uint32(16))
        odd = bitwise_and(shift_right(magnitude, uint32(16)), uint32(1))
        rounded = add_words(magnitude, add_words(uint32(0x7FFF), odd))
        code = shift_right(rounded, uint32(16))
        code = uint32(0x7F7F) if code >= uint32(0x7F80) else code
        code = uint32(0x7F80) if magnitude == uint32(_INFINITY) else code
        code = uint32(0x7FC0) if magnitude > uint32(_INFINITY) else code
        codes[i] = uint16(bitwise_or(code, sign))


_bfloat16_coder = subroutine(_bfloat16_codes, nogil=True)


def _bfloat16_bits(codes: Any, bits: Any) -> None:
    for i in range(codes.size):
        bits[i] = shift_left(uint32(codes[i]), uint32(16))


_bfloat16_decoder = subroutine(_bfloat16_bits, nogil=True)


def _float16_codes(bits: Any, codes: Any, shifted: Any) -> None:
    shifted_bits = shifted.view(np.uint32)
    for i in range(codes.size):
        shifted_bits[i] = bitwise_and(bits[i], uint32(_MAGNITUDE))
    for i in range(codes.size):
        shifted[i] = shifted[i] + float32(0.5)
    for i in range(codes.size):
        magnitude = bitwise_and(bits[i], uint32(_MAGNITUDE))
        sign = shift_right(bitwise_and(bits[i], uint32(_SIGN)), uint32(16))
        odd = bitwise_and(shift_right(magnitude, uint32(13)), uint32(1))
        rounded = add_words(magnitude, add_words(uint32(0xFFF - _EXPONENTS), odd))
        code = shift_right(rounded, uint32(13))
        subnormal = subtract_words(shifted_bits[i], uint32(_HALF_BITS))
        code = subnormal if magnitude < uint32(_SMALLEST_NORMAL) else code
        code = uint32(0x7BFF) if magnitude >= uint32(_OVERFLOW) else code
        code = uint32(0x7C00) if magnitude == uint32(_INFINITY) else code
        code = uint32(0x7E00) if magnitude > uint32(_INFINITY) else code
        codes[i] = uint16(bitwise_or(code, sign))


_float16_coder = subroutine(_float16_codes, nogil=True)


def _float16_bits(codes: Any, bits: Any, subnormal: Any) -> None:
    for i in range(codes.size):
        magnitude = int32(bitwise_and(uint32(codes[i]), uint32(0x7FFF)))
        subnormal[i] = float32(magnitude) * float32(_SUBNORMAL_STEP)
    subnormal_bits = subnormal.view(np.uint32)
    for i in range(codes.size):
        magnitude = bitwise_and(uint32(codes[i]), uint32(0x7FFF))
        sign = shift_left(bitwise_and(uint32(codes[i]), uint32(0x8000)), uint32(16))
        value = add_words(shift_left(magnitude, uint32(13)), uint32(_EXPONENTS))
        value = subnormal_bits[i] if magnitude < uint32(0x400) else value
        largest = bitwise_or(value, uint32(_INFINITY))
        value = largest if magnitude >= uint32(0x7C00) else value
        bits[i] = bitwise_or(value, sign)


_float16_decoder = subroutine(_float16_bits, nogil=True)

_ENCODE = (types.float32[::1], types.float32[::1], types.uint16[::1], types.float32)
_DECODE = (types.float32[::1], types.uint16[::1], types.float32, types.boolean)


@compiled(_ENCODE, nogil=True)
def encode_bfloat16(gradient: Any, residual: Any, codes: Any, scale: Any) -> None:
    """Encode bfloat16 numbers.

    Args:
        gradient: float32[n].
        residual: float32[n], updated in place. Elements whose value is not finite keep theirs.
        codes: uint16[n].
        scale: Power of two by which the gradient is multiplied.
    """
    exact, sent = np.empty(_PASS, np.float32), np.empty(_PASS, np.float32)
    for first in range(0, gradient.size, _PASS):
        part, errors = gradient[first : first + _PASS], residual[first : first + _PASS]
        coded, size = codes[first : first + _PASS], part.size
        _adder(part, errors, exact[:size], scale)
        _bfloat16_coder(exact.view(np.uint32), coded)
        _bfloat16_decoder(coded, sent.view(np.uint32))
        _error_keeper(errors, exact[:size], sent[:size])


@compiled(_ENCODE, nogil=True)
def encode_float16(gradient: Any, residual: Any, codes: Any, scale: Any) -> None:
    """Encode float16 numbers; for the arguments see `encode_bfloat16`."""
    exact, sent = np.empty(_PASS, np.float32), np.empty(_PASS, np.float32)
    scratch = np.empty(_PASS, np.float32)
    for first in range(0, gradient.size, _PASS):
        part, errors = gradient[first : first + _PASS], residual[first : first + _PASS]
        coded, size = codes[first : first + _PASS], part.size
        _adder(part, errors, exact[:size], scale)
        _float16_coder(exact.view(np.uint32), coded, scratch)
        _float16_decoder(coded, sent.view(np.uint32), scratch)
        _error_keeper(errors, exact[:size], sent[:size])


def _write(out: Any, values: Any, scale: Any, accumulate: Any) -> None:
    if accumulate:
        for i in range(out.size):
            out[i] += values[i] * scale
    else:
        for i in range(out.size):
            out[i] = values[i] * scale


_writer = subroutine(_write, nogil=True)


@compiled(_DECODE, nogil=True)
def decode_bfloat16(out: Any, codes: Any, scale: Any, accumulate: Any) -> None:
    """Decode bfloat16 numbers.

    Args:
        out: float32[n].
        codes: uint16[n].
        scale: Factor of the decoded values.
        accumulate: Add to `out` instead of replacing it.
    """
    values = np.empty(_PASS, np.float32)
    for first in range(0, out.size, _PASS):
        part = out[first : first + _PASS]
        _bfloat16_decoder(codes[first : first + _PASS], values.view(np.uint32))
        _writer(part, values, scale, accumulate)


@compiled(_DECODE, nogil=True)
def decode_float16(out: Any, codes: Any, scale: Any, accumulate: Any) -> None:
    """Decode float16 numbers; for the arguments see `decode_bfloat16`."""
    values, scratch = np.empty(_PASS, np.float32), np.empty(_PASS, np.float32)
    for first in range(0, out.size, _PASS):
        part = out[first : first + _PASS]
        _float16_decoder(codes[first : first + _PASS], values.view(np.uint32), scratch)
        _writer(part, values, scale, accumulate)
