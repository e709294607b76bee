"""Shallow copies of a patched module compute with their own weights, in the step and after it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.memory.module_patches import ModulePatches
from tests.support.reuse_steps import scripted_engine

Way = Callable[[Any], Any]


def copied_by_dict(net: nn.Module) -> Any:
    """Copy as `nn.DataParallel` and user code do."""
    other = type(net).__new__(type(net))
    vars(other).update(vars(net))
    return other


WAYS = [copy.copy, copied_by_dict]
PATCHES = [ModulePatches(recompute=("0",)), ModulePatches(reuse=("0",))]
both = pytest.mark.parametrize("patches", PATCHES, ids=["recompute", "reuse"])
each_way = pytest.mark.parametrize("way", WAYS, ids=["copy", "dict"])


class Step:
    """Step with a patched linear layer, the inner module of `root`."""

    def __init__(self) -> None:
        self.net, self.helper = nn.Linear(6, 6), nn.Linear(6, 6)
        self.root = nn.Sequential(self.net, self.helper)
        self.x = torch.randn(5, 6, requires_grad=True)
        self.zeros = torch.zeros(5, 6)

    @contextmanager
    def patched(self, patches: ModulePatches) -> Iterator[None]:
        scripted = scripted_engine()
        with (
            scripted.hooks(self.root.parameters()),
            patches.applied(self.root, scripted.owner, None),
        ):
            yield

    def copied(self, way: Way) -> Any:
        """Return a shallow copy with weights of its own, all zero."""
        other = way(self.net)
        other._parameters = {"weight": nn.Parameter(torch.zeros(6, 6)), "bias": None}
        return other

    @property
    def expected(self) -> Tensor:
        """Output of the module itself."""
        return nn.Linear.forward(self.net, self.x)


def calls_another(step: Step) -> None:
    step.helper(step.x)


def calls_another_that_fails(step: Step) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step.helper(torch.ones(1, 7))


def calls_another_that_exits(step: Step) -> None:
    def leave(*_: Any) -> None:
        raise SystemExit

    handle = step.helper.register_forward_hook(leave)
    with pytest.raises(SystemExit):
        step.root[1:](step.x)
    handle.remove()
    step.root[1:](step.x)


@both
@each_way
@pytest.mark.parametrize("act", [calls_another, calls_another_that_fails])
def test_a_copy_whose_hook_calls_another_module_uses_its_own_weights(
    patches: ModulePatches, way: Way, act: Callable[[Step], None]
) -> None:
    step = Step()
    step.net.register_forward_pre_hook(lambda module, args: act(step))
    with step.patched(patches):
        other = step.copied(way)
        for _ in range(2):
            assert torch.equal(other(step.x * 1), step.zeros)
            assert torch.equal(step.net(step.x * 1), step.expected)
            assert torch.equal(step.net.forward(step.x * 1), step.expected)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_calls_can_be_compiled() -> None:
    step = Step()
    compiled = torch.compile(step.net, backend="eager", fullgraph=True)
    for patches in (PATCHES[0], ModulePatches(recompute=("1",))):
        with step.patched(patches):
            x = step.root(step.x * 1)
            assert torch.equal(compiled(x), nn.Linear.forward(step.net, x))


@both
def test_calls_that_end_without_their_hook_are_forgotten(patches: ModulePatches) -> None:
    step = Step()
    with step.patched(patches):
        calls_another_that_exits(step)
        other = step.copied(copy.copy)
        assert torch.equal(other(step.x * 1), step.zeros)
        assert torch.equal(step.net(step.x * 1), step.expected)


class CallsOriginal(nn.Linear):
    """Layer whose copies add the output of the original, which they call directly."""

    original: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.original[0].forward(x) if self.original[0] is not self else y


def test_a_direct_forward_inside_of_a_copy_is_that_of_the_original() -> None:
    step = Step()
    step.net = step.root[0] = CallsOriginal(6, 6)
    CallsOriginal.original = [step.net]
    with step.patched(PATCHES[0]):
        other = step.copied(copy.copy)
        assert torch.equal(other(step.x * 1), step.expected)


@both
@each_way
def test_a_copy_that_outlives_the_step_is_not_patched(patches: ModulePatches, way: Way) -> None:
    step = Step()
    with step.patched(patches):
        other = step.copied(way)
        assert "forward" in vars(other)
    assert "forward" not in vars(other)
    assert torch.equal(other(step.x), step.zeros)
    assert torch.equal(other.forward(step.x), step.zeros)
    assert torch.equal(step.net(step.x), step.expected)


def test_a_copy_gets_back_the_forward_that_other_code_has_patched_in() -> None:
    step = Step()

    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    step.net.forward = doubled  # type: ignore[method-assign]
    with step.patched(PATCHES[0]):
        other = step.copied(copy.copy)
        kept = {"forward": vars(step.net)["forward"]}
    assert vars(other)["forward"] is vars(step.net)["forward"] is doubled
    # A dict of the user's is no module.
    assert kept["forward"] is not doubled
