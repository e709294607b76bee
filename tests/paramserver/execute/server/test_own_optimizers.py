"""Options and optimizers of the user's own: as in plain training, or refused at the start."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.paramserver.execute.server.optimizers import (
    ServerOptimizers,
    group_options,
    optimizer_name,
    register_server_optimizer,
    wire_options,
)
from lightning_dlres.paramserver.protocol import OptimizerSetup
from tests.support.paramserver_shards import make_setup, push_of, small_keys, started_shard


class OwnRate(float):
    """Number of a class of the user's own."""


@pytest.mark.parametrize(
    "lr", [np.float64(0.5), np.float32(0.5), np.array(0.5), OwnRate(0.5), torch.tensor(0.5)]
)
def test_a_schedule_may_use_any_class_of_numbers(lr: Any) -> None:
    options = wire_options({"lr": lr, "betas": (lr, lr)}, {"lr": 0.1, "betas": (0.9, 0.9)})
    assert options == {"lr": 0.5, "betas": (0.5, 0.5)}
    assert type(options["lr"]) is float
    assert {type(beta) for beta in options["betas"]} == {float}


class _Own(torch.optim.Optimizer):
    """SGD whose update is the rate of the group times a factor that only some groups have."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.prepare(group, self.state[parameter], parameter)
                with torch.no_grad():
                    rate = group["lr"] * group.get("factor", 1.0)
                    parameter.sub_(parameter.grad, alpha=rate)

    def prepare(self, group: Any, state: Any, parameter: Tensor) -> None:
        """Change the group or the state before the update."""


@register_server_optimizer
class FactorOptimizer(_Own):
    """Optimizer whose groups have an option that is not among the defaults."""


@register_server_optimizer
class CountingOptimizer(_Own):
    """Optimizer that counts its steps in its group."""

    def prepare(self, group: Any, state: Any, parameter: Tensor) -> None:
        group["step"] = group.get("step", 0) + 1


@register_server_optimizer
class TextOptimizer(_Own):
    """Optimizer with text in its state."""

    def prepare(self, group: Any, state: Any, parameter: Tensor) -> None:
        state["phase"] = "warm"


@register_server_optimizer
class ListOptimizer(_Own):
    """Optimizer with a list of tensors in its state."""

    def prepare(self, group: Any, state: Any, parameter: Tensor) -> None:
        state["moments"] = [torch.zeros_like(parameter)]


@register_server_optimizer
class MaskOptimizer(_Own):
    """Optimizer with a tensor of booleans in its state."""

    def prepare(self, group: Any, state: Any, parameter: Tensor) -> None:
        state["mask"] = parameter > 0


def servers_of(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> tuple[ServerOptimizers, Any, nn.Parameter]:
    """Return optimizers for one parameter of zeros, its key and the parameter."""
    key, parameter = small_keys([3])[0], nn.Parameter(torch.zeros(3), False)
    setup = OptimizerSetup(name=optimizer_name(kind), groups=[options])
    return ServerOptimizers([setup], [key], [parameter]), key, parameter


def test_an_option_that_only_a_group_has_counts() -> None:
    optimizer = FactorOptimizer([{"params": [nn.Parameter(torch.zeros(3))], "factor": 0.25}])
    optimizer.param_groups[0]["note"] = object()
    options = group_options(optimizer, 0)
    assert options == {"lr": 1.0, "factor": 0.25}
    servers, key, parameter = servers_of(FactorOptimizer, options)
    parameter.grad = torch.ones(3)
    servers.update(key, parameter, options)
    assert parameter.tolist() == [-0.25] * 3


def test_other_options_of_a_group_of_torch_are_not_sent() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.5)
    optimizer.param_groups[0]["factor"] = 0.25
    assert "factor" not in group_options(optimizer, 0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (CountingOptimizer, "changes 'step' in its group, which servers do not keep. Let it count"),
        (TextOptimizer, "numbers, for a parameter server, got 'warm' in 'phase'"),
        (ListOptimizer, "in 'moments'"),
        (MaskOptimizer, "got a tensor of torch.bool in 'mask'"),
    ],
)
def test_what_servers_cannot_keep_is_refused_at_the_start(
    kind: type[torch.optim.Optimizer], words: str
) -> None:
    with pytest.raises(ProtocolError, match=re.escape(words)):
        servers_of(kind, {"lr": 1.0})


def test_an_optimizer_that_needs_a_closure_cannot_be_registered() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer must be a class whose step\(\) needs no closure"
    ):
        register_server_optimizer(torch.optim.LBFGS)


def test_arguments_without_defaults_are_named() -> None:
    @register_server_optimizer
    class NeedsRate(_Own):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)

    with pytest.raises(ProtocolError, match="Give its other arguments defaults"):
        servers_of(NeedsRate, {"lr": 1.0})


@register_server_optimizer
class LastGradientOptimizer(_Own):
    """Optimizer that moves by the gradient and that of the step before, which it keeps uncopied."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                last = state.get("last", torch.zeros_like(gradient))
                state["last"] = gradient
                with torch.no_grad():
                    parameter.sub_(gradient + last, alpha=group["lr"])


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_an_optimizer_may_keep_the_gradient(consistency: str) -> None:
    keys = small_keys([3, 3, 3])
    setup = make_setup(keys, 1, consistency=consistency, optimizer=LastGradientOptimizer)
    shard = started_shard(setup)
    for number in range(1, 5):
        for key in keys:
            shard.push(*push_of(key, 0, number, 10.0 ** (number + key.index)))
    for key in keys:
        moved = sum(10.0 ** (number + key.index) for number in (1, 1, 2, 2, 3, 3, 4))
        assert torch.equal(shard.states[key.index].parameter, torch.full((3,), -moved))
