"""Contents of received messages, checked. An error names the rank that sent a broken message."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.core.arrays import array_of, byte_array
from lightning_dlres.core.comm.mailbox import Item
from lightning_dlres.core.errors import PeerLostError, ProtocolError, announced, text_of
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.gradsync.plan.graph import Part
from lightning_dlres.gradsync.plan.transmissions import Entry

# Bytes to which payloads are aligned in a message, so that they can be read as words.
_ALIGNMENT = 8
# Row of a message's table: unit, part and flag, and bytes of a payload. The table is a byte string,
# since lists would be described entry by entry.
_ROW = struct.Struct("<QQQ")
# Key of the message by which a rank tells the others why it ends its work.
FAILURE_KEY = ("failure",)

_PARTS = frozenset(Part)
# Flag beside the part of a payload whose parameter no rank has used so far.
_UNUSED = 1 << 8


class Payload(NamedTuple):
    """Payload of a unit.

    Attributes:
        unit: Index of the unit.
        part: Its content.
        content: Contiguous, of any dtype; uint8 if it was received.
        is_used: False if the parameter is unused on all ranks that have contributed.
    """

    unit: int
    part: Part
    content: Tensor
    is_used: bool = True


def content_of(item: Item, name: str) -> Tree:
    """Return the content of a message.

    Raises:
        PeerLostError: If the item is the error that ended the connection to a rank, or if the rank
            has ended its work.
    """
    if isinstance(item, BaseException):
        raise PeerLostError(f"lost {name} while gradients were synchronised: {item}") from item
    key, content = item
    if key == FAILURE_KEY:
        raise announced(text_of(content))
    return content


def message_of(step: int, payloads: Sequence[Payload]) -> Tree:
    """Return a message of a step; `payloads_of` returns its contents."""
    contents = [
        byte_array(content if content.device.type == "cpu" else content.cpu())
        for _, _, content, _ in payloads
    ]
    table = b"".join(
        _ROW.pack(unit, part if is_used else part | _UNUSED, content.size)
        for (unit, part, _, is_used), content in zip(payloads, contents, strict=True)
    )
    # Not `zeros`: it would write all of the message twice.
    message = np.empty(sum(_aligned(content.size) for content in contents), np.uint8)
    offset = 0
    for content in contents:
        end, following = offset + content.size, offset + _aligned(content.size)
        message[offset:end] = content
        message[end:following] = 0
        offset = following
    return [step, table, torch.from_numpy(message)]


def payloads_of(content: Tree, name: str) -> tuple[int, list[Payload]]:
    """Return the step of a message, and its payloads.

    Raises:
        ProtocolError: If the message is malformed; the error names its sender.
    """
    step, table, message = _row(content, 3, name)
    is_message = isinstance(message, Tensor) and message.dtype == torch.uint8
    is_table = isinstance(table, bytes) and len(table) % _ROW.size == 0
    if not is_message or message.dim() != 1 or not is_table:
        raise _malformed(name)
    memory = array_of(message)
    payloads, offset = [], 0
    for unit, flagged_part, nbytes in _ROW.iter_unpack(table):
        part = flagged_part & ~_UNUSED
        if part not in _PARTS or offset + nbytes > memory.size:
            raise _malformed(name)
        # Slices of arrays: torch operations release the interpreter's lock and wait for threads. An
        # empty array would become a tensor with stride 0, which has no view of another dtype.
        piece = torch.from_numpy(memory[offset : offset + nbytes]) if nbytes else message[:0]
        payloads.append(Payload(unit, Part(part), piece, not flagged_part & _UNUSED))
        offset += _aligned(nbytes)
    if offset < memory.size:
        raise _malformed(name)
    return _numbers([step], 1, name)[0], payloads


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def report_of(content: Tree, kinds: dict[str, int], name: str) -> tuple[str, list[Sequence[int]]]:
    """Return the kind and the rows of a report to the coordinator.

    Args:
        content: Content of the message.
        kinds: Numbers in a row of each kind of report.
        name: Name of the sender.

    Raises:
        ProtocolError: If the report is malformed; the error names its sender.
    """
    kind, rows = _row(content, 2, name)
    if not isinstance(kind, str) or kind not in kinds or not isinstance(rows, list) or not rows:
        raise _malformed(name)
    return kind, [_numbers(row, kinds[kind], name) for row in rows]


def plans_of(
    content: Tree, ranks: int, name: str
) -> tuple[bool, list[tuple[int, int, tuple[Entry, ...]]]]:
    """Return True for a plan to repeat, and source, destination and entries of its messages.

    Args:
        content: Content of the message.
        ranks: Number of ranks.
        name: Name of the sender.

    Raises:
        ProtocolError: If the plan is malformed; the error names its sender.
    """
    is_learned, rows = _row(content, 2, name)
    if not isinstance(is_learned, bool) or not isinstance(rows, list):
        raise _malformed(name)
    plans = []
    for row in rows:
        source, destination, entries = _row(row, 3, name)
        check_link(source, destination, ranks, name)
        if not isinstance(entries, list) or not entries:
            raise _malformed(name)
        triples = [_numbers(entry, 3, name) for entry in entries]
        plans.append((source, destination, tuple((a, b, c) for a, b, c in triples)))
    return is_learned, plans


def check_link(source: int, destination: int, ranks: int, name: str) -> None:
    """Refuse a message between ranks that do not exist, or from a rank to itself.

    Raises:
        ProtocolError: If the ranks are wrong; the error names the sender `name`.
    """
    if max(_numbers([source, destination], 2, name)) >= ranks or source == destination:
        raise _malformed(name)


def _row(content: Tree, length: int, name: str) -> Sequence[Tree]:
    if not isinstance(content, list) or len(content) != length:
        raise _malformed(name)
    return content


def _numbers(content: Tree, length: int, name: str) -> Sequence[int]:
    """Return a row of whole numbers, none of them negative."""
    row = _row(content, length, name)
    if any(type(number) is not int or number < 0 for number in row):
        raise _malformed(name)
    return row


def _malformed(name: str) -> ProtocolError:
    return ProtocolError(
        f"{name} sent a malformed message while gradients were synchronised. Check that all ranks "
        "run the same version."
    )
