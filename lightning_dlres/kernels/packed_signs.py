"""Signs of a block, packed in the registers of the CPU.

For the order of the bits see `gradients.layout`. A compiled Python loop loads and stores words and
sums again for each plane, which took 1.6 times as long.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_dlres.kernels.llvm_vectors import (
    FLOATS,
    INDEX,
    LANES,
    WORD,
    WORDS,
    array_data,
    constant,
    load,
    repeat,
    spread,
    store,
    tree_sum,
)

# Elements of a block.
ELEMENTS = 4096
_PLANES = 32
_PLANE = ELEMENTS // _PLANES
_VECTORS = _PLANE // LANES


@intrinsic
def pack_signs(typing_context: Any, gradient: Any, residual: Any, words: Any, scale: Any) -> Any:
    """Write the signs; return the sum of the values from 0 up and that of the others.

    A value is `gradient * scale + residual`. NaN counts among the others.

    Args:
        gradient: float32[ELEMENTS].
        residual: float32[ELEMENTS].
        words: uint32[ELEMENTS / 32].
        scale: float32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, errors, packed = (
            array_data(context, builder, signature, args, number) for number in range(3)
        )
        scales, zeros, no_bits = (
            spread(builder, args[3]),
            constant(FLOATS, 0.0),
            constant(WORDS, 0),
        )

        def add_plane(plane: Any, state: Any) -> list[Any]:
            bit = spread(builder, builder.shl(ir.Constant(WORD, 1), builder.trunc(plane, WORD)))
            start = builder.mul(plane, ir.Constant(INDEX, _PLANE))
            result = list(state)
            for number in range(_VECTORS):
                index = builder.add(start, ir.Constant(INDEX, number * LANES))
                scaled = builder.fmul(load(builder, values, index, FLOATS), scales)
                value = builder.fadd(scaled, load(builder, errors, index, FLOATS))
                positive = builder.fcmp_ordered(">=", value, zeros)
                above, below, bits = number, _VECTORS + number, 2 * _VECTORS + number
                result[above] = builder.fadd(state[above], builder.select(positive, value, zeros))
                result[below] = builder.fadd(state[below], builder.select(positive, zeros, value))
                result[bits] = builder.or_(state[bits], builder.select(positive, bit, no_bits))
            return result

        start = [zeros] * (2 * _VECTORS) + [no_bits] * _VECTORS
        end = repeat(builder, _PLANES, start, add_plane)
        for number, bits in enumerate(end[2 * _VECTORS :]):
            store(builder, bits, packed, ir.Constant(INDEX, number * LANES))
        above = tree_sum(builder, end[:_VECTORS])
        below = tree_sum(builder, end[_VECTORS : 2 * _VECTORS])
        return context.make_tuple(builder, signature.return_type, (above, below))

    result = types.UniTuple(types.float32, 2)
    return result(gradient, residual, words, types.float32), generate
