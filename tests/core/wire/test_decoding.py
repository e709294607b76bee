"""Tests of decoding typed data in many threads at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Annotated

import msgspec
import pytest

from lightning_dlres.core.wire.decoding import from_json, from_msgpack


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_can_decode_a_new_struct_at_once() -> None:
    # With msgspec's own functions the process crashes in the first few rounds.
    values = {f"field{place}": place for place in range(30)}
    packed, text = msgspec.msgpack.encode(values), msgspec.json.encode(values)
    for _ in range(50):
        fields = [(name, Annotated[int, msgspec.Meta(ge=0)]) for name in values]
        kind = msgspec.defstruct("Kind", fields)
        barrier = threading.Barrier(4)
        decoded: list[object] = []

        def read(
            number: int,
            kind: type = kind,
            barrier: threading.Barrier = barrier,
            decoded: list[object] = decoded,
        ) -> None:
            barrier.wait(20)
            decoded.append(from_json(text, kind) if number % 2 else from_msgpack(packed, kind))

        threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert decoded == [kind(**values)] * 4


def test_data_of_another_type_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        from_json('"a"', int)
    with pytest.raises(msgspec.DecodeError):
        from_msgpack(b"\xc1", list[int])
