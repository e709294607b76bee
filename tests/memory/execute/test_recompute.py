"""Recomputation: modules run again with the arguments and weights of their forward."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from lightning_dlres.memory.execute.bitwise_check import BitwiseCheck
from lightning_dlres.memory.execute.call_tracker import CallTracker
from lightning_dlres.memory.execute.recompute import patch_recompute


class RecordsIdentities(nn.Module):
    """Attention that records which of its arguments are the same tensor.

    PyTorch computes self-attention differently from attention to another tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor, other: Tensor, same: Tensor) -> Tensor:
        self.seen.append((x is same, x is other))
        mixed: Tensor = self.attention(x, same, same)[0] * other
        return mixed


def test_an_argument_that_is_passed_twice_is_restored_as_one_tensor() -> None:
    torch.manual_seed(0)
    root = nn.ModuleDict({"block": RecordsIdentities()})
    x, other = torch.randn(2, 5, 3, 8)

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        root.zero_grad()
        root["block"](x, other, x).square().sum().backward()
        return [p.grad.clone() for p in root.parameters() if p.grad is not None]

    expected = gradients()
    # Hooks return a new tensor each time, as the engine's hooks do.
    with patch_recompute(root, ["block"]), saved_tensors_hooks(Tensor.detach, Tensor.detach):
        actual = gradients()
    # The plain forward, the patched one, and its recomputation.
    assert root["block"].seen == [(True, False)] * 3
    assert len(actual) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


class Subclass(Tensor):
    """Tensor subclass that some modules treat differently."""


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


class DependsOnAttributes(nn.Module):
    """Module whose output depends on the type, an attribute and the hooks of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        scale = getattr(x, "scale", 1.0) + isinstance(x, Subclass) + bool(x._backward_hooks)
        y = self.linear(x) * scale
        # `sin` saves y, so the saved tensor depends on `scale`.
        return y.sin() * (1.0 if other is None else other.sum())


Way = Callable[[nn.Module, Tensor], Tensor]


def gradients_of(way: Way, *checks: BitwiseCheck, recomputes: bool) -> list[Tensor]:
    torch.manual_seed(0)
    root = nn.Sequential(nn.Linear(8, 8), DependsOnAttributes())
    y = torch.randn(5, 8)

    def run() -> None:
        way(root[1], root[0](y)).square().sum().backward()

    if recomputes:
        hooks: Any = saved_tensors_hooks(Tensor.detach, Tensor.detach)
        with patch_recompute(root, ["1"], bitwise_check=checks[0] if checks else None), hooks:
            run()
    else:
        run()
    return [p.grad for p in root.parameters() if p.grad is not None]


@pytest.mark.parametrize("way", [with_an_attribute, as_a_subclass, by_keyword, with_other_weights])
def test_modules_with_unrepeatable_arguments_are_not_recomputed(way: Way) -> None:
    expected, actual = gradients_of(way, recomputes=False), gradients_of(way, recomputes=True)
    assert len(actual) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_changed_weights_raise_an_error() -> None:
    with pytest.raises(
        RuntimeError, match="parameters and buffers of DependsOnAttributes must not change between"
    ):
        gradients_of(with_weights_that_change, recomputes=True)


def test_a_check_recomputes_with_restored_arguments() -> None:
    # The restored argument has no hook, so the result differs.
    bitwise_check = BitwiseCheck()
    gradients_of(with_a_hook, bitwise_check, recomputes=True)
    assert bitwise_check.differing({"1"})


def test_a_check_of_a_module_that_cannot_recompute_does_not_raise() -> None:
    def way(block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x)
        block.register_buffer("late", torch.zeros(1))
        return y

    bitwise_check = BitwiseCheck()
    assert gradients_of(way, bitwise_check, recomputes=True)
    assert bitwise_check.differing({"1"})


class Rearranges(nn.Module):
    """Module that arranges its output differently each time, by state outside of the module."""

    def __init__(self, rearrange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.rearrange = nn.Linear(8, 8), rearrange

    def forward(self, x: Tensor) -> Tensor:
        return self.rearrange(self.linear(x).sin())


GENERATOR, SHAPES = torch.Generator(), itertools.cycle([(8, 25), (25, 8)])


@pytest.mark.parametrize(
    "rearrange",
    [
        lambda y: y[torch.randperm(25, generator=GENERATOR)],
        lambda y: y.t().contiguous() if next(SHAPES)[0] == 8 else y,
        lambda y: y.reshape(next(SHAPES)),
    ],
    ids=["shuffles", "transposes", "reshapes"],
)
def test_a_check_finds_an_output_that_only_its_arrangement_changes(
    rearrange: Callable[[Tensor], Tensor],
) -> None:
    root, bitwise_check = nn.ModuleDict({"block": Rearranges(rearrange)}), BitwiseCheck()
    with patch_recompute(root, ["block"], bitwise_check=bitwise_check):
        root["block"](torch.randn(25, 8)).sum().backward()
    assert bitwise_check.differing({"block"})


def test_a_check_leaves_no_references() -> None:
    freed: list[str] = []

    class SavesOutput(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            weakref.finalize(y.untyped_storage(), freed.append, "output")
            return y * 2

    root = nn.Sequential(nn.Linear(4, 4), SavesOutput())
    bitwise_check = BitwiseCheck()
    with patch_recompute(root, ["1"], bitwise_check=bitwise_check):
        root(torch.randn(2, 4)).sum().backward()
    gc.collect()
    assert not bitwise_check.differing({"1"}) | bitwise_check.unchecked({"1"})
    assert freed == ["output"] * 2


def test_a_direct_forward_after_a_call_of_a_copy_uses_the_modules_own_weights() -> None:
    net, tracker = nn.Linear(6, 4), CallTracker()
    root, x = nn.Sequential(net), torch.randn(5, 6)
    with tracker.tracking(), patch_recompute(root, ["0"], tracker):
        other = copy.copy(net)
        other._parameters = {"weight": nn.Parameter(torch.zeros(4, 6)), "bias": None}
        for _ in range(2):
            assert torch.equal(net(x), type(net).forward(net, x))
            assert torch.equal(other(x), torch.zeros(5, 4))
            assert torch.equal(net.forward(x), type(net).forward(net, x))
