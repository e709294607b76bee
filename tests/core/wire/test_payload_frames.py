"""Both sides of a channel compute the same size of the next frame, for messages of any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.core.wire import payload
from tests.support.examples import examples

# Sizes in bytes around the limits of in-line tensors, of a frame, and of packed messages.
SIZES = st.one_of(
    st.integers(0, 9000),
    st.integers(payload.PACKED_BYTES - 300, payload.PACKED_BYTES + 300),
)
MESSAGES = st.lists(st.lists(SIZES, max_size=3), min_size=1, max_size=6)


class Receiver:
    """Receives transfers as the inbox does, with buffers of the size that it expects."""

    def __init__(self) -> None:
        self.frame = payload.FIRST_FRAME_BYTES

    def receive(self, transfers: list[Tensor]) -> tuple[payload.PayloadHeader, list[Tensor]] | None:
        def read(size: int) -> Tensor:
            transfer = transfers.pop(0)
            assert transfer.numel() == size
            return transfer.clone()

        packed = read(self.frame)
        end, header_bytes = payload.read_prefix(packed)
        if not header_bytes:
            return None
        if end > len(packed):
            packed = torch.cat([packed, read(end - len(packed))])
        self.frame = payload.next_frame_bytes(end)
        header = payload.decode_frame_header(packed, header_bytes, "rank 1")
        large = payload.unpack_tensors(packed, end, header_bytes, header)
        return header, large or [read(length) for length in payload.large_sizes(header)]


@given(messages=MESSAGES)
@settings(max_examples=examples(60))
def test_messages_of_any_sizes_arrive_unchanged(messages: list[list[int]]) -> None:
    receiver, frame = Receiver(), payload.FIRST_FRAME_BYTES
    for number, lengths in enumerate(messages):
        tree = [torch.arange(n, dtype=torch.int64).to(torch.uint8) for n in lengths]
        header, large = payload.encode(tree, ("tree", number))
        transfers, frame = payload.pack(header, large, frame)
        received = receiver.receive(transfers)
        assert received is not None
        assert not transfers
        assert received[0].key == ("tree", number)
        for sent, arrived in zip(tree, payload.decode(*received), strict=True):
            assert torch.equal(sent, arrived)
        assert frame == receiver.frame <= payload.PACKED_BYTES
    goodbye, _ = payload.pack(b"", [], frame)
    assert receiver.receive(goodbye) is None


@pytest.mark.parametrize("count", [2000, 30_000])
def test_a_message_as_large_as_the_one_before_is_one_transfer(count: int) -> None:
    frame, transfers = payload.FIRST_FRAME_BYTES, []
    for step in (1, 2, 127, 128, 70_000):
        header, large = payload.encode([torch.zeros(count), torch.zeros(3)], ("tree", step))
        transfers, frame = payload.pack(header, large, frame)
    assert len(transfers) == 1


def test_tensors_of_one_frame_do_not_share_storage() -> None:
    tree = [torch.ones(5001, dtype=torch.uint8), torch.ones(3001, dtype=torch.complex128)]
    header, large = payload.encode(tree, ("odd",))
    (packed,), _ = payload.pack(header, large, 1 << 17)
    end, header_bytes = payload.read_prefix(packed)
    decoded = payload.decode_frame_header(packed, header_bytes, "rank 1")
    parts = payload.unpack_tensors(packed, end, header_bytes, decoded)
    assert all(torch.equal(a, b) for a, b in zip(tree, payload.decode(decoded, parts), strict=True))
    assert [t.untyped_storage().nbytes() for t in parts] == [5001, 16 * 3001]


def test_a_header_that_contradicts_the_frame_is_refused() -> None:
    header, large = payload.encode([torch.zeros(5000)], ("tree",))
    (packed,), _ = payload.pack(header, large, 1 << 16)
    end, header_bytes = payload.read_prefix(packed)
    decoded = payload.decode_frame_header(packed, header_bytes, "rank 1")
    with pytest.raises(ProtocolError, match="must have"):
        payload.unpack_tensors(packed, end - 1, header_bytes, decoded)
