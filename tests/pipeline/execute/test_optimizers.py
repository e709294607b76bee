"""Only optimizers that update each parameter independently may run on stages."""

from __future__ import annotations

import contextlib
import inspect
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dlres.core import rng
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.execute.optimizers import require_separable, set_state_device

SHIPPED = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
)
# LBFGS evaluates the loss over all parameters.
REFUSED = {"LBFGS"}


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5, 2))]


def assert_accepted(optimizer: Optimizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_separable(optimizer, 2)


@pytest.mark.parametrize("name", [name for name in SHIPPED if name not in REFUSED])
def test_optimizers_of_torch_are_accepted(name: str) -> None:
    assert_accepted(getattr(torch.optim, name)(parameters(), lr=0.01))


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LBFGS needs a closure.*AdamW"):
        require_separable(torch.optim.LBFGS(parameters()), 2)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"lr": torch.tensor(0.01), "weight_decay": 0.1}),
        (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
        (torch.optim.Adam, {"differentiable": False, "betas": (0.5, 0.9)}),
    ],
)
def test_options_are_part_of_the_trial(kind: type[Optimizer], options: dict[str, Any]) -> None:
    assert_accepted(kind(parameters(), **{"lr": 0.01, **options}))


def test_the_trial_does_not_change_the_optimizer() -> None:
    values = parameters()
    before = [p.detach().clone() for p in values]
    optimizer = torch.optim.AdamW(values, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert_accepted(optimizer)
    assert all(map(torch.equal, values, before))
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == values
    assert all(p.grad is None for p in values)


class NormalizedSGD(Optimizer):
    """An optimizer that divides by the norm over all parameters."""

    def __init__(self, params: Any, lr: float = 0.1, enabled: bool = True) -> None:
        super().__init__(params, {"lr": lr, "enabled": enabled})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            norm = nn.utils.get_total_norm(gradients) if group["enabled"] else 1.0
            for p in group["params"]:
                p -= group["lr"] * p.grad / norm


class GlobalClip(NormalizedSGD):
    """An optimizer that clips to a norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


class SharpnessAware(torch.optim.SGD):
    """Two gradients per step: the second at parameters moved along the first."""

    norm_of_all = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        all_parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in all_parameters]).norm()
        moves = [p.grad / (norm if self.norm_of_all else p.grad.norm()) for p in all_parameters]
        for p, move in zip(all_parameters, moves, strict=True):
            p += move
        with torch.enable_grad():
            closure()
        for p, move in zip(all_parameters, moves, strict=True):
            p -= move
        super().step()


class SharpnessAwareByParameter(SharpnessAware):
    norm_of_all = False


class WithBase(Optimizer):
    """An optimizer around another one, whose constructor has an argument without a default.

    Args:
        norm_of_all: Whether gradients are divided by their norm over all parameters.
    """

    def __init__(self, params: Any, base: type[Optimizer], norm_of_all: bool, **options: Any):
        super().__init__(params, options)
        self.base = base(self.param_groups, **options)
        self.param_groups, self.norm_of_all, self.calls = self.base.param_groups, norm_of_all, []

    def step(self, closure: Any = None) -> None:
        self.calls.append(1)
        used = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in used]).norm()
        for p in used:
            p.grad /= norm if self.norm_of_all else p.grad.norm()
        self.base.step(closure)


def test_a_copy_of_an_optimizer_is_tried_if_its_class_cannot_be() -> None:
    # Three parameters in two groups.
    groups = [{"params": parameters()}, {"params": [nn.Parameter(torch.randn(2))], "lr": 0.2}]
    optimizer = WithBase(groups, torch.optim.SGD, False, lr=0.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the original"))
    before = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    assert_accepted(optimizer)
    assert all(map(torch.equal, before, (p for g in optimizer.param_groups for p in g["params"])))
    assert not optimizer.calls
    assert not optimizer.base.state
    assert scheduler.get_last_lr() == [0.0, 0.2]
    with pytest.raises(ConfigError, match="WithBase computes something over all"):
        require_separable(WithBase(groups, torch.optim.SGD, True, lr=0.1), 2)


def test_an_optimizer_that_calls_a_closure_is_tried_with_one() -> None:
    assert_accepted(SharpnessAwareByParameter(parameters(), lr=0.1))


class Lookahead(Optimizer):
    """A wrapper of another optimizer, which calls no constructor of its class."""

    def __init__(self, inner: Optimizer) -> None:
        self.param_groups, self.state, self.defaults = (
            inner.param_groups,
            inner.state,
            inner.defaults,
        )
        self._optimizer_step_post_hooks = {}  # type: ignore[assignment]


def test_a_wrapper_that_takes_no_hooks_is_refused() -> None:
    with pytest.raises(ConfigError, match="Lookahead must be an optimizer whose constructor"):
        require_separable(Lookahead(torch.optim.SGD(parameters(), lr=0.1)), 2)


@pytest.mark.parametrize("kind", [NormalizedSGD, GlobalClip, SharpnessAware])
def test_optimizers_that_compute_over_all_parameters_are_refused(kind: type[Optimizer]) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__} computes something over all"):
        require_separable(kind(parameters()), 2)  # type: ignore[call-arg]


def test_an_option_can_make_an_optimizer_separable() -> None:
    assert_accepted(NormalizedSGD(parameters(), enabled=False))


class NeedsModel(Optimizer):
    """An optimizer that needs more than parameters to be made."""

    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params, {"lr": 0.1})


def test_an_optimizer_that_cannot_be_made_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"A trial of NeedsModel failed.*TypeError"):
        require_separable(NeedsModel(parameters(), nn.Linear(1, 1)), 2)


class Failing(Optimizer):
    """An optimizer that fails in every step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        raise ValueError("not today")


def test_an_optimizer_that_fails_in_the_trial_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="ValueError: not today"):
        require_separable(Failing(parameters()), 2)


def test_state_is_moved_and_step_counts_are_not() -> None:
    (p, _), meta = parameters(), torch.device("meta")
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    set_state_device(optimizer, meta)
    state = optimizer.state[p]
    assert {key: value.device.type for key, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
    moved: Tensor = state["exp_avg"]
    set_state_device(optimizer, meta)
    assert optimizer.state[p]["exp_avg"] is moved


def state_after_step(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer's only parameter after one step."""
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return dict(optimizer.state[parameter])


@pytest.mark.parametrize("name", ["Adafactor", "NAdam", "ASGD"])
def test_state_of_other_shapes_is_moved(name: str) -> None:
    """Adafactor keeps a row and a column of variances for every matrix."""
    optimizer = getattr(torch.optim, name)(parameters()[:1])
    before = state_after_step(optimizer)
    set_state_device(optimizer, torch.device("meta"))
    (state,) = optimizer.state.values()
    assert any(t.shape != (3, 4) for key, t in before.items() if key != "step")
    assert {key for key, t in state.items() if not t.is_meta} == {"step"}


def test_a_fused_step_count_is_moved() -> None:
    optimizer = torch.optim.Adam(parameters()[:1], fused=True)
    state_after_step(optimizer)
    set_state_device(optimizer, torch.device("meta"))
    (state,) = optimizer.state.values()
    assert all(tensor.is_meta for tensor in state.values())


def test_nested_state_is_moved() -> None:
    optimizer = torch.optim.SGD(parameters()[:1])
    (parameter,) = optimizer.param_groups[0]["params"]
    state = optimizer.state[parameter]
    state.update(factors=[torch.ones(3, 3), torch.ones(4, 4)], last={"norm": torch.ones(())})
    state["name"] = "a"
    set_state_device(optimizer, torch.device("meta"))
    assert all(tensor.is_meta for tensor in (*state["factors"], state["last"]["norm"]))
    assert state["name"] == "a"


def test_the_step_count_of_a_scalar_parameter_is_not_moved() -> None:
    parameter = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.tensor(1.0)
    optimizer.step()
    set_state_device(optimizer, torch.device("meta"))
    state = optimizer.state[parameter]
    assert state["exp_avg"].device.type == "meta"
    assert state["step"].device.type == "cpu"


# --- Optimizers that a simple trial would misjudge.


@pytest.mark.parametrize("lr", [0.0, 1e-9])
def test_a_learning_rate_of_almost_zero_does_not_hide_the_fault(lr: float) -> None:
    optimizer = NormalizedSGD(parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10) + lr)
    with pytest.raises(ConfigError):
        require_separable(optimizer, 2)


def test_one_stage_may_have_an_optimizer_over_all_parameters() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_separable(NormalizedSGD(parameters()), 1)
    with pytest.raises(ConfigError, match="needs a closure"):
        require_separable(torch.optim.LBFGS(parameters()), 1)


def test_every_group_is_tried() -> None:
    one, two = parameters()
    groups = [{"params": [one], "enabled": False}, {"params": [two], "enabled": True}]
    with pytest.raises(ConfigError):
        require_separable(NormalizedSGD(groups), 2)


class Noisy(NormalizedSGD):
    """An optimizer that adds noise to every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            # Numbers for all parameters, then for all again.
            for p in group["params"] * 2:
                p += self.noise(p)

    def noise(self, p: Tensor) -> Tensor:
        return torch.randn_like(p)


class NoisyFromNumPy(Noisy):
    def noise(self, p: Tensor) -> Tensor:
        return torch.from_numpy(np.random.standard_normal(p.shape)).float()


class NoisyFromPython(Noisy):
    def noise(self, p: Tensor) -> Tensor:
        return torch.full_like(p, random.random())


NOISY = [Noisy, NoisyFromNumPy, NoisyFromPython]


@pytest.mark.parametrize("kind", NOISY)
def test_an_optimizer_may_draw_random_numbers(kind: type[Noisy]) -> None:
    assert_accepted(kind(parameters(), enabled=False))


@pytest.mark.parametrize("kind", NOISY)
def test_random_numbers_do_not_hide_the_fault(kind: type[Noisy]) -> None:
    with pytest.raises(ConfigError, match="computes something over all parameters"):
        require_separable(kind(parameters()), 2)


@pytest.mark.parametrize(
    "options", [{"weight_decay": 1e20}, {"weight_decay": 1e20, "foreach": True}]
)
def test_updates_to_nan_are_independent(options: dict[str, Any]) -> None:
    assert_accepted(torch.optim.SGD(parameters(), **options))


@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.parametrize("enabled", [False, True])
def test_the_trial_does_not_change_the_global_random_state(
    kind: type[Noisy], enabled: bool
) -> None:
    optimizer, before = kind(parameters(), enabled=enabled), rng.snapshot()
    with contextlib.suppress(ConfigError):
        require_separable(optimizer, 2)
    after = rng.snapshot()
    assert torch.equal(after["torch"], before["torch"])
    assert torch.equal(after["python"][1], before["python"][1])
    assert torch.equal(after["numpy"][0], before["numpy"][0])
    assert after["numpy"][1:] == before["numpy"][1:]


def test_state_of_weights_of_other_stages_stays_without_values() -> None:
    weight = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {"slow": weight.detach().clone(), "steps": [3]}
    set_state_device(optimizer, torch.device("cpu"))
    assert optimizer.state[weight]["slow"].is_meta
    assert optimizer.state[weight]["steps"] == [3]
