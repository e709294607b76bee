"""Untracked state that a training step changes is named in one line at the start.

State that every run restores is not named.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors
from lightning_dlres.strategies.hetero_pipe.replay.untracked_state import UntrackedState
from tests.strategies.hetero_pipe.replay.user_state.test_user_state import (
    CounterCallback,
    ManyStates,
)
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, fit

STEPS = 0
MEMORY: dict[str, int] = {"last": 0}
GENERATOR = np.random.default_rng(5)
WARNING = "which cannot be undone"


class Slots:
    """An object with state and without a `__dict__`."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def numbers() -> Iterator[int]:
    while True:
        yield from range(3)


def counter() -> Callable[[], int]:
    calls = 0

    def call() -> int:
        nonlocal calls
        calls += 1
        return calls

    return call


class ChangesUntracked(ManyStates):
    """A model that changes untracked state, beside all kinds of tracked state."""

    total = 0

    def __init__(self) -> None:
        super().__init__(growing=False)
        Path("notes.txt").write_text("a\n" * 999)
        self.file, self.slots, self.call = open("notes.txt"), Slots(), counter()  # noqa: SIM115
        self.numbers, self.count = numbers(), itertools.count()
        self.cycle = itertools.cycle(DataLoader(range(9)))
        self.large = TensorDataset(torch.zeros(1 << 19))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        global STEPS
        STEPS += 1
        MEMORY["last"] += 1
        type(self).total += 1
        self.slots.calls += 1
        self.large.tensors[0][0] += 1
        GENERATOR.random()
        self.call(), next(self.numbers), next(self.count), next(self.cycle), self.file.readline()
        return super().training_step(batch, batch_idx)


NAMES = {
    "STEPS",
    "MEMORY['last']",
    "GENERATOR",
    "ChangesUntracked.total",
    "self.file",
    "self.slots.calls",
    "self.call.calls",
    "self.numbers",
    "self.count",
    "self.cycle",
    "self.large.tensors[0]",
}


def fit_both(context: RankContext) -> None:
    """Train one model with tracked state only, and one with untracked state."""
    options = {"callbacks": [CounterCallback()], "max_epochs": 1}
    print("tracked", flush=True)
    fit(context, Case(lambda: ManyStates(False), trainer=options))
    print("untracked", flush=True)
    fit(context, Case(ChangesUntracked, trainer=options))


def test_one_line_names_untracked_state_that_changes(pool: RankPool) -> None:
    outcome = pool.run_expecting_errors(fit_both, 2)[0]
    assert outcome.error_type is None, outcome.error_message
    tracked, _, untracked = outcome.output.partition("untracked")
    assert WARNING not in tracked
    lines = [line for line in untracked.splitlines() if WARNING in line]
    assert len(lines) == 1, outcome.output
    (line,) = lines
    names = line.partition(" changes ")[2].partition(", which cannot")[0].split(", ")
    assert {name.removeprefix(f"{__name__}.") for name in names} == NAMES


@pytest.mark.parametrize(
    ("old", "new", "is_changed"),
    [
        (0, False, True),
        (0.0, -0.0, True),
        (1.0, 1.0, False),
        (float("nan"), float("nan"), False),
        (frozenset([1]), frozenset([True]), True),
        (frozenset([1]), frozenset([1]), False),
    ],
)
def test_equal_values_may_be_a_change(old: Any, new: Any, is_changed: bool) -> None:
    part: Any = Slots()
    part.calls = old
    state = UntrackedState([("self.part", part)], [])
    part.calls = new
    assert state.changed(LayerTensors()) == (["self.part.calls"] if is_changed else [])


class LazyDict(dict[str, Any]):
    """A dictionary that makes its values when they are asked for, as transformers does."""

    def items(self) -> Any:
        raise AssertionError("the values must not be made")

    __iter__ = keys = values = __getitem__ = items


@pytest.mark.parametrize(
    ("value", "change", "name"),
    [
        (bytearray(b"a"), lambda b: b.extend(b"b"), "self.calls"),
        (array("i", [1]), lambda a: a.append(2), "self.calls"),
        (np.array([[], 1], dtype=object), lambda a: a[0].append(2), "self.calls[0]"),
        (np.array([[], 1], dtype=object), lambda a: a.__setitem__(1, 2), "self.calls"),
        (np.array([1, 2]), lambda a: a.__setitem__(1, 3), "self.calls"),
    ],
)
def test_a_change_in_an_array_is_named(
    value: Any, change: Callable[[Any], object], name: str
) -> None:
    part: Any = Slots()
    part.calls = value
    state = UntrackedState([("self", part)], [])
    assert state.changed(LayerTensors()) == []
    change(value)
    assert state.changed(LayerTensors()) == [name]


def test_a_dictionary_that_makes_its_values_is_not_asked_for_them() -> None:
    lazy = LazyDict()
    dict.__setitem__(lazy, "loaded", Slots())
    state = UntrackedState([("self.lazy", lazy)], [])
    dict.get(lazy, "loaded").calls += 1
    assert state.changed(LayerTensors()) == ["self.lazy['loaded'].calls"]
