"""StreamCopier on a model of a GPU that runs copies in every order that CUDA allows.

Bytes are right, memory is freed soon, and no direction waits for the other without need.
"""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dlres.memory.execute.transfer import tiers
from lightning_dlres.memory.execute.transfer.copiers import PendingCopy, StreamCopier
from lightning_dlres.memory.execute.transfer.tiers import Allocation, SlabTier
from tests.support.examples import examples
from tests.support.fake_gpu import FakeGpu, FakeStream, latest, soonest

SIZE = 512
CPU = torch.device("cpu")


@dataclass
class Sent:
    """Bytes of one value, on the GPU, in a tier, or in flight."""

    value: int
    allocation: Allocation
    here: Tensor | None
    leaving: PendingCopy | None
    arriving: tuple[Tensor, PendingCopy] | None = None


@dataclass
class World:
    """GPU, copier and tier with few places."""

    gpu: FakeGpu
    tier: SlabTier
    copier: StreamCopier
    wrong: list[str] = field(default_factory=list)

    def fill(self, tensor: Tensor, value: int) -> None:
        address = tensor.data_ptr()
        self.gpu.launch(lambda: ctypes.memset(address, value, SIZE))

    def check(self, tensor: Tensor, value: int) -> None:
        """Read in a kernel, as backward does."""
        address, expected = tensor.data_ptr(), bytes([value]) * SIZE

        def kernel() -> None:
            found = ctypes.string_at(address, SIZE)
            if found != expected:
                self.wrong.append(f"read {found[0]} to {found[-1]}, expected {value}")

        self.gpu.launch(kernel)

    def send(self, value: int) -> Sent | None:
        allocation = self.tier.allocate(SIZE)
        if allocation is None:
            return None
        here = self.gpu.empty(SIZE)
        self.fill(here, value)
        return Sent(value, allocation, here, self.copier.to_tier(here, allocation.data))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    def made(choose: Callable[[int], int] = latest, places: int = 4) -> World:
        return world(choose, places, monkeypatch)

    return made


def world(choose: Callable[[int], int], places: int, patch: pytest.MonkeyPatch) -> World:
    gpu = FakeGpu(choose)
    patch.setattr("lightning_dlres.core.host.slab._pin", gpu.pin)
    return World(gpu, tiers.SlabTier(places * SIZE, None, pinned=True), StreamCopier(gpu))


class Program:
    """Random work of an engine."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world, self.chance = world, chance
        self.known: list[Sent] = []
        self.side = world.gpu.new_stream()

    def run(self, steps: int) -> None:
        gpu = self.world.gpu
        home = gpu.current_stream()
        actions = [self.send, self.wait_offloaded, self.fetch, self.use, self.forget, self.compute]
        for number in range(steps):
            action = self.chance.choice(actions)
            if action is self.use and self.chance.random() < 0.3:
                # As with a user's own streams, which wait for each other.
                self.side.wait_stream(home)
                with gpu.using(self.side):
                    action(number)
                home.wait_stream(self.side)
            else:
                action(number)
            gpu.run_some()
        if self.chance.random() < 0.5:
            self.known.clear()
        self.world.copier.synchronize()
        gpu.drain()
        for sent in self.known:
            if sent.here is None:
                assert set(sent.allocation.data.tolist()) == {sent.value}
        self.known.clear()

    def send(self, number: int) -> None:
        sent = self.world.send(number % 199 + 1)
        if sent is not None:
            self.known.append(sent)

    def wait_offloaded(self, number: int) -> None:
        for sent in self._some():
            if sent.leaving is not None:
                sent.leaving.wait()
                sent.leaving = sent.here = None

    def fetch(self, number: int) -> None:
        for sent in self._some():
            if sent.here is None and sent.arriving is None:
                sent.arriving = self.world.copier.to_device(sent.allocation.data, CPU)

    def use(self, number: int) -> None:
        for sent in self._some():
            if sent.here is not None:
                self.world.check(sent.here, sent.value)
            elif sent.arriving is not None:
                data, ticket = sent.arriving
                ticket.wait()
                self.world.check(data, sent.value)
                self.known.remove(sent)

    def forget(self, number: int) -> None:
        # As with a dropped graph: nothing waits for the copies.
        for sent in self._some():
            self.known.remove(sent)

    def compute(self, number: int) -> None:
        for value in range(200, 203):
            data = self.world.gpu.empty(SIZE)
            self.world.fill(data, value)
            self.world.check(data, value)

    def _some(self) -> list[Sent]:
        return [sent for sent in self.known if self.chance.random() < 0.4]


@settings(max_examples=examples(60))
@given(st.integers(0, 1 << 30), st.sampled_from(["random", "latest", "soonest"]))
def test_bytes_are_right_in_every_order_of_work(seed: int, order: str) -> None:
    chance = random.Random(seed)
    choose = {"latest": latest, "soonest": soonest}.get(order, lambda n: chance.randint(0, n))
    with pytest.MonkeyPatch.context() as patch:
        place = world(choose, 4, patch)
        Program(place, chance).run(60)
    assert place.wrong == []
    assert place.gpu.faults == []


def test_offloaded_memory_is_free_while_later_copies_are_in_flight(
    make: Callable[..., World],
) -> None:
    place = make()
    first, second = place.send(1), place.send(2)
    assert first is not None
    assert second is not None
    assert first.leaving is not None
    first.leaving.wait()
    first.here = None
    # The memory is free in stream order, so its next owner does not wait for the second copy.
    assert place.gpu.unready == 0
    again = place.gpu.empty(SIZE)
    place.fill(again, 9)
    place.gpu.reach(place.gpu.current_stream().record_event())
    assert set(again.tolist()) == {9}
    place.gpu.drain()
    assert set(first.allocation.data.tolist()) == {1}
    assert set(second.allocation.data.tolist()) == {2}


def test_a_copy_without_a_wait_releases_its_memory_when_done(make: Callable[..., World]) -> None:
    place = make(soonest)
    gone = place.send(1)
    del gone
    place.gpu.drain()
    sent = place.send(2)
    assert sent is not None
    assert len(place.copier._to_tier.copies) == 1
    place.copier.synchronize()
    assert len(place.copier._to_tier.copies) == 0


def streams_of(place: World) -> tuple[FakeStream, FakeStream]:
    """Return the streams of both directions."""
    return place.gpu.streams[1], place.gpu.streams[2]


def test_copies_wait_only_for_copies_of_the_same_bytes(make: Callable[..., World]) -> None:
    place = make()
    outward, backward = streams_of(place)
    old = place.send(1)
    assert old is not None
    assert old.leaving is not None
    old.leaving.wait()
    old.here = None
    place.gpu.drain()
    new = place.send(2)
    old.arriving = place.copier.to_device(old.allocation.data, CPU)
    # A fetch does not wait for offloads of other bytes.
    place.gpu.reach(backward.record_event())
    assert len(outward.queue) > 0
    assert set(old.arriving[0].tolist()) == {1}
    place.gpu.drain()
    place.copier.to_device(old.allocation.data, CPU)
    newer = place.send(3)
    assert new is not None
    assert newer is not None
    place.gpu.reach(outward.record_event())
    assert len(backward.queue) > 0


def test_tier_bytes_are_overwritten_only_after_they_were_read(make: Callable[..., World]) -> None:
    place = make(places=1)
    outward, _ = streams_of(place)
    first = place.send(1)
    assert first is not None
    assert first.leaving is not None
    first.leaving.wait()
    first.here = None
    data, ticket = place.copier.to_device(first.allocation.data, CPU)
    del first
    second = place.send(2)
    assert second is not None
    place.gpu.reach(outward.record_event())
    ticket.wait()
    place.check(data, 1)
    place.gpu.drain()
    assert place.wrong == []


def test_a_fetch_waits_for_the_offload_of_the_same_bytes(make: Callable[..., World]) -> None:
    place = make()
    sent = place.send(7)
    assert sent is not None
    data, _ = place.copier.to_device(sent.allocation.data, CPU)
    _, backward = streams_of(place)
    place.gpu.reach(backward.record_event())
    assert set(data.tolist()) == {7}


def test_fetched_memory_stays_allocated_for_another_stream(make: Callable[..., World]) -> None:
    place = make()
    sent = place.send(7)
    assert sent is not None
    data, ticket = place.copier.to_device(sent.allocation.data, CPU)
    _, backward = streams_of(place)
    side = place.gpu.new_stream()
    with place.gpu.using(side):
        ticket.wait()
        place.check(data, 7)
    place.gpu.reach(backward.record_event())
    # The stream that allocated the memory continues at once, and allocates as many bytes.
    del data, ticket
    other = place.gpu.empty(SIZE)
    place.fill(other, 8)
    place.gpu.reach(place.gpu.current_stream().record_event())
    place.gpu.drain()
    assert place.wrong == []
    assert set(other.tolist()) == {8}


def test_offloaded_memory_stays_for_the_copy_if_another_stream_waits(
    make: Callable[..., World],
) -> None:
    place = make()
    sent = place.send(7)
    assert sent is not None
    assert sent.leaving is not None
    with place.gpu.using(place.gpu.new_stream()):
        sent.leaving.wait()
    sent.here = sent.leaving = None
    other = place.gpu.empty(SIZE)
    place.fill(other, 8)
    place.gpu.reach(place.gpu.current_stream().record_event())
    place.gpu.drain()
    assert set(sent.allocation.data.tolist()) == {7}


@pytest.mark.parametrize("finishes", [True, False])
def test_a_slab_stays_pinned_while_it_is_copied(make: Callable[..., World], finishes: bool) -> None:
    place = make()
    sent = place.send(1)
    del sent
    place.tier = tiers.SlabTier(SIZE)
    gc.collect()
    assert place.gpu.pinned > 0
    if finishes:
        place.copier.synchronize()
    else:
        # The last reference to the copier is dropped.
        place.copier = StreamCopier(place.gpu)
    assert place.gpu.pinned == 0
    place.gpu.drain()
    assert place.gpu.faults == []
