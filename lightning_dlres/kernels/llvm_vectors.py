"""Loops over vectors in LLVM's language, for intrinsics of Numba.

The compiler keeps no array of partial results in registers from one round of a loop to the next;
these loops do. LLVM turns vectors of 16 elements into instructions of any processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

# Elements of a vector: 64 bytes, the largest vector of x86 processors.
LANES = 16
FLOAT, WORD, INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(WORD, LANES)
# Alignment of array elements, in bytes.
_ALIGNMENT = 4


def constant(kind: Any, value: float) -> Any:
    """Return a vector of type `FLOATS` or `WORDS` with one value."""
    return ir.Constant(kind, [value] * LANES)


def spread(builder: Any, value: Any) -> Any:
    """Return a vector of copies of a float or a word."""
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(first, first, ir.Constant(WORDS, [0] * LANES))


def load(builder: Any, array: Any, index: Any, kind: Any) -> Any:
    """Return the elements of an array from an index on, as a vector of type `kind`."""
    return builder.load(_address(builder, array, index, kind), align=_ALIGNMENT)


def store(builder: Any, vector: Any, array: Any, index: Any) -> None:
    """Write a vector to the elements of an array from an index on."""
    builder.store(vector, _address(builder, array, index, vector.type), align=_ALIGNMENT)


def repeat(
    builder: Any, count: int, state: Sequence[Any], body: Callable[[Any, Sequence[Any]], list[Any]]
) -> list[Any]:
    """Append a loop, and return its last state.

    Args:
        builder: llvmlite's builder.
        count: Number of rounds, at least 1.
        state: Values before the first round.
        body: Appends a round. It gets the round's number as an `INDEX` and the state before the
            round, and returns the state after it.
    """
    before = builder.block
    loop, after = builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(INDEX)
    number.add_incoming(ir.Constant(INDEX, 0), before)
    old = [builder.phi(value.type) for value in state]
    new = body(number, old)
    following = builder.add(number, ir.Constant(INDEX, 1))
    number.add_incoming(following, builder.block)
    for phi, first, later in zip(old, state, new, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, builder.block)
    is_left = builder.icmp_unsigned("<", following, ir.Constant(INDEX, count))
    builder.cbranch(is_left, loop, after)
    builder.position_at_end(after)
    return new


def tree_sum(builder: Any, vectors: Sequence[Any]) -> Any:
    """Return the sum of all elements, added in the order of `sums_cpu.tree_sum`.

    Args:
        builder: llvmlite's builder.
        vectors: Vectors of floats; their number is a power of two.
    """
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [builder.fadd(lower, upper) for lower, upper in pairs]
    (vector,) = vectors
    size = LANES
    while size > 1:
        lower, upper = (
            builder.shuffle_vector(
                vector,
                vector,
                ir.Constant(ir.VectorType(WORD, size // 2), list(range(first, first + size // 2))),
            )
            for first in (0, size // 2)
        )
        vector, size = builder.fadd(lower, upper), size // 2
    return builder.extract_element(vector, ir.Constant(WORD, 0))


def array_data(context: Any, builder: Any, signature: Any, args: Any, number: int) -> Any:
    """Return the pointer to the first element of an array argument of an intrinsic."""
    return context.make_array(signature.args[number])(context, builder, args[number]).data


def _address(builder: Any, array: Any, index: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(array, [index]), kind.as_pointer())
