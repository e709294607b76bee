"""Models that no rank builds whole: they begin and train as models that each rank builds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlres import HeteroPipeStrategy, PipelinePlan
from tests.support.models import QUIET
from tests.support.parity import relative
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import batches, trainer_for

WIDTH = 96


class Skipping(nn.Module):
    """Network with a forward of its own: its layers are found by running them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.randn(1, WIDTH).expand(64, WIDTH).contiguous())
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)
        self.register_buffer("mask", torch.triu(torch.ones(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x).tanh()
        for block in self.blocks:
            x = x + (block(x) @ self.mask).tanh() * self.scale.mean(0)
        output: Tensor = self.head(self.norm(x + first))
        return output


def chain() -> nn.Module:
    blocks = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), *blocks, nn.Linear(WIDTH, 5))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "captured": Skipping}


class Large(LightningModule):
    """Classifier that makes its network in `configure_model`.

    Attributes:
        initial: Parameters and buffers that the rank holds when training begins.
        losses: Loss of each step.
    """

    def __init__(self, network: str, at_once: bool = False) -> None:
        super().__init__()
        self.network, self.initial, self.losses = network, dict[str, Tensor](), list[float]()
        self.net = NETWORKS[network]() if at_once else None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = NETWORKS[self.network]()

    def on_train_start(self) -> None:
        self.initial = {
            name: tensor.detach().clone()
            for name, tensor in self.state_dict().items()
            if not tensor.is_meta
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.net is not None
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trained(
    context: RankContext | None, network: str, path: str, resumed: str | None = None, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Train, and save a checkpoint; return the initial tensors and the losses."""
    seed_everything(3, verbose=False)
    model = Large(network)
    defaults = {"deferred_init": True, "plan": None, "microbatches": 1, "module": "net"}
    chosen = {**defaults, **options} if context else {}
    stages = {"stages": context.world_size} if context else {}
    epochs = 2 if resumed is None else 4
    trainer = trainer_for(context, **{**chosen, **stages}, max_epochs=epochs)
    trainer.fit(model, batches(), ckpt_path=resumed, weights_only=False)
    trainer.save_checkpoint(path)
    return model.initial, model.losses


def plainly(context: RankContext, network: str, path: str) -> Any:
    return trained(None, network, path)


@pytest.mark.parametrize("network", NETWORKS)
def test_weights_begin_and_end_as_those_of_plain_training(
    pool: RankPool, tmp_path: Path, network: str
) -> None:
    plain_path, path = str(tmp_path / "plain.ckpt"), str(tmp_path / "deferred.ckpt")
    (initial, losses), *_ = pool.run(plainly, 1, network, plain_path)
    seen: set[str] = set()
    for own_initial, own_losses in pool.run(trained, 3, network, path):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        for name, value in own_initial.items():
            assert torch.equal(value, initial[name]), name
        assert len(own_initial) < len(initial)
        seen |= own_initial.keys()
    assert seen == initial.keys()
    states = [torch.load(each, weights_only=False)["state_dict"] for each in (plain_path, path)]
    assert states[1].keys() == states[0].keys()
    for name, value in states[0].items():
        assert relative(states[1][name], value) <= 1e-5, name


def test_a_run_goes_on_from_a_checkpoint_with_another_number_of_stages(
    pool: RankPool, tmp_path: Path
) -> None:
    three, two = str(tmp_path / "three.ckpt"), str(tmp_path / "two.ckpt")
    pool.run(trained, 3, "captured", three)
    (_, losses), _ = pool.run(trained, 2, "captured", two, three)
    plain = str(tmp_path / "plain.ckpt")
    pool.run(plainly, 1, "captured", plain)
    (_, expected) = pool.run(resumed_plainly, 1, "captured", str(tmp_path / "end.ckpt"), plain)[0]
    assert losses == pytest.approx(expected, rel=1e-5)


def resumed_plainly(context: RankContext, network: str, path: str, resumed: str) -> Any:
    return trained(None, network, path, resumed)


def initial_of_replicas(context: RankContext, network: str, path: str) -> Any:
    """Train two replicas of two stages, whose ranks have different seeds."""
    torch.manual_seed(context.rank)
    model = Large(network)
    plan = PipelinePlan(replicas=((0, 1), (2, 3)), split=(4, 5))
    trainer = trainer_for(context, deferred_init=True, plan=plan, microbatches=2)
    trainer.fit(model, batches())
    return model.initial


def test_replicas_begin_alike_without_a_common_seed(pool: RankPool, tmp_path: Path) -> None:
    first, second, third, fourth = pool.run(
        initial_of_replicas, 4, "chain", str(tmp_path / "a.ckpt")
    )
    for one, other in ((first, third), (second, fourth)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def made_at_once(context: RankContext) -> tuple[list[float], int]:
    model = Large("chain", at_once=True)
    trainer = trainer_for(context, deferred_init=True, plan=None)
    trainer.fit(model, batches())
    return model.losses, sum(p.is_meta for p in model.parameters())


def test_a_model_that_was_made_before_is_not_deferred(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(made_at_once, 2)
    for outcome in outcomes:
        losses, remote = outcome.value
        assert losses
        assert not remote, "each rank has the whole model again"
    assert "deferred_init has no effect" in outcomes[0].output
    assert "Make it in configure_model" in outcomes[0].output


class Auxiliary(Large):
    """Classifier whose loss uses a tensor that a layer keeps."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.net is not None
        self.net[2].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept = output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.kept.square().mean()


def train_auxiliary(context: RankContext) -> None:
    trainer = trainer_for(context, deferred_init=True, plan=None)
    trainer.fit(Auxiliary("chain"), batches())


def test_a_step_that_uses_tensors_of_layers_is_refused(pool: RankPool) -> None:
    for outcome in pool.run_expecting_errors(train_auxiliary, 2):
        assert "net.2" in outcome.error_message


def train_noting_layers(context: RankContext) -> None:
    trainer = trainer_for(context, deferred_init=True, plan=None, microbatches=2, module="net")
    trainer.fit(Large("captured"), batches())


def test_layers_that_see_micro_batches_are_named(pool: RankPool) -> None:
    first, _ = pool.run_expecting_errors(train_noting_layers, 2)
    assert "see one micro-batch at a time" in first.output
    assert "net.norm (changes its buffer 'running_mean'" in first.output


def train_on_one_device(context: RankContext) -> tuple[int, int]:
    model = Large("captured")
    trainer = Trainer(
        strategy=HeteroPipeStrategy(deferred_init=True),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(model, batches())
    return len(model.initial), len(model.state_dict())


def test_one_device_builds_the_model_whole(pool: RankPool) -> None:
    ((held, all_tensors),) = pool.run(train_on_one_device, 1)
    assert held == all_tensors
