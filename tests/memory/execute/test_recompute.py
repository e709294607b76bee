"""Modules that run again in backward get what they got in forward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from lightning_dlres.memory.execute.bitwise_check import Audit
from lightning_dlres.memory.execute.recompute import patch_recompute


class Identities(nn.Module):
    """Self-attention, which PyTorch computes otherwise than attention to another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor, other: Tensor, same: Tensor) -> Tensor:
        self.seen.append((x is same, x is other))
        mixed: Tensor = self.attention(x, same, same)[0] * other
        return mixed


def test_an_argument_that_is_given_twice_is_one_tensor_again() -> None:
    torch.manual_seed(0)
    root = nn.ModuleDict({"block": Identities()})
    x, other = torch.randn(2, 5, 3, 8)

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        root.zero_grad()
        root["block"](x, other, x).square().sum().backward()
        return [p.grad.clone() for p in root.parameters() if p.grad is not None]

    expected = gradients()
    # Hooks give back another tensor each time, as those of a plan do.
    with patch_recompute(root, ["block"]), saved_tensors_hooks(Tensor.detach, Tensor.detach):
        found = gradients()
    assert root["block"].seen == [(True, False)] * 3
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Subclass(Tensor):
    """A tensor that some modules treat otherwise."""


def with_an_attribute(block: nn.Module, x: Tensor) -> Tensor:
    x = x * 1
    x.scale = 3.0  # type: ignore[attr-defined]
    return block(x)  # type: ignore[no-any-return]


def as_a_subclass(block: nn.Module, x: Tensor) -> Tensor:
    return block(x.as_subclass(Subclass)).as_subclass(Tensor)  # type: ignore[no-any-return]


def by_keyword(block: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = block(x, other=(other := x.detach() * 1))
    with torch.no_grad():
        other.zero_()
    return y


def with_other_weights(block: nn.Module, x: Tensor) -> Tensor:
    weights = {name: weight * 2 for name, weight in block.named_parameters()}
    return functional_call(block, weights, (x,))


def with_a_hook(block: nn.Module, x: Tensor) -> Tensor:
    x = x * 1
    x.register_hook(lambda gradient: gradient)
    return block(x)  # type: ignore[no-any-return]


def with_weights_that_change(block: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = block(x)
    with torch.no_grad():
        for weight in block.parameters():
            weight.add_(0)
    return y


class Asks(nn.Module):
    """Asks for more of its input than the values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        scale = getattr(x, "scale", 1.0) + isinstance(x, Subclass) + bool(x._backward_hooks)
        y = self.linear(x) * scale
        # What is saved here depends on it.
        return y.sin() * (1.0 if other is None else other.sum())


Way = Callable[[nn.Module, Tensor], Tensor]


def gradients_of(way: Way, *audits: Audit, again: bool) -> list[Tensor]:
    torch.manual_seed(0)
    root = nn.Sequential(nn.Linear(8, 8), Asks())
    y = torch.randn(5, 8)

    def run() -> None:
        way(root[1], root[0](y)).square().sum().backward()

    if again:
        hooks: Any = saved_tensors_hooks(Tensor.detach, Tensor.detach)
        with patch_recompute(root, ["1"], audit=audits[0] if audits else None), hooks:
            run()
    else:
        run()
    return [p.grad for p in root.parameters() if p.grad is not None]


@pytest.mark.parametrize("way", [with_an_attribute, as_a_subclass, by_keyword, with_other_weights])
def test_what_would_not_come_back_does_not_run_again(way: Way) -> None:
    expected, found = gradients_of(way, again=False), gradients_of(way, again=True)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_changed_weights_are_an_error_and_no_other_gradient() -> None:
    with pytest.raises(RuntimeError, match="Asks runs again in backward, but its parameters"):
        gradients_of(with_weights_that_change, again=True)


def test_an_audit_runs_with_what_comes_back() -> None:
    audit = Audit()
    gradients_of(with_a_hook, audit, again=True)
    assert audit.unlike({"1"})


def test_an_audit_of_what_cannot_run_again_does_not_end_the_step() -> None:
    def way(block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x)
        block.register_buffer("late", torch.zeros(1))
        return y

    audit = Audit()
    assert gradients_of(way, audit, again=True)
    assert audit.unlike({"1"})


def test_an_audit_leaves_nothing_behind() -> None:
    freed: list[str] = []

    class SavesOutput(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            weakref.finalize(y.untyped_storage(), freed.append, "output")
            return y * 2

    root = nn.Sequential(nn.Linear(4, 4), SavesOutput())
    audit = Audit()
    with patch_recompute(root, ["1"], audit=audit):
        root(torch.randn(2, 4)).sum().backward()
    gc.collect()
    assert not audit.unlike({"1"}) | audit.unseen({"1"})
    assert freed == ["output"] * 2
