"""Cache space against a dictionary.

Whatever is stored, used, released and moved, the bytes are right and the capacity is never
exceeded. After a full pass no evictable sample lies before the first waiting one.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.cache.space.cache_space import (
    CacheSpace,
    Move,
    PendingWrites,
    UsedEntries,
    check_fits,
)
from lightning_dlres.prefetch.cache.space.entry_kernels import DONE, EVICTABLE, IN_USE, WAITING
from tests.support.examples import examples

SLOTS = 400


def content(slot: int, length: int) -> np.ndarray:
    return ((np.arange(length) * 7 + slot * 13) % 251).astype(np.uint8)


class SpaceMachine(RuleBasedStateMachine):
    """Stores, uses, releases and steps of eviction in any order, compared with a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.space: CacheSpace | None = None
        self.waiting: dict[tuple[int, int], np.ndarray] = {}
        self.used: list[tuple[UsedEntries, list[np.ndarray]]] = []
        # The next epoch slot of each row.
        self.next_slot = [0, 0]

    @precondition(lambda self: self.space is None)
    @rule(capacity=st.integers(1, 3000), threshold=st.floats(0.05, 1.0))
    def make(self, capacity: int, threshold: float) -> None:
        self.space = CacheSpace(np.zeros(capacity, np.uint8), SLOTS, threshold)

    @precondition(lambda self: self.space is not None)
    @rule(row=st.integers(0, 1), lengths=st.lists(st.integers(0, 200), min_size=1, max_size=12))
    def store(self, row: int, lengths: list[int]) -> None:
        first = self.next_slot[row]
        lengths = lengths[: SLOTS - first]
        data = [content(first + i, n) for i, n in enumerate(lengths)]
        slots = np.arange(first, first + len(lengths), dtype=np.uint32)
        before = self.space.live_bytes
        stored = self.space.store(
            row,
            slots,
            np.array(lengths, np.int64),
            np.concatenate(data) if data else np.zeros(0, np.uint8),
        )
        if not self.used and lengths:
            # No sample in use is in the way: all free bytes can be used.
            fits = np.cumsum(lengths) <= self.space.capacity - before
            assert stored == int(fits.sum())
        for i in range(stored):
            self.waiting[row, first + i] = data[i]
        self.next_slot[row] += stored

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted({row for row, _ in self.waiting})))
        candidates = sorted(p for r, p in self.waiting if r == row)
        chosen = data.draw(st.lists(st.sampled_from(candidates), unique=True, min_size=1))
        used = self.space.use(row, np.array(chosen, np.uint32))
        self.used.append((used, [self.waiting.pop((row, p)) for p in chosen]))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.used) - 1))
        used, _ = self.used.pop(index)
        self.space.release(used)
        with pytest.raises(KeyError):
            self.space.release(used)

    @precondition(lambda self: self.space is not None)
    @rule(most=st.integers(1, 300))
    def advance(self, most: int) -> None:
        self.space.advance(most)

    @precondition(lambda self: self.space is not None)
    @rule()
    def compact_fully(self) -> None:
        self.space.compact_fully()
        states = [int(entry["state"]) for entry in self.space.entries()]
        before_waiting = states[: states.index(WAITING)] if WAITING in states else states
        assert EVICTABLE not in before_waiting
        if not self.used:
            assert self.space.end == self.space.live_bytes

    @precondition(lambda self: self.space is not None)
    @rule(row=st.integers(0, 1))
    def clear(self, row: int) -> None:
        self.space.reset_row(row)
        self.waiting = {key: value for key, value in self.waiting.items() if key[0] != row}
        self.next_slot[row] = 0

    @invariant()
    def space_equals_the_dictionary(self) -> None:
        if self.space is None:
            return
        entries = self.space.entries()
        end = 0
        for entry in entries:
            assert entry["offset"] >= end, "samples overlap"
            end = int(entry["offset"] + entry["length"])
        assert end <= self.space.end <= self.space.peak <= self.space.capacity
        assert len(entries) == self.space.num_entries
        alive = [entry for entry in entries if entry["state"] in (WAITING, IN_USE)]
        assert self.space.live_bytes == sum(int(entry["length"]) for entry in alive)
        stored = {
            (int(e["row"]), int(e["epoch_slot"])): e for e in entries if e["state"] == WAITING
        }
        assert stored.keys() == self.waiting.keys(), "a waiting sample was dropped, or one stayed"
        for key, entry in stored.items():
            held = self.space.view(int(entry["offset"]), int(entry["length"]))
            assert np.array_equal(held, self.waiting[key])
        for used, contents in self.used:
            for (_, offset, length), expected in zip(used.tolist(), contents, strict=True):
                assert np.array_equal(self.space.view(offset, length), expected)


SpaceMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestSpace = SpaceMachine.TestCase


def filled_space(capacity: int, lengths: list[int], threshold: float = 1.0) -> CacheSpace:
    space = CacheSpace(np.zeros(capacity, np.uint8), SLOTS, threshold)
    data = np.concatenate([content(i, n) for i, n in enumerate(lengths)])
    slots = np.arange(len(lengths), dtype=np.uint32)
    assert space.store(0, slots, np.array(lengths, np.int64), data) == len(lengths)
    return space


def test_neighbouring_samples_are_moved_in_one_copy() -> None:
    space = filled_space(100, [10] * 9)
    space.release(space.use(0, np.array([0, 1, 5], np.uint32)))
    moves: list[Move | None] = []
    space.on_move = moves.append
    space.compact_fully()
    # Samples 2 to 4 go to the start in one move, 6 to 8 behind them in another.
    assert moves == [None, Move(20, 0, 30), Move(60, 30, 30), None]
    assert space.evicted == 3
    assert space.end == 60
    assert (space.slot_table[0, [0, 1, 5]] == DONE).all()


def test_stores_do_not_wait_for_the_pass_that_the_threshold_starts() -> None:
    size = 1 << 20
    space = CacheSpace(np.zeros(40 * size, np.uint8), SLOTS, threshold=0.5)
    lengths = np.full(1, size, np.int64)
    data = np.ones(size, np.uint8)
    for slot in range(18):
        space.store(0, np.array([slot], np.uint32), lengths, data * slot)
    space.release(space.use(0, np.arange(0, 18, 2, dtype=np.uint32)))
    assert not space.is_evicting
    stored_during_pass = 0
    for slot in range(18, 24):
        if space.is_evicting:
            # It goes behind the last sample, while others have yet to be moved.
            end = space.end
            assert space.store(0, np.array([slot], np.uint32), lengths, data * slot) == 1
            assert space.end == end + size or not space.is_evicting
            stored_during_pass += 1
        else:
            space.store(0, np.array([slot], np.uint32), lengths, data * slot)
    assert stored_during_pass >= 2
    space.compact_fully()
    assert space.end == 15 * size
    waiting = np.array([*range(1, 18, 2), *range(18, 24)], np.uint32)
    for (_, offset, length), slot in zip(space.use(0, waiting), waiting, strict=True):
        assert (space.view(offset, length) == slot).all()


def test_samples_in_use_stay_and_others_move_around_them() -> None:
    space = filled_space(100, [10, 10, 10, 30, 10, 10])
    first = space.use(0, np.array([0, 1], np.uint32))
    in_use = space.use(0, np.array([2], np.uint32))
    space.release(first)
    space.compact_fully()
    # 20 bytes are free before the sample in use. They are too few for the sample of 30 bytes, so it
    # and its successors stay behind.
    assert [(int(e["epoch_slot"]), int(e["offset"])) for e in space.entries()] == [
        (2, 20),
        (3, 30),
        (4, 60),
        (5, 70),
    ]
    space.release(in_use)
    space.compact_fully()
    assert space.end == 50


def test_a_gap_before_a_sample_in_use_is_filled() -> None:
    space = filled_space(100, [20, 10, 10, 10])
    first = space.use(0, np.array([0], np.uint32))
    space.use(0, np.array([1], np.uint32))
    space.release(first)
    space.compact_fully()
    assert [(int(e["epoch_slot"]), int(e["offset"])) for e in space.entries()] == [
        (2, 0),
        (3, 10),
        (1, 20),
    ]


def test_another_epoch_does_not_touch_samples_in_use() -> None:
    space = filled_space(100, [10] * 5)
    used = space.use(0, np.array([3], np.uint32))
    space.reset_row(0)
    space.compact_fully()
    assert space.num_entries == 1
    data = np.concatenate([content(50 + i, 10) for i in range(5)])
    slots = np.arange(5, dtype=np.uint32)
    assert space.store(0, slots, np.full(5, 10, np.int64), data) == 5
    space.release(used)
    # The same epoch slot of the new epoch still waits.
    assert space.slot_table[0, 3] >= 0
    space.use(0, slots)


def test_arguments_out_of_range_are_refused() -> None:
    for threshold in (0.0, 1.5, -1.0):
        with pytest.raises(ConfigError, match="threshold"):
            CacheSpace(np.zeros(10, np.uint8), 1, threshold)
    with pytest.raises(ConfigError, match=r"largest sample.*'cat\.jpg'"):
        check_fits(11, 10, "cat.jpg")
    check_fits(10, 10, "cat.jpg")
    with pytest.raises(KeyError):
        filled_space(100, [10]).use(0, np.array([1], np.uint32))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.data())
@settings(max_examples=examples(60))
def test_the_metadata_list_grows_with_the_samples(lengths: list[int], data: st.DataObject) -> None:
    space = filled_space(2000, lengths)
    assert space.num_entries == len(lengths)
    assert space.live_bytes == sum(lengths)


def test_samples_behind_a_removed_one_without_room_are_stored() -> None:
    space = CacheSpace(np.zeros(100, np.uint8), SLOTS)
    pending = PendingWrites(space)

    def add(slot: int, length: int) -> None:
        slots, lengths = np.array([slot], np.uint32), np.array([length], np.int64)
        pending.add(0, slots, lengths, content(slot, length))
        pending.write()

    add(0, 40)
    add(1, 80)
    add(2, 10)
    pending.remove(0, np.array([2], np.uint32))
    add(3, 10)
    # The sample at the head of the queue has no room, and the others wait behind it.
    assert pending.nbytes == 90
    assert [slot for slot, _ in pending.remove(0, np.array([1], np.uint32))] == [1]
    pending.write()
    assert pending.nbytes == 0
    _, offset, length = space.use(0, np.array([3], np.uint32))[0]
    assert np.array_equal(space.view(offset, length), content(3, 10))
