"""Modules are changed only if they compute the same bits, unless the user does not mind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_dlres as dlres
from lightning_dlres.core._compat import is_in_backward
from lightning_dlres.memory.execute.bitwise_check import Audit, are_same
from lightning_dlres.memory.execute.reuse.dense import Linear
from lightning_dlres.memory.execute.reuse.formula import Backward
from lightning_dlres.memory.module_patches import without
from lightning_dlres.memory.profile.step_profile import Region, Reuse
from tests.support.memory_profiles import stack
from tests.support.offload_tasks import Regression, fit, require_same


class Other(nn.Module):
    """Computes something else in backward than in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).sigmoid().tanh().exp()
        return x.sigmoid() * (1.5 if is_in_backward() else 1.0)


class Noisy(Other):
    """Draws random numbers, which a second run must draw again."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).sigmoid().tanh().exp()
        return nn.functional.dropout(x).sigmoid() * torch.rand(())


def task(*layers: nn.Module) -> Regression:
    found = Regression("mlp")
    torch.manual_seed(1)
    found.net = nn.Sequential(nn.Linear(64, 64), *layers, nn.Linear(64, 8))
    for parameter in found.net.parameters():
        nn.init.normal_(parameter, std=0.1)
    return found


def loader(rows: int) -> DataLoader[Any]:
    torch.manual_seed(2)
    return DataLoader([torch.randn(rows, 64) for _ in range(12)], batch_size=None)  # type: ignore[arg-type]


def require_parity(
    make: Callable[[], Regression], rows: int, **options: Any
) -> dlres.ActivationOffload:
    """Train plainly and with the callback, compare, and return the callback."""
    callback = dlres.ActivationOffload("min", min_size=1, **options)
    require_same(fit(make(), loader(rows)), fit(make(), loader(rows), callback))
    assert callback.plan is not None
    return callback


def test_a_module_that_is_another_one_in_backward_never_runs_again() -> None:
    callback = require_parity(lambda: task(Other(), Noisy()), 512, actions=["recompute"])
    assert callback.plan is not None
    assert "net.1" not in callback.plan.recompute
    loose = dlres.ActivationOffload("min", min_size=1, actions=["recompute"], exact=False)
    fit(task(Other(), Noisy()), loader(512), loose)
    assert loose.plan is not None
    assert loose.plan.recompute == ("net.1",)


def test_a_module_with_random_numbers_runs_again() -> None:
    callback = require_parity(lambda: task(Noisy(), Noisy()), 512, actions=["recompute"])
    assert callback.plan is not None
    assert callback.plan.recompute == ("net.1",)


def off_by_one_bit(self: Linear, call: Backward) -> tuple[Tensor | None, ...]:
    found = _BACKWARD(self, call)
    if call.into is not None:
        call.into.view(torch.int32)[..., 0] ^= 1
    return found


_BACKWARD = Linear.backward


def test_a_layer_that_adds_up_otherwise_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linear, "backward", off_by_one_bit)
    callback = require_parity(lambda: task(nn.GELU()), 2048, actions=["reuse"])
    assert callback.plan is not None
    assert "net.2" not in callback.plan.reuse
    loose = dlres.ActivationOffload("min", min_size=1, actions=["reuse"], exact=False)
    fit(task(nn.GELU()), loader(2048), loose)
    assert loose.plan is not None
    assert "net.2" in loose.plan.reuse


def test_layers_that_add_up_alike_are_taken() -> None:
    callback = require_parity(lambda: task(nn.LayerNorm(64), nn.GELU()), 2048, actions=["reuse"])
    assert callback.plan is not None
    assert callback.plan.reuse == ("net.2", "net.3")


def test_what_an_audit_finds() -> None:
    audit = Audit()
    for name, is_same in (("a", True), ("b", False), ("b", True), ("c", True), ("c", False)):
        audit.note(name, is_same)
    assert audit.unlike({"a", "b", "c", "never"}) == {"b", "c"}
    assert audit.unseen({"a", "b", "c", "never"}) == {"never"}
    nan = torch.tensor([float("nan"), 0.0])
    assert are_same([nan, None], [nan.clone(), None])
    assert not are_same([torch.tensor(0.0)], [torch.tensor(-0.0)])
    assert not are_same([torch.zeros(2)], [torch.zeros(2, 1)])
    assert not are_same([None], [nan])
    assert not are_same([torch.zeros(2)], [torch.zeros(2, dtype=torch.int32)])


def test_a_profile_without_some_changes() -> None:
    import msgspec

    profile = msgspec.structs.replace(
        stack([1, 2]),
        regions=(
            Region(layer="a", data=(0,), seconds=0.0, entry=0),
            Region(layer="b", data=(1,), seconds=0.0, entry=1),
        ),
        reuses=(
            Reuse(layers=("a", "c"), saved_storage=0, at=3, nbytes=1),
            Reuse(layers=("d",), saved_storage=1, at=2, nbytes=1),
        ),
    )
    found = without(profile, {"c", "b"})
    assert [region.layer for region in found.regions] == ["a"]
    assert [reuse.layers for reuse in found.reuses] == [("d",)]


class Skips(Regression):
    """Has no loss in the first steps of a plan."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (3, 4) else loss


def test_a_layer_is_looked_at_when_it_is_there() -> None:
    def make() -> Regression:
        found = Skips("mlp")
        found.net = task(nn.GELU()).net
        return found

    callback = require_parity(make, 2048, actions=["reuse"])
    assert callback.plan is not None
    assert callback.plan.reuse == ("net.1", "net.2")


class Copying(Regression):
    """Makes a copy of itself in the first step, and uses vmap."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.copies = [copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))]
        several = torch.vmap(torch.sin)(batch * next(self.net.parameters()).sum())
        return super().training_step(batch, batch_idx) + several.mean()


def test_copies_from_a_measured_step_are_left_alone() -> None:
    def make() -> Copying:
        found = Copying("mlp")
        found.net = task(nn.GELU()).net
        return found

    plain, ours = make(), make()
    callback = dlres.ActivationOffload("min", min_size=1)
    require_same(fit(plain, loader(64)), fit(ours, loader(64), callback))
    for one in ours.copies:
        torch.testing.assert_close(one(torch.ones(2, 64)), ours.copies[0](torch.ones(2, 64)))
