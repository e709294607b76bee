"""Collectives over the default process group, with deadlines and without pickle.

They carry small data, both before the mailbox exists and while it is in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.core.errors import PeerError, PeerLostError, PeerTimeoutError
from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.tree import Tree

# Called while waiting; raises if a rank is known to have failed.
Check = Callable[[], None]

# Seconds that a collective may still take after a rank is known to have failed.
_AFTER_FAILURE_SECONDS = 0.5
# Longest wait for the watch to notice the rank that broke a collective, in seconds. A rank that
# hangs may break a collective a few heartbeats before the watch's deadline.
REASON_SECONDS = 5.0
# Pause between two calls of a check in this wait, in seconds.
_POLL_SECONDS = 0.02


def no_check() -> None:
    """Check that never raises: no other part of the program watches the ranks."""


def broadcast_tree(tree: Tree, source: int, timeout: float, check: Check) -> Tree:
    """Return the source's tree on all ranks; called by all of them.

    It is meant for small trees: large ones take one broadcast per tensor.

    Args:
        tree: Tree to send; ignored on all ranks but the source.
        source: Rank of the source.
        timeout: Deadline of each broadcast, in seconds.
        check: Function described at `Check`.

    Raises:
        ConfigError: If the tree holds a value that cannot be sent.
        PeerTimeoutError: If some rank does not take part within `timeout` seconds.
        PeerLostError: If a rank has failed, or its connection broke.
        ProtocolError: If the received bytes are not a tree of this version.
    """
    is_source = dist.get_rank() == source
    header, large = payload.encode(tree, ("object",)) if is_source else (b"", [])
    length = torch.tensor([len(header)])
    _broadcast(length, source, timeout, check)
    data = (
        torch.frombuffer(bytearray(header), dtype=torch.uint8)
        if is_source
        else torch.empty(int(length), dtype=torch.uint8)
    )
    _broadcast(data, source, timeout, check)
    if is_source:
        for tensor in large:
            _broadcast(tensor.cpu(), source, timeout, check)
        return tree
    decoded = payload.decode_header(data.numpy().tobytes(), f"rank {source}")
    pieces = [torch.empty(size, dtype=torch.uint8) for size in payload.large_sizes(decoded)]
    for piece in pieces:
        _broadcast(piece, source, timeout, check)
    return payload.decode(decoded, pieces)


def broadcast_flags(flags: list[bool], source: int, timeout: float, check: Check) -> list[bool]:
    """Return the source's flags on all ranks; called by all of them, each with equally many.

    It takes one broadcast, where `broadcast_tree` takes two.

    Args:
        flags: Flags to send; on all ranks but the source only their number counts.
        source: Rank of the source.
        timeout: Deadline in seconds.
        check: Function described at `Check`.

    Raises:
        PeerTimeoutError: If some rank does not take part within `timeout` seconds.
        PeerLostError: If a rank has failed, or its connection broke.
    """
    data = torch.tensor(flags, dtype=torch.uint8)
    _broadcast(data, source, timeout, check)
    return [bool(flag) for flag in data.tolist()]


def gather_numbers(values: list[float], timeout: float, check: Check) -> list[list[float]]:
    """Return every rank's numbers, by rank; called by all ranks, each with equally many.

    Args:
        values: Numbers of this rank; they travel as float64.
        timeout: Deadline in seconds.
        check: Function described at `Check`.

    Raises:
        PeerTimeoutError: If some rank does not take part within `timeout` seconds.
        PeerLostError: If a rank has failed, or its connection broke.
    """
    own = torch.tensor(values, dtype=torch.float64)
    return [numbers.tolist() for numbers in _all_gather(own, timeout, check)]


def gather_bytes(
    data: bytes, timeout: float, check: Check, group: dist.ProcessGroup | None = None
) -> list[bytes]:
    """Return every rank's bytes, by rank; called by all ranks.

    Args:
        data: Bytes of this rank, of any length.
        timeout: Deadline of each of two collectives, in seconds.
        check: Function described at `Check`.
        group: Process group with a backend for the CPU; None for the default one.

    Raises:
        PeerTimeoutError: If some rank does not take part within `timeout` seconds.
        PeerLostError: If a rank has failed, or its connection broke.
    """
    lengths = _all_gather(torch.tensor([len(data)]), timeout, check, group)
    padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
    if data:
        # `frombuffer` refuses an empty buffer.
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    pieces = _all_gather(padded, timeout, check, group)
    return [
        piece.numpy().tobytes()[: int(length)]
        for piece, length in zip(pieces, lengths, strict=True)
    ]


def _all_gather(
    own: Tensor, timeout: float, check: Check, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(gathered, own, group=group, async_op=True)
    wait_for_collective(work, "the other ranks", timeout, check)
    return gathered


def any_rank(
    flag: bool, timeout: float, check: Check, while_waiting: Callable[[], None] | None = None
) -> bool:
    """Return True if the flag is set on any rank; called by all of them.

    Args:
        flag: Flag of this rank.
        timeout: Deadline in seconds.
        check: Function described at `Check`.
        while_waiting: Called repeatedly until all ranks take part.

    Raises:
        PeerTimeoutError: If some rank does not take part within `timeout` seconds.
        PeerLostError: If a rank has failed, or its connection broke.
    """
    value = torch.tensor([int(flag)])
    work = dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True)
    wait_for_collective(work, "the other ranks", timeout, check, while_waiting)
    return bool(value)


def _broadcast(data: Tensor, source: int, timeout: float, check: Check) -> None:
    if data.numel():
        work = dist.broadcast(data, source, async_op=True)
        wait_for_collective(work, f"a broadcast from rank {source}", timeout, check)


def wait_for_collective(
    work: Any,
    what: str,
    timeout: float,
    check: Check,
    while_waiting: Callable[[], None] | None = None,
) -> None:
    """Wait for a collective, until a deadline or the failure of a rank.

    Args:
        work: Handle of the collective.
        what: Completes "waited for ..." in errors.
        timeout: Deadline in seconds.
        check: Function described at `Check`.
        while_waiting: Called repeatedly while waiting, instead of sleeping.

    Raises:
        PeerTimeoutError: If some rank does not take part within `timeout` seconds.
        PeerLostError: If a rank has failed, or its connection broke.
    """
    deadline, pause = time.monotonic() + timeout, 5e-5
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise PeerTimeoutError(
                f"waited {timeout:g} s for {what}, and some rank did not take part."
            )
        try:
            check()
        except PeerError:
            # The failed rank may have taken part before it failed; the collective then completes.
            if not _completes_within(work, _AFTER_FAILURE_SECONDS):
                raise
            break
        if while_waiting is not None:
            while_waiting()
            continue
        # Short pauses first, so that a fast collective costs little; longer ones save CPU time.
        time.sleep(pause)
        pause = min(pause * 1.5, 2e-3)
    try:
        work.wait()
    except RuntimeError as error:
        wait_for_reason(check, REASON_SECONDS)
        raise PeerLostError(
            f"A rank was lost, or made another call, while this one waited for {what}. All ranks "
            "must make the same calls: check that all have as many batches, and that none stops "
            f"training alone. The error of torch: {error}"
        ) from error


def wait_for_reason(check: Check, seconds: float) -> None:
    """Give `check` some time to raise the reason of a broken connection.

    A failing rank announces the reason to all ranks (see `liveness`) before its connection breaks,
    and the watch finds a killed one within some heartbeats. The reason is a better error than the
    broken connection, which names no rank, or one that has stopped because of the failure.

    Args:
        check: Function described at `Check`.
        seconds: Time that it gets.
    """
    deadline = time.monotonic() + seconds
    while check is not no_check and time.monotonic() < deadline:
        check()
        time.sleep(_POLL_SECONDS)


def _completes_within(work: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(2e-3)
    return bool(work.is_completed())
