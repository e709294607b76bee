"""Byte counter: the bytes at present, and the peak."""

from __future__ import annotations

from lightning_dlres.memory.execute.byte_counter import ByteCounter


def test_a_byte_counter_tracks_the_peak() -> None:
    byte_counter = ByteCounter()
    for change in (10, 5, -12, 4):
        byte_counter.add(change)
    byte_counter.drop(7)
    assert (byte_counter.now, byte_counter.peak) == (0, 15)
