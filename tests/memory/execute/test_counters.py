"""Tensors that share a storage, each with its own version counter.

A tensor that is saved after a change never gets the copy that was made before it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_dlres.core._compat import shares_counter
from lightning_dlres.memory.execute.actions import MemoryAction
from tests.support.examples import checkered, examples
from tests.support.scripted_policy import ScriptedEngine

ACTIONS = [*MemoryAction, None]  # None: each action in turn
Hooks = Callable[[], AbstractContextManager[None]]
Step = Callable[[], tuple[Tensor, list[Tensor]]]


def scripted_engine(action: MemoryAction | None, late: bool) -> ScriptedEngine:
    every = list(MemoryAction)
    return ScriptedEngine(
        lambda number, _: action or every[number % len(every)], late=late, tier_bytes=1 << 16
    )


def outcome(step: Step, hooks: Hooks) -> list[Tensor] | None:
    """Return the gradients of a step; None if autograd finds a saved tensor changed."""
    torch.manual_seed(0)
    with hooks():
        loss, leaves = step()
    try:
        return list(torch.autograd.grad(loss, leaves))
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            return None
        raise


def require_parity(step: Step, engine: ScriptedEngine) -> list[Tensor] | None:
    plain, actual = outcome(step, nullcontext), outcome(step, engine.hooks)
    assert (plain is None) == (actual is None)
    for expected, gradient in zip(plain or (), actual or (), strict=True):
        assert torch.equal(expected, gradient)
    return plain


def recurrent_cell(kind: type[nn.Module]) -> Step:
    def step() -> tuple[Tensor, list[Tensor]]:
        cell, total = kind(8, 16), torch.zeros(())
        states: Any = torch.randn(4, 16)
        if kind is nn.LSTMCell:
            states = states, torch.randn(4, 16)
        for x in torch.randn(3, 4, 8):
            states = cell(x, states)
            total = total + (states if isinstance(states, Tensor) else states[0]).square().sum()
        return total, list(cell.parameters())

    return step


def packed(kind: type[nn.Module], **options: Any) -> Step:
    def step() -> tuple[Tensor, list[Tensor]]:
        net = kind(6, 8, **options)
        x = pack_padded_sequence(torch.randn(7, 4, 6), torch.tensor([7, 5, 5, 2]))
        out = pad_packed_sequence(net(x)[0])[0]
        return out.square().sum(), list(net.parameters())

    return step


def halves(split: Callable[[Tensor], Any]) -> Step:
    """Save the first half of a storage, then change and save the second half."""

    def step() -> tuple[Tensor, list[Tensor]]:
        x = torch.randn(4, 8, requires_grad=True)
        one, other = split(x * 1)
        loss = one.sin().sum()
        other.mul_(3)
        return loss + other.cos().sum() + (one * one).sum(), [x]

    return step


def changed_by_another(make: Callable[[Tensor], Tensor]) -> Step:
    """Save a tensor, change its memory through another tensor, and save that one, too."""

    def step() -> tuple[Tensor, list[Tensor]]:
        y, other = torch.randn(64), torch.empty(0)
        w, v = torch.randn(64, requires_grad=True), torch.randn(64, requires_grad=True)
        first = (w * y).sum()
        other = make(y)
        other.mul_(3)
        # The first tensor was changed without a new version: its gradient is undefined.
        return first * 0 + (v * other).sum(), [v]

    return step


def with_data_of(y: Tensor) -> Tensor:
    alias = torch.zeros(64)
    alias.data = y
    return alias


class Squares(torch.autograd.Function):
    """Function that saves its input, its output and a third tensor, and changes its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        before = x.clone()
        x.square_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(before, x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        before, after = ctx.saved_tensors
        return 2 * before * gradient + 0 * after


class Spoils(torch.autograd.Function):
    """Function whose backward changes a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return x.mul_(0) + 2 * gradient


def own_function() -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(4, 8, requires_grad=True)
    y = Squares.apply(x * 1)
    z = y.sin() + y.view(8, 4).t().exp().reshape(4, 8)
    return (z * Squares.apply(z * 1)).sum(), [x]


def spoiled(reads_after: bool) -> Step:
    def step() -> tuple[Tensor, list[Tensor]]:
        x = torch.randn(4, 8, requires_grad=True)
        y = x * 1
        one, other = Spoils.apply(y), y
        # Backward runs in reverse order: `sin` then reads y after `Spoils` has changed it.
        if reads_after:
            y = x * 1
            other, one = y.sin(), Spoils.apply(y)
        return one.sum() + other.sum(), [x]

    return step


def given_back() -> tuple[Tensor, list[Tensor]]:
    """Return a saved tensor as a gradient, to which other gradients are added."""
    x = torch.randn(64, requires_grad=True)
    y = torch.randn(64)
    return Returns.apply(x, y).sum() + Returns.apply(x, y).sum() + (x * y).sum(), [x]


class Returns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.saved_tensors[0], None


CASES: dict[str, Step] = {
    "GRUCell": recurrent_cell(nn.GRUCell),
    "LSTMCell": recurrent_cell(nn.LSTMCell),
    "RNNCell": recurrent_cell(nn.RNNCell),
    "packed GRU": packed(nn.GRU, num_layers=2, bidirectional=True),
    "packed LSTM": packed(nn.LSTM, num_layers=2, bidirectional=True),
    "packed LSTM with projections": packed(nn.LSTM, proj_size=4),
    "unsafe_chunk": halves(lambda y: y.unsafe_chunk(2)),
    "unsafe_chunk, other dimension": halves(lambda y: y.unsafe_chunk(2, 1)),
    "unsafe_split": halves(lambda y: y.unsafe_split(2)),
    "unsafe_split_with_sizes": halves(lambda y: y.unsafe_split_with_sizes([1, 3])),
    "views": halves(lambda y: (y[:2], y[2:])),
    "chunks of detached": halves(lambda y: (y, y.detach()[2:])),
    "data": changed_by_another(lambda y: y.data),
    "view of data": changed_by_another(lambda y: y.data.view(8, 8).t().reshape(64)),
    "set_": changed_by_another(lambda y: torch.empty(0).set_(y)),
    "set_ to a storage": changed_by_another(
        lambda y: torch.empty(0).set_(y.untyped_storage(), 0, (64,))
    ),
    "replaced data": changed_by_another(with_data_of),
    "DLPack": changed_by_another(torch.from_dlpack),
    "NumPy": changed_by_another(lambda y: torch.from_numpy(y.numpy())),
    "clone": changed_by_another(lambda y: y.clone()),
    "own function": own_function,
    "function that changes what it saved": spoiled(False),
    "reader after that": spoiled(True),
    "saved data given as a gradient": given_back,
}


@pytest.mark.parametrize(("name", "action", "late"), checkered(CASES, ACTIONS, [False, True]))
def test_gradients_equal_those_of_plain_training(
    name: str, action: MemoryAction | None, late: bool
) -> None:
    require_parity(CASES[name], scripted_engine(action, late))


def test_plain_training_fails_where_a_case_expects_it() -> None:
    failing = {name for name, step in CASES.items() if outcome(step, nullcontext) is None}
    assert failing == {"views", "chunks of detached", "reader after that"}


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda y: y.view(-1),
    "detached": lambda y: y.detach(),
    "data": lambda y: y.data,
    "set_": lambda y: torch.empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape),
}


@dataclass
class Handle:
    """Tensor over slots of the storage; `counter` is the id of its version counter."""

    tensor: Tensor
    slots: frozenset[int]
    counter: int


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["save", "change", *WAYS]),
        st.integers(0, 7),
        st.sampled_from([(0, 4), (0, 2), (2, 4), (1, 3), (0, 1), (3, 4)]),
    ),
    max_size=24,
)


def program(steps: list[tuple[str, int, tuple[int, int]]]) -> tuple[Tensor, list[Tensor]]:
    """Save and change parts of one storage of four slots, at random.

    The tensors have version counters of their own. A saved tensor is changed only through its own
    counter, so that autograd notices.
    """
    base = torch.randn(4 * 8)
    handles = [Handle(base, frozenset(range(4)), 0)]
    counters, leaves = 1, [torch.zeros(1, requires_grad=True)]
    saved: list[tuple[frozenset[int], int]] = []
    loss = leaves[0].sum()
    for what, which, (first, last) in steps:
        handle = handles[which % len(handles)]
        slots = frozenset(sorted(handle.slots)[first:last])
        if not slots:
            continue
        begin = min(slots) - min(handle.slots)
        part = handle.tensor[8 * begin : 8 * (begin + len(slots))]
        if what == "save":
            leaf = torch.randn(part.shape, requires_grad=True)
            leaves.append(leaf)
            loss = loss + (leaf * part).sum()
            saved.append((slots, handle.counter))
        elif what == "change":
            if all(c == handle.counter or not slots & other for other, c in saved):
                part.mul_(1.5)
        else:
            is_new = what in ("data", "set_")
            handles.append(Handle(WAYS[what](part), slots, counters if is_new else handle.counter))
            counters += is_new
    return loss, leaves


@settings(max_examples=examples(120))
@given(STEPS, st.sampled_from(ACTIONS), st.booleans())
def test_any_order_of_saves_and_changes(
    steps: list[tuple[str, int, tuple[int, int]]], action: MemoryAction | None, late: bool
) -> None:
    require_parity(lambda: program(steps), scripted_engine(action, late))


def test_counters_are_shared_by_views_only() -> None:
    x = torch.randn(8, requires_grad=True)
    y = x * 1
    for other in (y, y[2:], y.detach(), y.detach()[1:], y.view(2, 4)):
        assert shares_counter(y, other)
    y.add_(1)
    for other in (y.data, torch.empty(0).set_(y.detach()), y.clone(), *y.unsafe_chunk(2)):
        assert not shares_counter(y, other)
    # A look at the counters changes nothing.
    assert y._version == 1
