"""Tests of random state: exact restoration, distinct seeds, and forks without side effects."""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable, Iterator
from itertools import permutations, product

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core._compat import numpy_change_detector
from lightning_dlres.core.rng import (
    derive_seed,
    forked,
    restore,
    rewinder,
    seed_all_devices,
    seed_device,
    snapshot,
)
from lightning_dlres.core.wire.payload import decode, decode_header, encode
from lightning_dlres.core.wire.tree import flatten
from tests.support.examples import examples

CPU = torch.device("cpu")


def draw() -> list[float]:
    """Draw from every generator, including those that cache a second value."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(()).item(),
        torch.randn(3).sum().item(),
        torch.randperm(7)[0].item(),
    ]


@settings(max_examples=examples(30))
@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_a_restored_state_draws_the_same_numbers(seed: int, before: int) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    for _ in range(before):
        draw()
    state = snapshot()
    expected = [draw() for _ in range(3)]
    restore(state)
    assert [draw() for _ in range(3)] == expected
    # A state can be restored again: it is no view of the generator's own memory.
    restore(state)
    assert [draw() for _ in range(3)] == expected
    restore(state)
    rewind = rewinder(CPU)
    for _ in range(2):
        assert [draw() for _ in range(3)] == expected
        rewind()
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("cached", [False, True], ids=["", "second normal number cached"])
@pytest.mark.parametrize(
    "use",
    [
        np.random.rand,
        np.random.randn,
        lambda: np.random.randint(9),
        lambda: np.random.shuffle(np.arange(5)),
        lambda: np.random.rand(624),
        lambda: np.random.seed(3),
        lambda: np.random.set_state(np.random.RandomState(5).get_state()),
        lambda: None,
    ],
)
def test_every_use_of_numpy_is_undone(use: Callable[[], object], cached: bool) -> None:
    np.random.seed(1)
    if cached:
        np.random.randn()
    rewind = rewinder(CPU)
    expected = np.random.randn(5).tolist()
    for _ in range(2):
        rewind()
        use()
        rewind()
        assert np.random.randn(5).tolist() == expected


def test_another_numpy_generator_counts_as_a_change() -> None:
    before = np.random.get_bit_generator()
    state = np.random.RandomState(1).get_state()
    np.random.set_state(state)
    changed = numpy_change_detector(state)
    assert not changed()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        assert changed()
        assert numpy_change_detector(state)()
    finally:
        np.random.set_bit_generator(before)
    assert not changed()
    np.random.rand()
    assert changed()


def test_the_state_of_another_rank_can_be_restored() -> None:
    random.gauss(0, 1), np.random.randn()
    data, large = encode(snapshot(CPU), ("rng",))
    expected = draw()
    restore(decode(decode_header(data, "rank 0"), large), CPU)
    assert draw() == expected


def test_a_snapshot_draws_nothing() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = draw()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    snapshot()
    assert draw() == expected


def test_seeds_of_all_steps_micro_batches_and_layers_differ() -> None:
    parts = list(product(range(12), repeat=3))
    seeds = {derive_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds), "torch.manual_seed takes them"


@given(
    st.lists(st.integers(-(2**64), 2**64), min_size=2, max_size=4, unique_by=lambda n: n % 2**64)
)
def test_order_and_number_of_parts_matter(parts: list[int]) -> None:
    orders = {derive_seed(*order) for order in permutations(parts)}
    assert len(orders) == len(list(permutations(parts)))
    assert derive_seed(*parts) != derive_seed(*parts, 0) != derive_seed(0, *parts)


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=4), st.data())
def test_each_part_matters(parts: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(parts) - 1))
    other = [*parts]
    other[index] ^= 1 << data.draw(st.integers(0, 61))
    assert derive_seed(*parts) != derive_seed(*other)


def test_seeds_are_the_same_in_every_version() -> None:
    # Another plan, a resumed run and another machine must get the same dropout.
    assert [derive_seed(), derive_seed(0), derive_seed(1, 2, 3)] == [
        0,
        8147104208329303767,
        7510213797696614745,
    ]


def test_a_fork_changes_no_state() -> None:
    before = torch.get_rng_state()
    with forked(CPU):
        torch.manual_seed(5)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with contextlib.suppress(KeyError), forked(CPU):
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_the_state_is_plain_data() -> None:
    structure, tensors = flatten(snapshot())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(structure)) == structure
    assert sum(t.numel() * t.element_size() for t in tensors) < 20_000


def test_the_given_gpu_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["cuda:0"]
    seeded: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seeded.append((current[-1], seed)))
    with forked(torch.device("cpu")):
        seed_device(7, torch.device("cuda:1"))
    assert seeded == [("cuda:1", 7)]


@pytest.mark.parametrize("seed", [-1, 0, 7, 2**63 - 1])
def test_seeds_are_those_of_torch_without_a_record_of_the_stack(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    with forked(CPU):
        torch.manual_seed(seed)
        expected = torch.rand(3)

    def recorded() -> list[str]:
        raise AssertionError("the call stack was recorded, which is slow")

    monkeypatch.setattr(traceback, "format_stack", recorded)
    with forked(CPU):
        seed_all_devices(seed)
        assert torch.equal(torch.rand(3), expected)
        seed_device(seed, CPU)
        assert torch.equal(torch.rand(3), expected)


def test_all_gpus_in_use_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with forked(CPU):
        seed_all_devices(7)
    assert seeds == [7]
