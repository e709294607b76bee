"""Zero-value compression on a GPU: one pass over the data, on the current stream, and nothing that
the host waits for.

A block takes a tile. Warps vote which elements are not zero; the sums of the warps, then of the
tiles before, say where a tile's elements belong. A tile publishes its own sum at once, and the sum
up to its end as soon as it has it, so that the next ones look back only as far as the last tile
that is through (Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back",
2016). Tiles are numbered by a ticket, in the order in which blocks start: a block waits for running
ones only.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from numba import cuda, int64, types, uint32
from torch import Tensor

WARPS, WORDS, LANES = 8, 8, 32
THREADS = WARPS * LANES
TILE = WARPS * WORDS * LANES
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

_KINDS = {1: types.uint8, 2: types.uint16, 4: types.uint32}
_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
# The two lowest bits of a tile's word: what the others are. No bit: nothing yet.
_OF_TILE, _UP_TO_TILE = 1, 2


def encode(source: Tensor, width: int, out: Tensor) -> Tensor:
    """See `zvc.encode`."""
    count = source.numel() // width
    mask_size = -(-count // 64) * 8
    used = torch.full((1,), mask_size, dtype=torch.int64, device=source.device)
    if count:
        room = min(count, (out.numel() - mask_size) // width)
        values = out[mask_size : mask_size + room * width]
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
    """See `zvc.decode`."""
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
    """Return into how many tiles so many elements are cut."""
    return -(-count // TILE)


def _launch(kernel: Any, count: int, *tensors: Tensor) -> None:
    device = tensors[0].device
    # The ticket, and a word for every tile.
    state = torch.zeros(1 + tiles(count), dtype=torch.int64, device=device)
    # Numba keeps a context of its own for every thread, which torch's does not switch.
    with torch.cuda.device(device), cuda.gpus[device.index]:
        stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
        kernel[tiles(count), THREADS, stream](
            *(cuda.as_cuda_array(tensor, sync=False) for tensor in (*tensors, state))
        )


@cache
def kernels(width: int) -> tuple[Any, Any]:
    """Return what compresses and what decompresses elements of so many bytes."""
    encoder, decoder = bodies(width)
    return cuda.jit(encoder), cuda.jit(decoder)


if SIMULATED:
    _part_of_kernels = cuda.jit(device=True)

    @_part_of_kernels
    def _vote(is_set: Any, votes: Any, warp: Any, lane: Any) -> Any:
        """Return the votes of a warp, lane by lane: the simulator has no ballot."""
        cuda.syncthreads()
        if lane == 0:
            votes[warp] = 0
        cuda.syncthreads()
        if is_set:
            cuda.atomic.add(votes, warp, uint32(1 << lane))
        cuda.syncthreads()
        return votes[warp]

else:
    # Inlined, they need no driver where kernels are compiled to be read only.
    _part_of_kernels = cuda.jit(device=True, inline="always")

    @_part_of_kernels
    def _vote(is_set: Any, votes: Any, warp: Any, lane: Any) -> Any:
        """Return the votes of a warp, lane by lane."""
        return cuda.ballot_sync(0xFFFFFFFF, is_set)


@_part_of_kernels
def _elements_before(state: Any, tile: Any, own: Any) -> Any:
    """Publish the sum of a tile, and return that of all tiles before it. One thread calls this."""
    if tile == 0:
        cuda.atomic.exch(state, 1, int64(own * 4 + _UP_TO_TILE))
        return int64(0)
    cuda.atomic.exch(state, tile + 1, int64(own * 4 + _OF_TILE))
    before, other = int64(0), tile
    while other > 0:
        # Adding nothing reads what another block has written, past this one's cache.
        word = cuda.atomic.add(state, other, int64(0))
        if word & 3 == _UP_TO_TILE:
            before += word >> 2
            break
        if word & 3 == _OF_TILE:
            before += word >> 2
            other -= 1
    cuda.atomic.exch(state, tile + 1, int64((before + own) * 4 + _UP_TO_TILE))
    return before


@_part_of_kernels
def _take_tile(state: Any, place: Any) -> Any:
    """Return the number of the tile that is next, the same for all threads of a block."""
    if cuda.threadIdx.x == 0:
        place[0] = cuda.atomic.add(state, 0, int64(1))
    cuda.syncthreads()
    tile = place[0]
    cuda.syncthreads()
    return tile


@_part_of_kernels
def _start_of_warp(state: Any, tile: Any, total: Any, sums: Any, place: Any) -> Any:
    """Return how many elements are kept before those of this warp, which keeps `total`; `place[1]`
    is then how many are kept up to the tile's end."""
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
        place[0] = _elements_before(state, tile, own)
        place[1] = place[0] + own
    cuda.syncthreads()
    return place[0] + sums[warp]


def bodies(width: int) -> tuple[Any, Any]:
    """Return the two kernels as plain functions, to be compiled.

    The first takes (elements, mask, values, used, state), the second (mask, values, elements,
    state): elements and values are of the width's unsigned type, the mask is uint32, and `state`
    int64, zeros: one word for the ticket and one for each tile. `used` is int64[1], the bytes of
    the mask, to which those of the values are added, also of those that have no room.
    """
    kind = _KINDS[width]

    def zvc_encode(elements: Any, mask: Any, values: Any, used: Any, state: Any) -> None:
        place = cuda.shared.array(2, int64)
        sums = cuda.shared.array(WARPS, int64)
        votes = cuda.shared.array(WARPS, uint32)
        found = cuda.local.array(WORDS, uint32)
        held = cuda.local.array(WORDS, kind)
        warp, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        tile = _take_tile(state, place)
        first = tile * (WARPS * WORDS) + warp * WORDS
        total = 0
        for number in range(WORDS):
            index = (first + number) * LANES + lane
            held[number] = 0
            if index < elements.size:
                held[number] = elements[index]
            found[number] = _vote(held[number] != 0, votes, warp, lane)
            total += cuda.popc(found[number])
            if lane == 0 and first + number < mask.size:
                mask[first + number] = found[number]
        at = _start_of_warp(state, tile, total, sums, place)
        before_lane = uint32((1 << lane) - 1)
        for number in range(WORDS):
            target = at + cuda.popc(found[number] & before_lane)
            # There may be room for some only.
            if held[number] != 0 and target < values.size:
                values[target] = held[number]
            at += cuda.popc(found[number])
        if cuda.threadIdx.x == 0 and (tile + 1) * TILE >= elements.size:
            used[0] += place[1] * width

    def zvc_decode(mask: Any, values: Any, elements: Any, state: Any) -> None:
        place = cuda.shared.array(2, int64)
        sums = cuda.shared.array(WARPS, int64)
        found = cuda.local.array(WORDS, uint32)
        warp, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        tile = _take_tile(state, place)
        first = tile * (WARPS * WORDS) + warp * WORDS
        total = 0
        for number in range(WORDS):
            found[number] = 0
            if first + number < mask.size:
                found[number] = mask[first + number]
            total += cuda.popc(found[number])
        at = _start_of_warp(state, tile, total, sums, place)
        bit, before_lane = uint32(1 << lane), uint32((1 << lane) - 1)
        for number in range(WORDS):
            index = (first + number) * LANES + lane
            if index < elements.size:
                elements[index] = 0
                if found[number] & bit:
                    elements[index] = values[at + cuda.popc(found[number] & before_lane)]
            at += cuda.popc(found[number])

    return zvc_encode, zvc_decode
