"""Trees broadcast and gathered over the default process group, before and beside the mailbox; never
pickled."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.comm.mailbox import wait_for

Check = Callable[[], None]


def broadcast_tree(tree: Tree, source: int, timeout: float, check: Check) -> Tree:
    """Return the source's tree on all ranks; called by all of them. Meant for small trees: large
    ones take one message per tensor.

    Raises:
        ConfigError: the tree holds something that cannot travel.
        PeerTimeoutError: not all ranks came within `timeout` seconds.
    """
    mine = dist.get_rank() == source
    header, large = payload.encode(tree, ("object",)) if mine else (b"", [])
    length = torch.tensor([len(header)])
    _broadcast(length, source, timeout, check)
    data = (
        torch.frombuffer(bytearray(header), dtype=torch.uint8)
        if mine
        else torch.empty(int(length), dtype=torch.uint8)
    )
    _broadcast(data, source, timeout, check)
    if mine:
        for tensor in large:
            _broadcast(tensor.cpu(), source, timeout, check)
        return tree
    found = payload.decode_header(data.numpy().tobytes(), f"rank {source}")
    pieces = [torch.empty(size, dtype=torch.uint8) for size in payload.large_sizes(found)]
    for piece in pieces:
        _broadcast(piece, source, timeout, check)
    return payload.decode(found, pieces)


def gather_numbers(values: list[float], timeout: float, check: Check) -> list[list[float]]:
    """Return every rank's numbers (the same count on all ranks), by rank; called by all of them."""
    mine = torch.tensor(values, dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    wait_for(dist.all_gather(found, mine, async_op=True), "the other ranks", timeout, check)
    return [row.tolist() for row in found]


def any_rank(
    flag: bool, timeout: float, check: Check, meanwhile: Callable[[], None] | None = None
) -> bool:
    """Return whether the flag is set on any rank; called by all of them. While this one waits for
    the others, it calls `meanwhile` again and again."""
    value = torch.tensor([int(flag)])
    wait_for(
        dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True),
        "the other ranks",
        timeout,
        check,
        meanwhile,
    )
    return bool(value)


def all_ranks(flag: bool, timeout: float, check: Check) -> bool:
    """Return whether the flag is set on all ranks; called by all of them."""
    return not any_rank(not flag, timeout, check)


def _broadcast(data: Tensor, source: int, timeout: float, check: Check) -> None:
    if data.numel():
        wait_for(
            dist.broadcast(data, source, async_op=True),
            f"a broadcast from rank {source}",
            timeout,
            check,
        )
