"""Offloader: measured and planned steps, and the messages to the user."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
    """Training steps of a small network, each compared with plain training, bit for bit.

    Args:
        loss: Returns the loss of the network in the step of a given number.
        options: Arguments of `MemoryConfig` that replace the defaults of this class.
    """

    def __init__(self, loss: Loss, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4))
        )
        self.loss, self.logged, self.warned = loss, [], []
        defaults = {"budget": "1PiB", "saved_budget": 0.75, "actions": ["offload"], "min_size": 1}
        self.options = MemoryConfig(**{**defaults, **options})
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
        parameters = list(self.net.parameters())
        expected = [gradient.clone() for gradient in self.gradients(number)]
        with self.offloader.step(shape, parameters, lambda: parameters):
            actual = self.gradients(number)
        assert len(expected) == len(actual) > 0
        for expected_gradient, actual_gradient in zip(expected, actual, strict=True):
            assert torch.equal(expected_gradient, actual_gradient)

    def steps(self, count: int) -> Run:
        for number in range(count):
            self.step(number)
        return self

    @property
    def followed(self) -> int:
        """Number of steps that followed a plan."""
        return self.offloader.measurements.steps

    @property
    def mismatches(self) -> list[str]:
        return self.offloader.measurements.mismatches

    @property
    def plan(self) -> MemoryPlan:
        assert self.offloader.plan is not None
        return self.offloader.plan


def plain_loss(net: nn.Module, number: int) -> Tensor:
    return net(torch.randn(8, 16)).square().sum()


def reentrant_checkpoint_loss(net: nn.Module, number: int) -> Tensor:
    x = torch.randn(8, 16, requires_grad=True)
    x = checkpoint(net, x.sin(), use_reentrant=True)
    return checkpoint(net, x, use_reentrant=True).square().sum()


def gradient_penalty_loss(net: nn.Module, number: int) -> Tensor:
    x = torch.randn(8, 16, requires_grad=True)
    out = net(x).square().sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    return out + (gradient.norm(dim=1) - 1).square().sum()


def meta_learning_loss(net: nn.Module, number: int) -> Tensor:
    """Differentiate through inner steps, as in MAML (Finn et al., 2017)."""
    weights = dict(net.named_parameters())
    x, y = torch.randn(2, 8, 16)
    for _ in range(2):
        loss = (functional_call(net, weights, x) - y).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {
            name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)
        }
    return (functional_call(net, weights, y) - x).square().mean()


def loss_after_a_dropped_graph(net: nn.Module, number: int) -> Tensor:
    """Drop a graph early, as with the detached output of a generator; its input is saved anew."""
    x = torch.randn(8, 16)
    assert isinstance(net, nn.Sequential)
    fixed = net[0](x).detach()
    return (net(x) - fixed.sin()).square().sum()


def loss_of_a_view(net: nn.Module, number: int) -> Tensor:
    """Save a view of a few rows of a large tensor, which is offloaded alone."""
    x = torch.randn(40, 16, requires_grad=True)
    part = x.exp()[3:9]
    (gradient,) = torch.autograd.grad(part.sin().sum(), x, create_graph=True)
    return (net(part) * part.cos()).sum() + gradient.square().sum()


class Wide(nn.Module):
    """Module that saves more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.relu, self.out = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.relu(self.deep(x)).exp().sin())


def vmap_over_rows(net: Wide, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: net(row).sin())(x)


def vmap_over_factors(net: Wide, x: Tensor) -> Tensor:
    return torch.vmap(lambda k: net(x) * k)(torch.randn(2))


def vmap_over_weights(net: Wide, x: Tensor) -> Tensor:
    weights = {name: torch.stack([w, w.sin()]) for name, w in net.named_parameters()}
    return torch.vmap(lambda single: functional_call(net, single, x))(weights)


def dual_numbers(net: Wide, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(x, x.sin())))
        return torch.cat([y, tangent])


def jacobian_vector_product(net: Wide, x: Tensor) -> Tensor:
    return torch.cat(jvp(net, (x,), (x.sin(),)))


@pytest.mark.parametrize(
    "transform",
    [vmap_over_rows, vmap_over_factors, vmap_over_weights, dual_numbers, jacobian_vector_product],
)
def test_modules_are_not_patched_inside_transforms(
    transform: Callable[[Any, Tensor], Tensor],
) -> None:
    wide = Wide()
    options: dict[str, Any] = {"actions": ["reuse", "recompute"], "budget": "min"}
    run = Run(
        lambda net, number: transform(wide, net(torch.randn(64, 16))).square().sum(),
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
    [
        plain_loss,
        reentrant_checkpoint_loss,
        gradient_penalty_loss,
        meta_learning_loss,
        loss_after_a_dropped_graph,
        loss_of_a_view,
    ],
)
def test_steps_match_their_plan(loss: Loss, actions: list[str]) -> None:
    run = Run(loss, actions=actions).steps(9)
    assert run.mismatches == []
    assert run.followed >= 4
    assert any(decision.tier for decision in run.plan.decisions)


def loss_of_alternating_shapes(net: nn.Module, number: int) -> Tensor:
    """Use another batch size in every other step."""
    return net(torch.randn(8 if number % 2 else 12, 16)).square().sum()


def loss_with_equal_beginning(net: nn.Module, number: int) -> Tensor:
    """Save further tensors in every third step, which begins as the others do."""
    y = net(torch.randn(8, 16))
    return y.square().sum() if number % 3 else net(torch.cat([y, y])).exp().sum()


@pytest.mark.parametrize("loss", [loss_of_alternating_shapes, loss_with_equal_beginning])
def test_alternating_steps_get_a_plan_each(loss: Loss) -> None:
    run = Run(loss).steps(12)
    followed, mismatches = run.followed, list(run.mismatches)
    assert len(mismatches) <= 2
    for number in range(12, 18):
        run.step(number)
    assert run.followed == followed + 6
    assert run.mismatches == mismatches
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
    run = Run(plain_loss)
    for number in range(60):
        run.step(0, shape=number)
    (warning,) = run.warned
    assert "50 of the latest 50 steps were measured" in warning
    assert "pad the batches" in warning


def record_hooks(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that gets an entry whenever the offloader installs its hooks."""
    calls: list[object] = []
    hooks = run.offloader._engine.hooks

    def recorded_hooks(*args: Any) -> Any:
        calls.append(args)
        return hooks(*args)

    monkeypatch.setattr(run.offloader._engine, "hooks", recorded_hooks)
    return calls


def test_a_plan_that_keeps_everything_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(plain_loss, saved_budget=None).steps(2)
    assert run.plan.changes_nothing
    # The offloader watches a few more steps, because steps may alternate.
    run.steps(4)
    assert run.offloader.is_idle("one")
    assert not run.offloader.is_idle("another")
    calls = record_hooks(run, monkeypatch)
    run.steps(3)
    assert calls == []
    run.step(0, "another")
    assert len(calls) == 1
    first_line, second_line = run.logged
    assert "measuring the first" in first_line
    assert "later steps run without hooks and patches" in second_line
    assert "\n" not in second_line


def test_alternating_steps_become_idle_when_all_are_planned() -> None:
    run = Run(loss_of_alternating_shapes, saved_budget=None)
    for number in range(20):
        run.step(number)
    assert run.offloader.is_idle("one")


def test_measuring_is_logged_once() -> None:
    run = Run(plain_loss)
    run.step(0)
    run.step(0, "another")
    assert len(run.logged) == 1
    assert "slower than later steps" in run.logged[0]


@pytest.mark.parametrize("as_file", [False, True])
def test_a_given_plan_is_followed(as_file: bool, tmp_path: Path) -> None:
    first = Run(plain_loss).steps(5).plan
    plan: Any = first
    if as_file:
        plan = tmp_path / "plan.json"
        plan.write_text(first.to_json())
    run = Run(plain_loss, plan=plan).steps(4)
    assert run.followed == 4
    assert run.mismatches == []
    assert run.logged == []
    assert run.plan == first


def test_a_given_plan_with_patches_is_verified_and_followed() -> None:
    options = {"actions": ["recompute"]}
    first = Run(plain_loss, **options).steps(9).plan
    assert first.recompute or first.reuse
    run = Run(plain_loss, plan=first, **options).steps(4)
    # One step verifies that the modules compute the same bits.
    assert run.followed == 3
    assert run.mismatches == []


def test_a_given_plan_of_other_steps_is_dropped() -> None:
    other = Run(gradient_penalty_loss).steps(5).plan
    run = Run(plain_loss, plan=other).steps(6)
    assert len(run.mismatches) == 1
    assert run.followed == 4
    assert run.plan != other


def test_a_given_plan_that_keeps_everything_is_checked_first() -> None:
    first = Run(plain_loss, saved_budget=None).steps(3).plan
    run = Run(plain_loss, saved_budget=None, plan=first)
    run.steps(3)
    assert not run.offloader.is_idle("one")
    run.steps(1)
    assert run.offloader.is_idle("one")


@pytest.mark.parametrize("limit", [{"budget": 20_000}, {"saved_budget": 100}], ids=str)
def test_an_exceeded_budget_is_an_error_or_a_warning(limit: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        Run(plain_loss, actions=["compress"], **limit).steps(3)
    run = Run(plain_loss, actions=["compress"], on_over_budget="warn", **limit).steps(5)
    (warning,) = run.warned
    assert "must be at least" in warning
    assert "Training continues with the smallest peak that can be met." in warning


@pytest.mark.parametrize("actions", [["recompute"], ["recompute", "reuse"]], ids=str)
def test_patches_that_meet_the_budget_are_kept_without_a_warning(actions: list[str]) -> None:
    """Without patches, no plan meets this budget."""
    options: dict[str, Any] = {"actions": actions, "saved_budget": 0.7, "exact": False}
    run = Run(plain_loss, on_over_budget="warn", **options).steps(9)
    assert run.plan.recompute
    assert run.plan.saved_limit is not None
    assert run.plan.saved_peak <= run.plan.saved_limit
    assert run.warned == []


def loss_of_many_rows(net: nn.Module, number: int) -> Tensor:
    """Save so many activations that modules which run again lower the peak."""
    return net(torch.randn(256, 16)).square().sum()


def test_the_smaller_peak_wins_if_neither_plan_meets_the_budget() -> None:
    options: dict[str, Any] = {"actions": ["recompute"], "budget": 20_000, "exact": False}
    run = Run(loss_of_many_rows, on_over_budget="warn", **options).steps(9)
    # The planner warns of its prediction, and once more of the measured steps.
    assert len(run.warned) == 2
    assert all("must be at least" in warning for warning in run.warned)
    assert run.plan.recompute
    assert run.plan.peak < run.plan.plain_peak


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
    plan = Run(plain_loss).steps(5).plan
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
