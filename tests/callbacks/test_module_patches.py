"""Module patches: only modules that compute the same bits are patched, unless exact=False."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_dlres as dlres
from lightning_dlres.core._compat import is_in_backward
from lightning_dlres.memory.execute.bitwise_check import BitwiseCheck, are_same
from lightning_dlres.memory.execute.reuse.dense import LinearFormula
from lightning_dlres.memory.execute.reuse.formula import BackwardCall
from lightning_dlres.memory.module_patches import without_patches_of
from lightning_dlres.memory.profile.step_profile import Region, Reuse
from tests.support.memory_profiles import stack
from tests.support.offload_tasks import Regression, fit, require_same_weights


class DiffersInBackward(nn.Module):
    """Module that computes something else in backward than in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).sigmoid().tanh().exp()
        return x.sigmoid() * (1.5 if is_in_backward() else 1.0)


class Noisy(DiffersInBackward):
    """Module that draws random numbers, which a second run must repeat."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).sigmoid().tanh().exp()
        return nn.functional.dropout(x).sigmoid() * torch.rand(())


def task(*layers: nn.Module) -> Regression:
    regression = Regression("mlp")
    torch.manual_seed(1)
    regression.net = nn.Sequential(nn.Linear(64, 64), *layers, nn.Linear(64, 8))
    for parameter in regression.net.parameters():
        nn.init.normal_(parameter, std=0.1)
    return regression


def loader(rows: int) -> DataLoader[Any]:
    torch.manual_seed(2)
    return DataLoader([torch.randn(rows, 64) for _ in range(12)], batch_size=None)  # type: ignore[arg-type]


def require_parity(
    make: Callable[[], Regression], rows: int, **options: Any
) -> dlres.ActivationOffload:
    """Train plainly and with the callback, compare, and return the callback."""
    callback = dlres.ActivationOffload(budget="min", min_size=1, **options)
    require_same_weights(fit(make(), loader(rows)), fit(make(), loader(rows), callback))
    assert callback.plan is not None
    return callback


def test_a_module_that_computes_differently_in_backward_is_not_recomputed() -> None:
    callback = require_parity(
        lambda: task(DiffersInBackward(), Noisy()), 512, actions=["recompute"]
    )
    assert callback.plan is not None
    assert "net.1" not in callback.plan.recompute
    loose = dlres.ActivationOffload(budget="min", min_size=1, actions=["recompute"], exact=False)
    fit(task(DiffersInBackward(), Noisy()), loader(512), loose)
    assert loose.plan is not None
    assert loose.plan.recompute == ("net.1",)


def test_a_module_with_random_numbers_is_recomputed() -> None:
    callback = require_parity(lambda: task(Noisy(), Noisy()), 512, actions=["recompute"])
    assert callback.plan is not None
    assert callback.plan.recompute == ("net.1",)


def off_by_one_bit(self: LinearFormula, call: BackwardCall) -> tuple[Tensor | None, ...]:
    gradients = _BACKWARD(self, call)
    if call.out is not None:
        call.out.view(torch.int32)[..., 0] ^= 1
    return gradients


_BACKWARD = LinearFormula.backward


def test_a_layer_with_different_rounding_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearFormula, "backward", off_by_one_bit)
    callback = require_parity(lambda: task(nn.GELU()), 2048, actions=["reuse"])
    assert callback.plan is not None
    assert "net.2" not in callback.plan.reuse
    loose = dlres.ActivationOffload(budget="min", min_size=1, actions=["reuse"], exact=False)
    fit(task(nn.GELU()), loader(2048), loose)
    assert loose.plan is not None
    assert "net.2" in loose.plan.reuse


def test_layers_with_equal_rounding_are_patched() -> None:
    callback = require_parity(lambda: task(nn.LayerNorm(64), nn.GELU()), 2048, actions=["reuse"])
    assert callback.plan is not None
    assert callback.plan.reuse == ("net.2", "net.3")


def test_a_bitwise_check_tells_differing_and_unchecked_modules() -> None:
    bitwise_check = BitwiseCheck()
    for name, is_same in (("a", True), ("b", False), ("b", True), ("c", True), ("c", False)):
        bitwise_check.record(name, is_same)
    assert bitwise_check.differing({"a", "b", "c", "never"}) == {"b", "c"}
    assert bitwise_check.unchecked({"a", "b", "c", "never"}) == {"never"}
    nan = torch.tensor([float("nan"), 0.0])
    assert are_same([nan, None], [nan.clone(), None])
    assert not are_same([torch.tensor(0.0)], [torch.tensor(-0.0)])
    assert not are_same([torch.zeros(2)], [torch.zeros(2, 1)])
    assert not are_same([None], [nan])
    assert not are_same([torch.zeros(2)], [torch.zeros(2, dtype=torch.int32)])


def test_a_profile_without_the_patches_of_some_modules() -> None:
    profile = msgspec.structs.replace(
        stack([1, 2]),
        regions=(
            Region(layer="a", storages=(0,), seconds=0.0, entry=0),
            Region(layer="b", storages=(1,), seconds=0.0, entry=1),
        ),
        reuses=(
            Reuse(layers=("a", "c"), storage=0, overwritten_at=3, nbytes=1),
            Reuse(layers=("d",), storage=1, overwritten_at=2, nbytes=1),
        ),
    )
    remaining = without_patches_of(profile, {"c", "b"})
    assert [region.layer for region in remaining.regions] == ["a"]
    assert [reuse.layers for reuse in remaining.reuses] == [("d",)]


class Skips(Regression):
    """Task without a loss in the first steps of a plan."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (3, 4) else loss


def test_a_layer_is_verified_in_a_step_that_runs_it() -> None:
    def make() -> Regression:
        regression = Skips("mlp")
        regression.net = task(nn.GELU()).net
        return regression

    callback = require_parity(make, 2048, actions=["reuse"])
    assert callback.plan is not None
    assert callback.plan.reuse == ("net.1", "net.2")


class Copying(Regression):
    """Task that copies itself in the first step, and uses vmap."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.copies = [copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))]
        several = torch.vmap(torch.sin)(batch * next(self.net.parameters()).sum())
        return super().training_step(batch, batch_idx) + several.mean()


def test_copies_of_a_patched_model_run_their_own_forward() -> None:
    def make() -> Copying:
        regression = Copying("mlp")
        regression.net = task(nn.GELU()).net
        return regression

    plain, ours = make(), make()
    callback = dlres.ActivationOffload(budget="min", min_size=1)
    require_same_weights(fit(plain, loader(64)), fit(ours, loader(64), callback))
    for network in ours.copies:
        torch.testing.assert_close(network(torch.ones(2, 64)), ours.copies[0](torch.ones(2, 64)))
