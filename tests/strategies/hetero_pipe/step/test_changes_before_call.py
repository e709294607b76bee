"""State that the pipelined module reads and a step changes before its call is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_dlres.pipeline.plan.plan import PipelinePlan
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    differences_in,
    expect_refusal,
    no_differences_in,
)

OPTIONS: dict[str, Any] = {"plan": None}


class Scaled(nn.Module):
    """A layer whose factor lies in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.options = {"factor": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.options["factor"]


class Configuration:
    """Settings of a model, as an object of a library."""

    __module__ = "transformers.configuration_utils"

    def __init__(self) -> None:
        self.bias, self.factors = 0.0, [1.0]


class OwnForward(nn.Module):
    """A module that reads its own attributes, buffer and options between its submodules."""

    scale: Tensor

    def __init__(self, options: dict[str, float]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 12), Scaled(), nn.Linear(12, 5)
        self.temperature, self.options, self.config = 1.0, options, Configuration()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.temperature
        x = self.middle(x) * self.scale * self.options["factor"]
        return self.last(x) * self.config.factors[0] + self.config.bias


class Halved(TorchFunctionMode):
    """Mode in which linear layers return half of their output."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 0.5 if function is F.linear else result


class Changes(Classifier):
    """Changes what the module reads: before its call, around it, after it, or in a hook.

    Args:
        kind: What changes, and when.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.options, self.steps = kind, {"factor": 1.0}, 0
        self.net = OwnForward(self.options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        net, value = self.net, 0.5 + 0.1 * batch_idx
        assert isinstance(net, OwnForward)
        if self.kind == "attribute":
            net.temperature = value
        elif self.kind == "shared dict":
            self.options["factor"] = value
        elif self.kind == "dict of a layer":
            net.middle.options["factor"] = value
        elif self.kind == "buffer":
            net.scale.fill_(value)
        elif self.kind == "hook":
            net.register_forward_pre_hook(lambda module, args: (0.5 * args[0],))
        elif self.kind == "configuration":
            net.config.bias = value
        elif self.kind == "list of a configuration":
            net.config.factors[0] = value
        elif self.kind == "unread":
            self.steps += 1
        output = self._called(batch[0])
        if self.kind == "late":
            net.temperature = value
        elif self.kind == "late hook":
            net.last.register_forward_hook(lambda module, args, result: 2 * result)
        return F.cross_entropy(output, batch[1])

    def _called(self, x: Tensor) -> Any:
        if self.kind == "functional_call":
            own = {"middle.linear.weight": torch.full((12, 12), 0.05)}
            return torch.func.functional_call(self.net, own, (x,))
        if self.kind == "mode":
            with Halved():
                return self.net(x)
        if self.kind == "saved tensors":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: 2 * t.detach(), lambda t: t):
                return self.net(x)
        if self.kind == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return self.net(x)
        if self.kind == "dtype":
            torch.set_default_dtype(torch.float64)
            try:
                return self.net(x)
            finally:
                torch.set_default_dtype(torch.float32)
        return self.net(x)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        # Rank 0 runs it once more, to read samples for the profile.
        if self.kind == "transfer":
            assert isinstance(self.net, OwnForward)
            self.net.temperature *= 0.9
            self.net.middle.options["factor"] *= 0.9
            self.net.scale.mul_(0.9)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(self.net, OwnForward)
        if self.kind == "in a hook":
            self.net.temperature = self.net.middle.options["factor"] = 0.5 + 0.1 * batch_idx
            self.net.scale.fill_(0.5 + 0.1 * batch_idx)
            self.net.config.bias = self.net.config.factors[0] = 0.5 + 0.1 * batch_idx
        if self.kind == "parameter" and self.global_step == 2:
            self.net.last.weight = nn.Parameter(torch.ones(5, 12))


REFUSED = {
    "attribute": "must not change 'temperature' of 'net' before it calls the module",
    "shared dict": "must not change 'factor' of 'options' before",
    "dict of a layer": "must not change 'factor' of 'net.middle.options' before",
    "configuration": "must not change 'bias' of 'net.config' before",
    "list of a configuration": "must not change 'net.config.factors' before",
    "buffer": "must not change 'net.scale' before",
    "hook": "must not change the hooks of the layer 'net'",
    "late hook": "must not change the hooks of the layer 'net.last'",
    "functional_call": "must not change the parameters of a layer before its call",
    "mode": "outside of modes for torch functions .* within Halved",
    "saved tensors": "hooks for saved tensors",
    "dtype": "with the default dtype torch.float32 .* got torch.float64",
    "parameter": "must stay the objects of the start .* another object for 'net.last.weight'",
}


def fit_refused(context: RankContext, kind: str) -> None:
    expect_refusal(context, Case(lambda: Changes(kind), options=OPTIONS), REFUSED[kind])


@pytest.mark.parametrize("kind", REFUSED)
def test_changes_that_other_ranks_would_miss_are_refused(pool: RankPool, kind: str) -> None:
    pool.run(fit_refused, 2, kind)


RIGHT = {
    kind: Case(lambda kind=kind: Changes(kind), options=OPTIONS)
    for kind in ("unread", "late", "in a hook", "transfer", "save_on_cpu")
}
# The code between the layers of the other stage multiplies a tensor without values by a scalar.
RIGHT |= {
    f"split {split}": Case(
        lambda: Changes("none"),
        options={"plan": PipelinePlan(replicas=((0, 1),), split=split, microbatches=4)},
    )
    for split in ((1, 2), (2, 1))
}


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, RIGHT)


def test_changes_that_no_rank_misses_are_those_of_plain_training(pool: RankPool) -> None:
    assert pool.run(compare, 2) == no_differences_in(RIGHT)
