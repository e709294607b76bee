"""Intrinsics for x86 instructions that Numba lacks.

They gather and scatter the bits of a 64-bit word (BMI2), pack and spread eight elements of 32 bits
(AVX2), access words at any byte of an array, and store past the cache. Without gathered bits,
zero-value compression takes a cycle or two for each element. Without stores past the cache, a copy
moves 1.5 times as many bytes over the memory bus.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD, _BYTE = ir.IntType(64), ir.IntType(8)
# One AVX2 vector of 32 bytes, as eight elements of 32 bits or as four words; and its mask.
_EIGHT = ir.VectorType(ir.IntType(32), 8)
_FOUR = ir.VectorType(_WORD, 4)
_EIGHT_BITS = ir.VectorType(ir.IntType(1), 8)
# Bytes of a vector, and of a row of a table of permutations.
_VECTOR_BYTES = 32
# AMD processors before Zen 3: their bit gathering (BMI2) is microcode, slower than a loop.
_SLOW_BIT_GATHER = {"bdver4", "znver1", "znver2"}


@cache
def has_fast_bit_gather() -> bool:
    """Return True if this processor has `gather_bits` and `scatter_bits`, and they are fast."""
    # Empty on processors other than x86.
    features = llvm.get_host_cpu_features()
    return bool(features.get("bmi2")) and llvm.get_host_cpu_name() not in _SLOW_BIT_GATHER


@cache
def has_avx2() -> bool:
    """Return True if this processor can run `pack_elements` and `spread_elements`."""
    return bool(llvm.get_host_cpu_features().get("avx2"))


def _two_word_intrinsic(name: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_WORD, [_WORD, _WORD])
        return builder.call(builder.module.declare_intrinsic(name, fnty=function_type), args)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def gather_bits(typing_context: Any, word: Any, mask: Any) -> Any:
    """Return the bits of `word` at the positions of set bits in `mask`, packed from bit 0 on."""
    return _two_word_intrinsic("llvm.x86.bmi.pext.64")


@intrinsic
def scatter_bits(typing_context: Any, word: Any, mask: Any) -> Any:
    """Return the lowest bits of `word`, spread over the positions of set bits in `mask`."""
    return _two_word_intrinsic("llvm.x86.bmi.pdep.64")


@intrinsic
def count_bits(typing_context: Any, word: Any) -> Any:
    """Return the number of set bits of a 64-bit word; on any processor."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@intrinsic
def load_word(typing_context: Any, array: Any, offset: Any) -> Any:
    """Return the 64-bit word at a byte offset, which need not be a multiple of 8."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, signature, args, 0, 1, _WORD), align=1)

    return types.uint64(array, types.int64), generate


@intrinsic
def store_word(typing_context: Any, array: Any, offset: Any, word: Any) -> Any:
    """Write the 64-bit word at a byte offset, which need not be a multiple of 8."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, signature, args, 0, 1, _WORD), align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@intrinsic
def pack_elements(
    typing_context: Any,
    source: Any,
    source_offset: Any,
    values: Any,
    values_offset: Any,
    orders: Any,
) -> Any:
    """Pack the non-zero elements among eight of 32 bits; return the mask of their positions.

    Eight elements of `values` are overwritten, even if fewer are non-zero.

    Args:
        source: Array to read.
        source_offset: Byte offset in `source`.
        values: Array to write.
        values_offset: Byte offset in `values`.
        orders: int32[256, 8]: the source index for each mask and target position.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def vector_at(array: int, offset: Any) -> Any:
            return _pointer(context, builder, signature, args, array, offset, _EIGHT)

        elements = builder.load(vector_at(0, 1), align=1)
        is_set = builder.icmp_unsigned("!=", elements, ir.Constant(_EIGHT, [0] * 8))
        mask = builder.zext(builder.bitcast(is_set, _BYTE), _WORD)
        order = builder.load(
            vector_at(4, builder.mul(mask, ir.Constant(_WORD, _VECTOR_BYTES))), align=1
        )
        builder.store(_permuted(builder, elements, order), vector_at(2, 3), align=1)
        return mask

    return types.uint64(source, types.int64, values, types.int64, orders), generate


@intrinsic
def spread_elements(
    typing_context: Any,
    values: Any,
    values_offset: Any,
    mask: Any,
    out: Any,
    out_offset: Any,
    orders: Any,
) -> Any:
    """Spread packed elements of 32 bits over the set bits of `mask`; write zeros elsewhere.

    Args:
        values: Array to read; eight elements are read.
        values_offset: Byte offset in `values`.
        mask: Lowest 8 bits: the positions of non-zero elements.
        out: Array to write; eight elements are written.
        out_offset: Byte offset in `out`.
        orders: int32[256, 8]: the index in `values` for each mask and target position.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def vector_at(array: int, offset: Any) -> Any:
            return _pointer(context, builder, signature, args, array, offset, _EIGHT)

        elements = builder.load(vector_at(0, 1), align=1)
        row = builder.mul(args[2], ir.Constant(_WORD, _VECTOR_BYTES))
        spread = _permuted(builder, elements, builder.load(vector_at(5, row), align=1))
        is_set = builder.bitcast(builder.trunc(args[2], _BYTE), _EIGHT_BITS)
        masked = builder.select(is_set, spread, ir.Constant(_EIGHT, [0] * 8))
        builder.store(masked, vector_at(3, 4), align=1)
        return context.get_dummy_value()

    return types.void(values, types.int64, types.uint64, out, types.int64, orders), generate


@intrinsic
def store_past_cache(typing_context: Any, target: Any, source: Any, offset: Any) -> Any:
    """Copy 32 bytes from `source + offset` to `target + offset`, past the cache.

    The target's address must be a multiple of 32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def vector_at(address: Any) -> Any:
            return builder.inttoptr(builder.add(address, args[2]), _FOUR.as_pointer())

        store = builder.store(
            builder.load(vector_at(args[1]), align=1), vector_at(args[0]), align=_VECTOR_BYTES
        )
        enabled = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", enabled)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def finish_stores(typing_context: Any) -> Any:
    """Make other cores see the writes of `store_past_cache` before any later write."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [])
        builder.call(
            builder.module.declare_intrinsic("llvm.x86.sse.sfence", fnty=function_type), []
        )
        return context.get_dummy_value()

    return types.void(), generate


def _permuted(builder: Any, elements: Any, order: Any) -> Any:
    function_type = ir.FunctionType(_EIGHT, [_EIGHT, _EIGHT])
    permute = builder.module.declare_intrinsic("llvm.x86.avx2.permd", fnty=function_type)
    return builder.call(permute, [elements, order])


def _pointer(
    context: Any,
    builder: Any,
    signature: Any,
    args: Any,
    array: int,
    offset_or_index: Any,
    kind: Any,
) -> Any:
    """Return a pointer of this kind to a byte of an array argument.

    `offset_or_index` is the byte offset, or the index of the argument with the offset.
    """
    array_struct = context.make_array(signature.args[array])(context, builder, args[array])
    is_index = isinstance(offset_or_index, int)
    offset = args[offset_or_index] if is_index else offset_or_index
    byte = builder.gep(builder.bitcast(array_struct.data, _BYTE.as_pointer()), [offset])
    return builder.bitcast(byte, kind.as_pointer())
