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

from lightning_dlres.core.device.copiers import PendingCopy, StreamCopier
from lightning_dlres.memory.execute.transfer import tiers
from lightning_dlres.memory.execute.transfer.tiers import Allocation, SlabTier
from tests.support.examples import examples
from tests.support.fake_gpu import FakeGpu, FakeStream, latest, soonest

SIZE = 512
CPU = torch.device("cpu")


@dataclass
class SentValue:
    """Bytes of one value, on the GPU, in a tier, or in flight."""

    value: int
    allocation: Allocation
    here: Tensor | None
    leaving: PendingCopy | None
    arriving: tuple[Tensor, PendingCopy] | None = None


@dataclass
class CopierSetup:
    """Modelled GPU, its copier, and a tier that holds few values.

    Attributes:
        gpu: Model of the GPU.
        tier: Host memory.
        copier: Copier between both.
        wrong: Reads that got other bytes than were written.
    """

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
            actual = ctypes.string_at(address, SIZE)
            if actual != expected:
                self.wrong.append(f"read {actual[0]} to {actual[-1]}, expected {value}")

        self.gpu.launch(kernel)

    def send(self, value: int) -> SentValue | None:
        allocation = self.tier.allocate(SIZE)
        if allocation is None:
            return None
        here = self.gpu.empty(SIZE)
        self.fill(here, value)
        return SentValue(value, allocation, here, self.copier.to_tier(here, allocation.data))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CopierSetup]:
    def made(choose: Callable[[int], int] = latest, places: int = 4) -> CopierSetup:
        return new_setup(choose, places, monkeypatch)

    return made


def new_setup(choose: Callable[[int], int], places: int, patch: pytest.MonkeyPatch) -> CopierSetup:
    gpu = FakeGpu(choose)
    patch.setattr("lightning_dlres.core.host.slab._pin", gpu.pin)
    return CopierSetup(gpu, tiers.SlabTier(places * SIZE, None, pinned=True), StreamCopier(gpu))


class Program:
    """Random work of an engine."""

    def __init__(self, setup: CopierSetup, chance: random.Random) -> None:
        self.setup, self.chance = setup, chance
        self.known: list[SentValue] = []
        self.side = setup.gpu.new_stream()

    def run(self, steps: int) -> None:
        gpu = self.setup.gpu
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
        self.setup.copier.synchronize()
        gpu.drain()
        for sent in self.known:
            if sent.here is None:
                assert set(sent.allocation.data.tolist()) == {sent.value}
        self.known.clear()

    def send(self, number: int) -> None:
        sent = self.setup.send(number % 199 + 1)
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
                sent.arriving = self.setup.copier.to_device(sent.allocation.data, CPU)

    def use(self, number: int) -> None:
        for sent in self._some():
            if sent.here is not None:
                self.setup.check(sent.here, sent.value)
            elif sent.arriving is not None:
                data, pending_copy = sent.arriving
                pending_copy.wait()
                self.setup.check(data, sent.value)
                self.known.remove(sent)

    def forget(self, number: int) -> None:
        # As with a dropped graph: nothing waits for the copies.
        for sent in self._some():
            self.known.remove(sent)

    def compute(self, number: int) -> None:
        for value in range(200, 203):
            data = self.setup.gpu.empty(SIZE)
            self.setup.fill(data, value)
            self.setup.check(data, value)

    def _some(self) -> list[SentValue]:
        return [sent for sent in self.known if self.chance.random() < 0.4]


@settings(max_examples=examples(60))
@given(st.integers(0, 1 << 30), st.sampled_from(["random", "latest", "soonest"]))
def test_bytes_are_right_in_every_order_of_work(seed: int, order: str) -> None:
    chance = random.Random(seed)
    choose = {"latest": latest, "soonest": soonest}.get(order, lambda n: chance.randint(0, n))
    with pytest.MonkeyPatch.context() as patch:
        setup = new_setup(choose, 4, patch)
        Program(setup, chance).run(60)
    assert setup.wrong == []
    assert setup.gpu.faults == []


def test_offloaded_memory_is_free_while_later_copies_are_in_flight(
    make: Callable[..., CopierSetup],
) -> None:
    setup = make()
    first, second = setup.send(1), setup.send(2)
    assert first is not None
    assert second is not None
    assert first.leaving is not None
    first.leaving.wait()
    first.here = None
    # The memory is free in stream order, so its next owner does not wait for the second copy.
    assert setup.gpu.unready == 0
    again = setup.gpu.empty(SIZE)
    setup.fill(again, 9)
    setup.gpu.reach(setup.gpu.current_stream().record_event())
    assert set(again.tolist()) == {9}
    setup.gpu.drain()
    assert set(first.allocation.data.tolist()) == {1}
    assert set(second.allocation.data.tolist()) == {2}


def test_a_copy_without_a_wait_releases_its_memory_when_done(
    make: Callable[..., CopierSetup],
) -> None:
    setup = make(soonest)
    setup.send(1)
    setup.gpu.drain()
    sent = setup.send(2)
    assert sent is not None
    assert len(setup.copier._to_tier.copies) == 1
    setup.copier.synchronize()
    assert len(setup.copier._to_tier.copies) == 0


def streams_of(setup: CopierSetup) -> tuple[FakeStream, FakeStream]:
    """Return the streams of both directions."""
    return setup.gpu.streams[1], setup.gpu.streams[2]


def test_copies_wait_only_for_copies_of_the_same_bytes(make: Callable[..., CopierSetup]) -> None:
    setup = make()
    outward, backward = streams_of(setup)
    old = setup.send(1)
    assert old is not None
    assert old.leaving is not None
    old.leaving.wait()
    old.here = None
    setup.gpu.drain()
    new = setup.send(2)
    old.arriving = setup.copier.to_device(old.allocation.data, CPU)
    # A fetch does not wait for offloads of other bytes.
    setup.gpu.reach(backward.record_event())
    assert len(outward.queue) > 0
    assert set(old.arriving[0].tolist()) == {1}
    setup.gpu.drain()
    setup.copier.to_device(old.allocation.data, CPU)
    newer = setup.send(3)
    assert new is not None
    assert newer is not None
    setup.gpu.reach(outward.record_event())
    assert len(backward.queue) > 0


def test_tier_bytes_are_overwritten_only_after_they_were_read(
    make: Callable[..., CopierSetup],
) -> None:
    setup = make(places=1)
    outward, _ = streams_of(setup)
    first = setup.send(1)
    assert first is not None
    assert first.leaving is not None
    first.leaving.wait()
    first.here = None
    data, pending_copy = setup.copier.to_device(first.allocation.data, CPU)
    del first
    second = setup.send(2)
    assert second is not None
    setup.gpu.reach(outward.record_event())
    pending_copy.wait()
    setup.check(data, 1)
    setup.gpu.drain()
    assert setup.wrong == []


def test_a_fetch_waits_for_the_offload_of_the_same_bytes(make: Callable[..., CopierSetup]) -> None:
    setup = make()
    sent = setup.send(7)
    assert sent is not None
    data, _ = setup.copier.to_device(sent.allocation.data, CPU)
    _, backward = streams_of(setup)
    setup.gpu.reach(backward.record_event())
    assert set(data.tolist()) == {7}


def test_fetched_memory_stays_allocated_for_another_stream(
    make: Callable[..., CopierSetup],
) -> None:
    setup = make()
    sent = setup.send(7)
    assert sent is not None
    data, pending_copy = setup.copier.to_device(sent.allocation.data, CPU)
    _, backward = streams_of(setup)
    side = setup.gpu.new_stream()
    with setup.gpu.using(side):
        pending_copy.wait()
        setup.check(data, 7)
    setup.gpu.reach(backward.record_event())
    # The stream that allocated the memory continues at once, and allocates as many bytes.
    del data, pending_copy
    other = setup.gpu.empty(SIZE)
    setup.fill(other, 8)
    setup.gpu.reach(setup.gpu.current_stream().record_event())
    setup.gpu.drain()
    assert setup.wrong == []
    assert set(other.tolist()) == {8}


def test_offloaded_memory_stays_for_the_copy_if_another_stream_waits(
    make: Callable[..., CopierSetup],
) -> None:
    setup = make()
    sent = setup.send(7)
    assert sent is not None
    assert sent.leaving is not None
    with setup.gpu.using(setup.gpu.new_stream()):
        sent.leaving.wait()
    sent.here = sent.leaving = None
    other = setup.gpu.empty(SIZE)
    setup.fill(other, 8)
    setup.gpu.reach(setup.gpu.current_stream().record_event())
    setup.gpu.drain()
    assert set(sent.allocation.data.tolist()) == {7}


@pytest.mark.parametrize("finishes", [True, False])
def test_a_slab_stays_pinned_while_it_is_copied(
    make: Callable[..., CopierSetup], finishes: bool
) -> None:
    setup = make()
    sent = setup.send(1)
    del sent
    setup.tier = tiers.SlabTier(SIZE)
    gc.collect()
    assert setup.gpu.pinned > 0
    if finishes:
        setup.copier.synchronize()
    else:
        # The last reference to the copier is dropped.
        setup.copier = StreamCopier(setup.gpu)
    assert setup.gpu.pinned == 0
    setup.gpu.drain()
    assert setup.gpu.faults == []
