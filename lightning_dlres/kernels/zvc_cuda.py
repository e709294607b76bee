"""Zero-value compression on a GPU: one pass over the data, on the current stream, without waiting.

Each block processes one tile of elements. A ballot of each warp gives the mask of its non-zero
elements. The position of a non-zero element is the number of those before it: the counts of the
preceding tiles and warps, and the lower bits of the mask.

A tile publishes its own count at once, and later the count of all elements up to its end. Later
tiles look back only to the last tile with such a running count (Merrill and Garland, "Single-pass
parallel prefix scan with decoupled look-back", 2016). A ticket numbers the tiles in the order in
which blocks start. A block therefore waits only for blocks that already run, and cannot deadlock.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import cuda, int64, types, uint32
from torch import Tensor

from lightning_dlres.kernels.cuda_launch import SIMULATED, launch

# Warps of a block, words of the mask that each warp writes, and lanes of a warp: bits of a word.
WARPS, WORDS, LANES = 8, 16, 32
THREADS = WARPS * LANES
TILE = WARPS * WORDS * LANES

_NUMBA_TYPES = {1: types.uint8, 2: types.uint16, 4: types.uint32}
_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
# Values of the two lowest bits of a tile's state word. The other bits hold a count of non-zero
# elements: those of this tile, or all up to its end. Zero: no count yet.
_OF_TILE, _UP_TO_TILE = 1, 2


def encode(source: Tensor, width: int, out: Tensor) -> Tensor:
    """Compress elements; see `zvc.encode`."""
    count = source.numel() // width
    mask_size = -(-count // 64) * 8
    used = torch.full((1,), mask_size, dtype=torch.int64, device=source.device)
    if count:
        capacity = min(count, (out.numel() - mask_size) // width)
        values = out[mask_size : mask_size + capacity * width]
        kernel, _ = kernels(width)
        _launch(
            kernel,
            count,
            source.view(_DTYPES[width]),
            out[:mask_size].view(torch.uint32),
            values.view(_DTYPES[width]),
            used,
        )
    return used[0]


def decode(mask: Tensor, values: Tensor, width: int, out: Tensor) -> None:
    """Decompress elements; see `zvc.decode`."""
    count = out.numel() // width
    if count:
        _, kernel = kernels(width)
        values = values[: values.numel() // width * width]
        _launch(
            kernel,
            count,
            mask.view(torch.uint32),
            values.view(_DTYPES[width]),
            out.view(_DTYPES[width]),
        )


def tiles(count: int) -> int:
    """Return the number of tiles of `count` elements."""
    return -(-count // TILE)


def _launch(kernel: Any, count: int, *tensors: Tensor) -> None:
    device = tensors[0].device
    # Word 0 is the ticket; word 1 + i belongs to tile i.
    state = torch.zeros(1 + tiles(count), dtype=torch.int64, device=device)
    launch(kernel, tiles(count), THREADS, *tensors, state)


@cache
def kernels(width: int) -> tuple[Any, Any]:
    """Return the compiled encoder and decoder of elements of `width` bytes."""
    encoder, decoder = kernel_functions(width)
    return cuda.jit(encoder), cuda.jit(decoder)


if SIMULATED:
    _device_function = cuda.jit(device=True)

    @_device_function
    def _vote(is_set: Any, votes: Any, warp: Any, lane: Any) -> Any:
        """Return the votes of a warp, one bit per lane. The simulator has no ballot."""
        cuda.syncthreads()
        if lane == 0:
            votes[warp] = 0
        cuda.syncthreads()
        if is_set:
            cuda.atomic.add(votes, warp, uint32(1 << lane))
        cuda.syncthreads()
        return votes[warp]

else:
    # Inlined functions need no driver when kernels are only compiled to PTX.
    _device_function = cuda.jit(device=True, inline="always")

    @_device_function
    def _vote(is_set: Any, votes: Any, warp: Any, lane: Any) -> Any:
        """Return the votes of a warp, one bit per lane."""
        return cuda.ballot_sync(0xFFFFFFFF, is_set)


@_device_function
def _elements_before(state: Any, tile: Any, own: Any) -> Any:
    """Publish a tile's count `own`; return the count of all tiles before it.

    One thread of a block calls it.
    """
    if tile == 0:
        cuda.atomic.exch(state, 1, int64(own * 4 + _UP_TO_TILE))
        return int64(0)
    cuda.atomic.exch(state, tile + 1, int64(own * 4 + _OF_TILE))
    before, other = int64(0), tile
    while other > 0:
        # An atomic addition of 0 reads another block's write; a plain read may hit a stale cache.
        word = cuda.atomic.add(state, other, int64(0))
        if word & 3 == _UP_TO_TILE:
            before += word >> 2
            break
        if word & 3 == _OF_TILE:
            before += word >> 2
            other -= 1
    cuda.atomic.exch(state, tile + 1, int64((before + own) * 4 + _UP_TO_TILE))
    return before


@_device_function
def _take_tile(state: Any, shared: Any) -> Any:
    """Take a ticket; return its tile, the same for all threads of a block."""
    if cuda.threadIdx.x == 0:
        shared[0] = cuda.atomic.add(state, 0, int64(1))
    cuda.syncthreads()
    tile = shared[0]
    cuda.syncthreads()
    return tile


@_device_function
def _start_of_warp(state: Any, tile: Any, total: Any, sums: Any, shared: Any) -> Any:
    """Return the number of non-zero elements before this warp, which has `total` non-zero ones.

    `shared[1]` becomes the number of non-zero elements up to the tile's end.
    """
    warp = cuda.threadIdx.x // LANES
    if cuda.threadIdx.x % LANES == 0:
        sums[warp] = total
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        own = int64(0)
        for other in range(WARPS):
            more = sums[other]
            sums[other] = own
            own += more
        shared[0] = _elements_before(state, tile, own)
        shared[1] = shared[0] + own
    cuda.syncthreads()
    return shared[0] + sums[warp]


def kernel_functions(width: int) -> tuple[Any, Any]:
    """Return the two kernels as plain functions, to be compiled.

    The encoder takes (elements, mask, values, used, state), the decoder (mask, values, elements,
    state). Elements and values have the width's unsigned type; the mask is uint32. `state` is
    int64 zeros: one word for the ticket and one for each tile. `used` is int64[1], initially the
    size of the mask. The encoder adds the size of all values, including those that do not fit.
    """
    numba_type = _NUMBA_TYPES[width]

    def zvc_encode(elements: Any, mask: Any, values: Any, used: Any, state: Any) -> None:
        shared = cuda.shared.array(2, int64)
        sums = cuda.shared.array(WARPS, int64)
        votes = cuda.shared.array(WARPS, uint32)
        ballots = cuda.local.array(WORDS, uint32)
        own_values = cuda.local.array(WORDS, numba_type)
        warp, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        tile = _take_tile(state, shared)
        first = tile * (WARPS * WORDS) + warp * WORDS
        # Loads come before all votes, and without branches if the tile is whole: a warp waits for
        # its vote, and later loads would wait, too.
        if (tile + 1) * TILE <= elements.size:
            for number in range(WORDS):
                own_values[number] = elements[(first + number) * LANES + lane]
        else:
            for number in range(WORDS):
                index = (first + number) * LANES + lane
                own_values[number] = 0
                if index < elements.size:
                    own_values[number] = elements[index]
        total = 0
        for number in range(WORDS):
            ballots[number] = _vote(own_values[number] != 0, votes, warp, lane)
            total += cuda.popc(ballots[number])
            if lane == 0 and first + number < mask.size:
                mask[first + number] = ballots[number]
        position = _start_of_warp(state, tile, total, sums, shared)
        before_lane = uint32((1 << lane) - 1)
        for number in range(WORDS):
            target = position + cuda.popc(ballots[number] & before_lane)
            # The memory for values may be too small.
            if own_values[number] != 0 and target < values.size:
                values[target] = own_values[number]
            position += cuda.popc(ballots[number])
        if cuda.threadIdx.x == 0 and (tile + 1) * TILE >= elements.size:
            used[0] += shared[1] * width

    def zvc_decode(mask: Any, values: Any, elements: Any, state: Any) -> None:
        shared = cuda.shared.array(2, int64)
        sums = cuda.shared.array(WARPS, int64)
        ballots = cuda.local.array(WORDS, uint32)
        own_values = cuda.local.array(WORDS, numba_type)
        warp, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        tile = _take_tile(state, shared)
        first = tile * (WARPS * WORDS) + warp * WORDS
        total = 0
        for number in range(WORDS):
            ballots[number] = 0
            if first + number < mask.size:
                ballots[number] = mask[first + number]
            total += cuda.popc(ballots[number])
        position = _start_of_warp(state, tile, total, sums, shared)
        bit, before_lane = uint32(1 << lane), uint32((1 << lane) - 1)
        # All loads come before the first store. A zero element loads a value of its neighbours.
        for number in range(WORDS):
            own_values[number] = 0
            if values.size > 0:
                source = position + cuda.popc(ballots[number] & before_lane)
                own_values[number] = values[min(source, values.size - 1)]
            position += cuda.popc(ballots[number])
        for number in range(WORDS):
            index = (first + number) * LANES + lane
            if index < elements.size:
                elements[index] = own_values[number] if ballots[number] & bit else numba_type(0)

    return zvc_encode, zvc_decode
