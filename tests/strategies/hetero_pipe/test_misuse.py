"""Code that needs all stages on one rank is refused by name, in steps, hooks and callbacks. The
alternatives that the messages name work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_dlres import ConfigError, UnsupportedStepError
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    batches,
    differences_in,
    fit,
    no_differences_in,
    trainer_for,
)


class Unfreeze(BaseFinetuning):
    """Callback that freezes a layer for an epoch."""

    def freeze_before_training(self, module: LightningModule) -> None:
        self.freeze(module.net[0])

    def finetune_function(self, module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        self.unfreeze_and_add_param_group(module.net[0], optimizer)


class Finder(BatchSizeFinder):
    """Batch size finder without Lightning's check for a `batch_size` of the model."""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        pass


CALLBACKS: list[Callable[[], Callback]] = [
    Unfreeze,
    WeightAveraging,
    EMAWeightAveraging,
    lambda: StochasticWeightAveraging(1e-2),
    Finder,
    lambda: ModelPruning("l1_unstructured", amount=0.5),
]


class Strangers(Classifier):
    """Model whose optimizer has parameters that are not the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Parameter(torch.ones(3))]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.hidden], lr=0.1)


class LateStranger(Classifier):
    """Model that adds a parameter group during the run, of a parameter that is not the module's."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.hidden = [nn.Parameter(torch.ones(3))]
            self.optimizers().add_param_group({"params": self.hidden})  # type: ignore[union-attr]


def messages_of_refusals(context: RankContext) -> list[str]:
    """Return the message of each refusal, before the first step or in it."""
    cases = [Case(Classifier, trainer={"callbacks": [make()]}) for make in CALLBACKS]
    messages = []
    for case in [*cases, Case(Strangers), Case(LateStranger)]:
        with pytest.raises(ConfigError) as error:
            fit(context, case)
        messages.append(str(error.value))
    return messages


def test_callbacks_and_optimizers_over_all_weights_are_refused(pool: RankPool) -> None:
    for messages in pool.run(messages_of_refusals, 2):
        for message, make in zip(messages, CALLBACKS, strict=False):
            assert f"{type(make()).__name__} cannot work with a pipeline" in message
        for message, model in zip(messages[-2:], (Strangers, LateStranger), strict=True):
            assert f"1 parameters that are not parameters of {model.__name__}" in message
            assert "of shape (3,)" in message


class Sparse(Classifier):
    """Model with sparse gradients, and an optimizer that takes no other."""

    def __init__(self) -> None:
        super().__init__()
        extra = [nn.Flatten(), nn.Identity(), nn.Identity(), nn.Identity()]
        self.net = nn.Sequential(nn.Embedding(9, 6, sparse=True), *extra)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = (3 * batch[0][:, :3]).abs().long() % 9
        return F.cross_entropy(self.net(tokens), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.1)


SPARSE = {schedule: Case(Sparse, schedule) for schedule in ("gpipe", "1f1b")}


def fit_sparse(context: RankContext) -> Any:
    if context.world_size == 2:
        return differences_in(context, SPARSE)
    with pytest.raises(ConfigError) as error:
        fit(context, SPARSE["gpipe"])
    return str(error.value)


def test_an_optimizer_of_sparse_gradients_works_on_one_replica(pool: RankPool) -> None:
    assert pool.run(fit_sparse, 2) == no_differences_in(SPARSE)
    for message in pool.run(fit_sparse, 4):
        assert "SparseAdam takes sparse gradients only" in message
        assert "one replica" in message


class Freezes(Classifier):
    """Model that freezes and unfreezes its layers, and with them whole stages."""

    def on_train_epoch_start(self) -> None:
        for index, layer in enumerate(self.net):
            layer.requires_grad_(index != (0, 2, 4, 1)[self.current_epoch])


FREEZES = {
    schedule: Case(Freezes, schedule, schedule, trainer={"max_epochs": 4})
    for schedule in ("gpipe", "1f1b")
}


def compare_freezing(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, FREEZES)


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_may_be_frozen_and_unfrozen_in_hooks(pool: RankPool, ranks: int) -> None:
    assert pool.run(compare_freezing, ranks) == no_differences_in(FREEZES, ranks)


class Scales(nn.Tanh):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Changes(Classifier):
    """Model that changes a setting of its layers in `training_step`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.net[1], self.head = way, Scales(), nn.Linear(5, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        is_late = self.global_step == 2
        if self.way == "frozen before":
            self.net[0].requires_grad_(False)
        if self.way == "set before":
            self.net[1].factor = 1.0 + self.global_step
        loss = F.cross_entropy(self.head(self.net(batch[0])), batch[1])
        if self.way == "frozen after" and is_late:
            self.net[0].requires_grad_(False)
        if self.way == "frozen outside" and is_late:
            self.head.requires_grad_(False)
        if self.way == "put back":
            self.net[2].requires_grad_(False)
            self.net[2].requires_grad_(True)
            self.net.train()
        return loss


PUT_BACK = {"put back": Case(lambda: Changes("put back"), options={"module": "net"})}


def fit_freezing(context: RankContext) -> tuple[str, dict[str, list[str]]]:
    trainer = trainer_for(context, module="net", plan=None)
    with pytest.raises(UnsupportedStepError) as error:
        trainer.fit(Changes("frozen before"), batches())
    assert trainer.global_step == 0
    return str(error.value), differences_in(context, PUT_BACK)


def fit_changing(context: RankContext, way: str) -> None:
    trainer_for(context, module="net").fit(Changes(way), batches())


def test_a_step_that_freezes_is_refused_unless_it_restores_the_setting(pool: RankPool) -> None:
    for message, differences in pool.run(fit_freezing, 2):
        assert differences == {"put back": []}
        assert (
            "training_step must not change requires_grad of the parameter 'net.0.weight'" in message
        )


@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("frozen after", "requires_grad of the parameter 'net.0.weight'"),
        ("frozen outside", "requires_grad of the parameter 'head.weight'"),
        ("set before", "'factor' of the layer 'net.1'"),
    ],
)
def test_settings_of_layers_cannot_be_changed_in_a_step(
    pool: RankPool, way: str, what: str
) -> None:
    for outcome in pool.run_expecting_errors(fit_changing, 2, way):
        assert f"training_step must not change {what}" in outcome.error_message


class Zeroes(Classifier):
    """Model that zeroes gradients before and after the module's call. This changes nothing in plain
    training, where backward comes later."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.zero_grad()
        loss = super().training_step(batch, batch_idx)
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.zero_grad()
        return loss


ZEROES = {schedule: Case(Zeroes, schedule, schedule) for schedule in ("gpipe", "1f1b")}


def compare_zeroing(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, ZEROES)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_may_zero_gradients(pool: RankPool, ranks: int) -> None:
    assert pool.run(compare_zeroing, ranks) == no_differences_in(ZEROES, ranks)


class Uses(Callback):
    """Callback that uses weights of all layers outside of a step."""

    def __init__(self, use: Callable[[Any], Any], hook: str = "on_train_batch_end") -> None:
        setattr(self, hook, lambda trainer, module, *args: use(module))


class Averages(Classifier):
    """Model with a copy of its network, as for moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [p.detach().clone() for p in self.net.parameters()]


@torch.no_grad()
def average(module: Any) -> None:
    for mean, parameter in zip(module.average, module.net.parameters(), strict=True):
        mean.lerp_(parameter, 0.1)


def average_data(module: Any) -> None:
    for mean, parameter in zip(module.average, module.net.parameters(), strict=True):
        mean.mul_(0.9).add_(0.1 * parameter.data)


def norm_of_all(module: Any) -> Tensor:
    return torch.stack([parameter.norm() for parameter in module.parameters()]).sum()


def numbers_of_all(module: Any) -> float:
    return sum(float(parameter.abs().sum()) for parameter in module.parameters())


def state_as_arrays(module: Any) -> list[Any]:
    return [value.numpy() for value in module.state_dict().values()]


def copy_and_call(module: Any) -> Tensor:
    output: Tensor = copy.deepcopy(module.net)(torch.ones(2, 16))
    return output


def look_only(module: Any) -> None:
    for parameter in module.parameters():
        assert parameter.numel() == parameter.shape.numel()
        assert parameter.grad is None or not parameter.is_meta
    held = [parameter.detach().norm() for parameter in module.parameters() if not parameter.is_meta]
    assert held


USES = (average, average_data, norm_of_all, numbers_of_all, state_as_arrays, copy_and_call)


class TwoBackwards(Classifier):
    """Model that runs backward twice on one loss."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


def use_weights_in_hooks(context: RankContext) -> list[str]:
    fit(context, Case(Averages, trainer={"callbacks": [Uses(look_only)], "max_epochs": 1}))
    messages = []
    for use in USES:
        with pytest.raises(UnsupportedStepError) as error:
            fit(context, Case(Averages, trainer={"callbacks": [Uses(use)]}))
        messages.append(str(error.value))
    with pytest.raises(UnsupportedStepError) as error:
        fit(context, Case(TwoBackwards))
    return [*messages, str(error.value)]


def test_weights_of_other_stages_cannot_be_used_in_hooks(pool: RankPool) -> None:
    for messages in pool.run(use_weights_in_hooks, 2):
        for message, use in zip(messages, USES, strict=False):
            words = "copy of 'net'" if use is copy_and_call else "that another stage holds"
            assert words in message, use.__name__
        assert "backward must run once" in messages[-1]


class Norms(Callback):
    """Callback that records gradient norms in the first step."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, _: Any) -> None:
        norms = {name: float(value) for name, value in grad_norm(module, 2).items()}
        self.first = self.first or norms


def norms_in_hooks(context: RankContext) -> list[dict[str, float]]:
    norms_of_runs = []
    for run_context in (None, context):
        norms = Norms()
        fit(run_context, Case(Classifier, "gpipe", trainer={"callbacks": [norms], "max_epochs": 1}))
        norms_of_runs.append(norms.first)
    return norms_of_runs


def test_gradient_norms_in_hooks_are_those_of_the_stage(pool: RankPool) -> None:
    (plain, first), (_, second) = pool.run(norms_in_hooks, 2)
    total = "grad_2.0_norm_total"
    assert {**first, **second, total: 0.0} == pytest.approx({**plain, total: 0.0}, rel=1e-4)
    assert first[total] ** 2 + second[total] ** 2 == pytest.approx(plain[total] ** 2, rel=1e-4)


class Broadcasts(Callback):
    """Callback that broadcasts objects as other callbacks do."""

    def __init__(self) -> None:
        self.received: Any = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        objects = [Path("a/b"), {"steps": 3, "best": None}, (1.5, True, "text"), torch.arange(3)]
        self.received = trainer.strategy.broadcast(objects if trainer.is_global_zero else None)


def broadcast_in_a_callback(context: RankContext) -> Any:
    callback = Broadcasts()
    fit(context, Case(Classifier, trainer={"callbacks": [callback], "max_epochs": 1}))
    return callback.received


def test_paths_and_other_plain_objects_can_be_broadcast(pool: RankPool) -> None:
    for path, mapping, row, tensor in pool.run(broadcast_in_a_callback, 2):
        assert path == Path("a/b")
        assert mapping == {"steps": 3, "best": None}
        assert row == (1.5, True, "text")
        assert torch.equal(tensor, torch.arange(3))
