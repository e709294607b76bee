"""Offloader: measured and planned steps, and the messages to the user."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, jvp
from torch.utils.checkpoint import checkpoint

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.memory.config import MemoryConfig
from lightning_dlres.memory.offloader import Offloader
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.profile.meter import ProfilerMeter

CPU = torch.device("cpu")
Loss = Callable[[nn.Module, int], Tensor]


class Run:
    """Training steps of a small network, each compared with plain training, bit for bit."""

    def __init__(self, loss: Loss, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4))
        )
        self.loss, self.logged, self.warned = loss, [], []
        given = {"budget": "1PiB", "saved_budget": 0.75, "actions": ["offload"], "min_size": 1}
        self.options = MemoryConfig(**{**given, **options})
        self.offloader = Offloader(
            self.net,
            self.options.for_device(CPU),
            CPU,
            log=self.logged.append,
            warn=self.warned.append,
            given_plan=self.options.load_plan(),
        )

    def gradients(self, number: int) -> list[Tensor]:
        torch.manual_seed(number)
        self.net.zero_grad()
        self.loss(self.net, number).backward()
        return [p.grad for p in self.net.parameters() if p.grad is not None]

    def step(self, number: int, shape: object = "one") -> None:
        stays = list(self.net.parameters())
        expected = [gradient.clone() for gradient in self.gradients(number)]
        with self.offloader.step(shape, stays, lambda: stays):
            found = self.gradients(number)
        assert len(expected) == len(found) > 0
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)

    def steps(self, count: int) -> Run:
        for number in range(count):
            self.step(number)
        return self

    @property
    def followed(self) -> int:
        return self.offloader.measurements.steps

    @property
    def mismatches(self) -> list[str]:
        return self.offloader.measurements.mismatches

    @property
    def plan(self) -> MemoryPlan:
        assert self.offloader.plan is not None
        return self.offloader.plan


def plainly(net: nn.Module, number: int) -> Tensor:
    return net(torch.randn(8, 16)).square().sum()


def with_reentrant_checkpoints(net: nn.Module, number: int) -> Tensor:
    x = torch.randn(8, 16, requires_grad=True)
    x = checkpoint(net, x.sin(), use_reentrant=True)
    return checkpoint(net, x, use_reentrant=True).square().sum()


def with_gradient_penalty(net: nn.Module, number: int) -> Tensor:
    x = torch.randn(8, 16, requires_grad=True)
    out = net(x).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + (slope.norm(dim=1) - 1).square().sum()


def with_inner_steps(net: nn.Module, number: int) -> Tensor:
    """Train inner steps as in MAML (Finn et al., 2017)."""
    weights = dict(net.named_parameters())
    x, y = torch.randn(2, 8, 16)
    for _ in range(2):
        loss = (functional_call(net, weights, x) - y).square().mean()
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
    return (functional_call(net, weights, y) - x).square().mean()


def of_a_part(net: nn.Module, number: int) -> Tensor:
    """Save a small part of a large tensor, which moves alone, and tensors made from it."""
    x = torch.randn(40, 16, requires_grad=True)
    part = x.exp()[3:9]
    (slope,) = torch.autograd.grad(part.sin().sum(), x, create_graph=True)
    return (net(part) * part.cos()).sum() + slope.square().sum()


class Wide(nn.Module):
    """Module that saves more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.relu, self.out = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.relu(self.deep(x)).exp().sin())


def of_rows(net: Wide, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: net(row).sin())(x)


def of_closures(net: Wide, x: Tensor) -> Tensor:
    return torch.vmap(lambda k: net(x) * k)(torch.randn(2))


def of_weights(net: Wide, x: Tensor) -> Tensor:
    weights = {name: torch.stack([w, w.sin()]) for name, w in net.named_parameters()}
    return torch.vmap(lambda some: functional_call(net, some, x))(weights)


def with_forward_derivatives(net: Wide, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        y, slope = forward_ad.unpack_dual(net(forward_ad.make_dual(x, x.sin())))
        return torch.cat([y, slope])


def with_pushed_forward(net: Wide, x: Tensor) -> Tensor:
    return torch.cat(jvp(net, (x,), (x.sin(),)))


@pytest.mark.parametrize(
    "way",
    [of_rows, of_closures, of_weights, with_forward_derivatives, with_pushed_forward],
)
def test_modules_are_not_patched_inside_transforms(way: Callable[[Any, Tensor], Tensor]) -> None:
    wide = Wide()
    options: dict[str, Any] = {"actions": ["reuse", "recompute"], "budget": "min"}
    run = Run(
        lambda net, number: way(wide, net(torch.randn(64, 16))).square().sum(),
        **options,
        exact=False,
        on_over_budget="warn",
    )
    run.net.add_module("wide", nn.Identity())
    run.net.wide.inner = wide  # type: ignore[assignment]
    run.steps(7)
    assert run.followed >= 3
    assert not any(name.startswith("wide.") for name in (*run.plan.recompute, *run.plan.reuse))


@pytest.mark.parametrize("actions", [["offload"], ["compress", "offload", "reuse"]], ids=str)
@pytest.mark.parametrize(
    "loss",
    [plainly, with_reentrant_checkpoints, with_gradient_penalty, with_inner_steps, of_a_part],
)
def test_steps_match_their_plan(loss: Loss, actions: list[str]) -> None:
    run = Run(loss, actions=actions).steps(9)
    assert run.mismatches == []
    assert run.followed >= 4
    assert any(decision.tier for decision in run.plan.decisions)


def in_turns(net: nn.Module, number: int) -> Tensor:
    return net(torch.randn(8 if number % 2 else 12, 16)).square().sum()


def alike_at_first(net: nn.Module, number: int) -> Tensor:
    y = net(torch.randn(8, 16))
    return y.square().sum() if number % 3 else net(torch.cat([y, y])).exp().sum()


@pytest.mark.parametrize("loss", [in_turns, alike_at_first])
def test_alternating_steps_get_a_plan_each(loss: Loss) -> None:
    run = Run(loss).steps(12)
    followed, unlike = run.followed, len(run.mismatches)
    for number in range(12, 18):
        run.step(number)
    assert run.followed == followed + 6
    assert len(run.mismatches) == unlike <= 2
    assert run.warned == []


def test_a_different_first_step_is_no_mismatch() -> None:
    run = Run(lambda net, n: net(torch.randn(8 + 4 * (n == 0), 16)).square().sum()).steps(10)
    assert run.mismatches == []
    assert run.followed == 7


def test_ever_changing_steps_stop_the_measuring_with_a_warning() -> None:
    run = Run(lambda net, n: net(torch.randn(4 + n, 16)).square().sum()).steps(20)
    followed = run.followed
    assert followed > 0
    (warning,) = run.warned
    assert "keep saving different tensors" in warning
    for number in range(20, 24):
        run.step(number)
    assert run.followed == followed + 4
    assert len(run.warned) == 1


def test_ever_new_batch_shapes_give_a_warning() -> None:
    run = Run(plainly)
    for number in range(60):
        run.step(0, shape=number)
    (warning,) = run.warned
    assert "50 of the latest 50 steps were measured" in warning
    assert "pad the batches" in warning


@contextmanager
def watched_hooks(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    seen: list[object] = []
    made = run.offloader._engine.hooks
    monkeypatch.setattr(
        run.offloader._engine, "hooks", lambda *args: (seen.append(args), made(*args))[1]
    )
    yield seen


def test_a_plan_that_keeps_everything_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(plainly, saved_budget=None).steps(2)
    assert run.plan.changes_nothing
    # Steps may alternate, so a few more are watched.
    run.steps(4)
    assert run.offloader.is_idle("one")
    assert not run.offloader.is_idle("another")
    with watched_hooks(run, monkeypatch) as seen:
        run.steps(3)
        assert seen == []
        run.step(0, "another")
        assert len(seen) == 1
    measuring, nothing = run.logged
    assert "measuring the first" in measuring
    assert "later steps run without hooks and patches" in nothing
    assert "\n" not in nothing


def test_alternating_steps_become_idle_when_all_are_planned() -> None:
    run = Run(in_turns, saved_budget=None)
    for number in range(20):
        run.step(number)
    assert run.offloader.is_idle("one")


def test_measuring_is_logged_once() -> None:
    run = Run(plainly)
    run.step(0)
    run.step(0, "another")
    assert len(run.logged) == 1
    assert "slower than later steps" in run.logged[0]


@pytest.mark.parametrize("as_file", [False, True])
def test_a_given_plan_is_followed(as_file: bool, tmp_path: Path) -> None:
    first = Run(plainly).steps(5).plan
    plan: Any = first
    if as_file:
        plan = tmp_path / "plan.json"
        plan.write_text(first.to_json())
    run = Run(plainly, plan=plan).steps(4)
    assert run.followed == 4
    assert run.mismatches == []
    assert run.logged == []
    assert run.plan == first


def test_a_given_plan_with_patches_is_verified_and_followed() -> None:
    options = {"actions": ["recompute"]}
    first = Run(plainly, **options).steps(9).plan
    assert first.recompute or first.reuse
    run = Run(plainly, plan=first, **options).steps(4)
    # One step verifies that the modules compute the same bits.
    assert run.followed == 3
    assert run.mismatches == []


def test_a_given_plan_of_other_steps_is_dropped() -> None:
    other = Run(with_gradient_penalty).steps(5).plan
    run = Run(plainly, plan=other).steps(6)
    assert len(run.mismatches) == 1
    assert run.followed == 4
    assert run.plan != other


def test_a_given_plan_that_keeps_everything_is_checked_first() -> None:
    first = Run(plainly, saved_budget=None).steps(3).plan
    run = Run(plainly, saved_budget=None, plan=first)
    run.steps(3)
    assert not run.offloader.is_idle("one")
    run.steps(1)
    assert run.offloader.is_idle("one")


@pytest.mark.parametrize("limit", [{"budget": 20_000}, {"saved_budget": 100}], ids=str)
def test_an_exceeded_budget_is_an_error_or_a_warning(limit: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        Run(plainly, actions=["compress"], **limit).steps(3)
    run = Run(plainly, actions=["compress"], on_over_budget="warn", **limit).steps(5)
    (warning,) = run.warned
    assert "must be at least" in warning
    assert "Training continues with the smallest peak that can be met." in warning


def test_shares_in_percent() -> None:
    for budget in ("50%", " 50 % ", 0.5, "0.5"):
        assert MemoryConfig(saved_budget=budget).for_device(CPU).saved_limit == 0.5
    for bad in ("0%", "101%", "-5%", "%", "nan%"):
        with pytest.raises(ConfigError, match=r"budget must be bytes, or a share"):
            MemoryConfig(budget=bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_over_budget": "ignore"}, "on_over_budget must be 'error' or 'warn', got 'ignore'"),
        ({"plan": 3}, "plan must be a MemoryPlan, or the path"),
        ({"plan": "/no/such/plan.json"}, "plan must be the path of a file"),
    ],
    ids=str,
)
def test_bad_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryConfig(**options)


def test_a_plan_with_unavailable_tiers_is_refused() -> None:
    plan = Run(plainly).steps(5).plan
    with pytest.raises(ConfigError, match="plan must use only the tiers available here"):
        MemoryConfig(actions=["compress"], plan=plan).for_device(CPU)


def test_one_thread_at_a_time_profiles_memory() -> None:
    """Torch ends the process when a second profiler starts."""
    one, other = ProfilerMeter(), ProfilerMeter()

    def count() -> None:
        with other.running(list):
            torch.ones(8).sum()

    with one.running(list):
        thread = threading.Thread(target=count)
        thread.start()
        thread.join()
    assert (one.was_busy, other.was_busy) == (False, True)
    count()
    assert not other.was_busy
