"""Arithmetic of 32-bit words in functions that Numba compiles for the CPU.

Numba computes with integers in 64 bits. A vector instruction then handles half as many elements.
These functions keep 32 bits; results wrap around.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def _of_two_words(instruction: str, result: Any = types.uint32) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)

    return result(types.uint32, types.uint32), generate


@intrinsic
def bitwise_and(typing_context: Any, first: Any, second: Any) -> Any:
    """Return the bits that are set in both words."""
    return _of_two_words("and_")


@intrinsic
def bitwise_or(typing_context: Any, first: Any, second: Any) -> Any:
    """Return the bits that are set in at least one of the words."""
    return _of_two_words("or_")


@intrinsic
def add_words(typing_context: Any, first: Any, second: Any) -> Any:
    """Return the sum of two words."""
    return _of_two_words("add")


@intrinsic
def subtract_words(typing_context: Any, first: Any, second: Any) -> Any:
    """Return the first word minus the second one."""
    return _of_two_words("sub")


@intrinsic
def shift_left(typing_context: Any, word: Any, bits: Any) -> Any:
    """Return a word, shifted to the left by less than 32 bits."""
    return _of_two_words("shl")


@intrinsic
def shift_right(typing_context: Any, word: Any, bits: Any) -> Any:
    """Return a word, shifted to the right by less than 32 bits; zeros come in on the left."""
    return _of_two_words("lshr")


@intrinsic
def shift_right_signed(typing_context: Any, word: Any, bits: Any) -> Any:
    """Return an int32, shifted to the right by less than 32 bits; copies of its sign come in."""
    return _of_two_words("ashr", types.int32)
