"""Both sides of a channel agree on the next frame's size, whatever is sent, without talking about
it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.core.wire import payload
from lightning_dlres.pipeline.comm import packing
from tests.support.examples import examples

# Below and above what is in line, around a frame, and around what is packed.
SIZES = st.one_of(
    st.integers(0, 9000),
    st.integers(packing.PACKED_BYTES - 300, packing.PACKED_BYTES + 300),
)
MESSAGES = st.lists(st.lists(SIZES, max_size=3), min_size=1, max_size=6)


class Receiver:
    """Takes transfers as the inbox does: with a buffer of the size that it expects."""

    def __init__(self) -> None:
        self.frame = packing.FIRST_FRAME_BYTES

    def take(self, transfers: list[Tensor]) -> tuple[payload.PayloadHeader, list[Tensor]] | None:
        def read(size: int) -> Tensor:
            transfer = transfers.pop(0)
            assert transfer.numel() == size
            return transfer.clone()

        packed = read(self.frame)
        end, size = packing.sizes(packed)
        if not size:
            return None
        if end > len(packed):
            packed = torch.cat([packed, read(end - len(packed))])
        self.frame = packing.frame_after(end)
        header = packing.header_of(packed, size, "rank 1")
        large = packing.packed_tensors(packed, end, size, header)
        return header, large or [read(length) for length in payload.large_sizes(header)]


@given(messages=MESSAGES)
@settings(max_examples=examples(60))
def test_messages_of_any_sizes_arrive_as_they_were(messages: list[list[int]]) -> None:
    receiver, frame = Receiver(), packing.FIRST_FRAME_BYTES
    for number, lengths in enumerate(messages):
        tree = [torch.arange(n, dtype=torch.int64).to(torch.uint8) for n in lengths]
        header, large = payload.encode(tree, ("tree", number))
        transfers, frame = packing.pack(header, large, frame)
        taken = receiver.take(transfers)
        assert taken is not None
        assert not transfers
        assert taken[0].key == ("tree", number)
        for sent, got in zip(tree, payload.decode(*taken), strict=True):
            assert torch.equal(sent, got)
        assert frame == receiver.frame <= packing.PACKED_BYTES
    goodbye, _ = packing.pack(b"", [], frame)
    assert receiver.take(goodbye) is None


@pytest.mark.parametrize("count", [2000, 30_000])
def test_a_message_as_large_as_the_last_is_one_transfer(count: int) -> None:
    frame, transfers = packing.FIRST_FRAME_BYTES, []
    for step in (1, 2, 127, 128, 70_000):
        header, large = payload.encode([torch.zeros(count), torch.zeros(3)], ("tree", step))
        transfers, frame = packing.pack(header, large, frame)
    assert len(transfers) == 1


def test_what_travelled_in_one_frame_does_not_share_memory() -> None:
    tree = [torch.ones(5001, dtype=torch.uint8), torch.ones(3001, dtype=torch.complex128)]
    header, large = payload.encode(tree, ("odd",))
    (packed,), _ = packing.pack(header, large, 1 << 17)
    end, size = packing.sizes(packed)
    found = packing.header_of(packed, size, "rank 1")
    parts = packing.packed_tensors(packed, end, size, found)
    assert all(torch.equal(a, b) for a, b in zip(tree, payload.decode(found, parts), strict=True))
    assert [t.untyped_storage().nbytes() for t in parts] == [5001, 16 * 3001]


def test_a_header_that_contradicts_the_frame_is_refused() -> None:
    header, large = payload.encode([torch.zeros(5000)], ("tree",))
    (packed,), _ = packing.pack(header, large, 1 << 16)
    end, size = packing.sizes(packed)
    found = packing.header_of(packed, size, "rank 1")
    with pytest.raises(ProtocolError, match="expected"):
        packing.packed_tensors(packed, end - 1, size, found)
