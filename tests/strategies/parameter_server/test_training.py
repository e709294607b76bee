"""Training through the Trainer with parameter servers, compared with plain training.

Plain training sees the joint batch of all ranks. Sums of a batch are rounded in another order, so
weights differ by some rounding errors, which Adam's first steps enlarge.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_dlres import ActivationOffload, ParameterMirror, ParameterServerStrategy
from lightning_dlres.core.errors import ConfigError
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankFailure, RankPool

BATCH, BATCHES = 12, 12
OPTIONS: dict[str, Any] = {"timeout": 60, "key_bytes": "64KiB"}


class JointBatches(Sampler[list[int]]):
    """This rank's share of each joint batch."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        share = BATCH // self._ranks
        for batch in range(BATCHES):
            first = batch * BATCH + self._rank * share
            yield list(range(first, first + share))


class Regression(LightningModule):
    """Network whose largest weight is cut into several keys.

    Args:
        optimizer: Name of the optimizer.
        manual: True trains with manual optimization.
    """

    def __init__(self, optimizer: str, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(
            nn.Linear(64, 300), nn.LayerNorm(300), nn.Tanh(), nn.Linear(300, 4)
        )
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.automatic_optimization = not manual
        self._optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.frozen(self.net(batch[0])), batch[1])
        self.log("loss", loss, sync_dist=True)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.mse_loss(self.frozen(self.net(batch[0])), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        optimizer: torch.optim.Optimizer
        if self._optimizer == "adamw":
            groups = [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(groups, lr=0.01)
        elif self._optimizer == "adagrad":
            optimizer = torch.optim.Adagrad(parameters, lr=0.05)
        elif self._optimizer == "adafactor":
            optimizer = torch.optim.Adafactor(parameters, lr=0.05)
        elif self._optimizer == "none":
            return None
        elif self._optimizer == "lbfgs":
            return torch.optim.LBFGS(parameters)
        else:
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ChangeGradients(Callback):
    """Callback that halves gradients before each step."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.5


class SearchAmidFit(LearningRateFinder):
    """Callback that searches the learning rate in the second epoch, as for a fine-tuning."""

    def __init__(self) -> None:
        super().__init__(num_training_steps=5, early_stop_threshold=None, update_attr=False)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Do not search here."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


class WholeLoop(list[Callback]):
    """Callbacks of the method's whole loop: activations, mirror and servers in one Trainer."""

    def __init__(self) -> None:
        super().__init__([ParameterMirror(window="min"), ActivationOffload(budget="min")])


def fit(
    context: RankContext,
    options: dict[str, Any] | None,
    *,
    model: dict[str, Any],
    ranks: int,
    callbacks: Any = (),
    save: str | None = None,
    resume: str | None = None,
    evaluate: bool = False,
    precision_plugin: Any = None,
    kind: type[Regression] = Regression,
    **trainer_options: Any,
) -> dict[str, Any]:
    """Train with parameter servers, or plainly on the joint batch if `options` is None."""
    torch.set_num_threads(1)
    seed_everything(5, verbose=False)
    module = kind(**model)
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(
        torch.randn(BATCH * BATCHES, 64, generator=generator),
        torch.randn(BATCH * BATCHES, 4, generator=generator),
    )
    plugins = [] if precision_plugin is None else [precision_plugin()]
    plain: dict[str, Any] = {"devices": 1, "plugins": plugins}
    ours = {
        "strategy": ParameterServerStrategy(**{**OPTIONS, **(options or {})}),
        "devices": context.world_size,
        "plugins": [context.environment, *plugins],
    }
    trainer = Trainer(
        accelerator="cpu",
        use_distributed_sampler=False,
        callbacks=[make() for make in callbacks] if isinstance(callbacks, tuple) else callbacks(),
        **{"max_epochs": 1, **QUIET, **(plain if options is None else ours), **trainer_options},
    )
    rank, ranks = (0, 1) if options is None else (context.rank, ranks)
    loader = DataLoader(data, batch_sampler=JointBatches(rank, ranks))
    trainer.fit(module, loader, loader if evaluate else None, ckpt_path=resume)
    result = {
        "weights": copy.deepcopy(module.state_dict()),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }
    if save is not None:
        trainer.save_checkpoint(save)
    if evaluate:
        result["test"] = trainer.validate(module, loader, verbose=False)
    return result


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of two weights."""
    return max(float((one[key] - other[key]).abs().max()) for key in one)


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one rank": (1, 1, {"model": {"optimizer": "sgd"}}),
    "sgd": (2, 1, {"model": {"optimizer": "sgd"}}),
    "two groups": (3, 2, {"model": {"optimizer": "adamw"}}),
    "adagrad": (2, 3, {"model": {"optimizer": "adagrad"}}),
    "not divisible": (2, 2, {"model": {"optimizer": "adafactor"}}),
    "clip by norm": (3, 3, {"model": {"optimizer": "sgd"}, "gradient_clip_val": 0.1}),
    "clip by value": (
        2,
        2,
        {
            "model": {"optimizer": "adamw"},
            "gradient_clip_val": 0.01,
            "gradient_clip_algorithm": "value",
        },
    ),
    "accumulate": (3, 1, {"model": {"optimizer": "adamw"}, "accumulate_grad_batches": 3}),
    "manual": (2, 1, {"model": {"optimizer": "sgd", "manual": True}}),
    "search amid fit": (
        2,
        2,
        {
            "model": {"optimizer": "adamw"},
            "callbacks": (SearchAmidFit,),
            "max_epochs": 2,
            "default_root_dir": ".",
        },
    ),
    "changed gradients": (2, 2, {"model": {"optimizer": "sgd"}, "callbacks": (ChangeGradients,)}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_like_one_on_the_joint_batch(pool: RankPool, case: str) -> None:
    ranks, servers, arguments = CASES[case]
    (plain,) = pool.run(fit, 1, None, ranks=1, **arguments)
    ours = pool.run(fit, ranks, {"embedded_servers": servers}, ranks=ranks, **arguments)
    for rank in ours:
        assert distance(rank["weights"], ours[0]["weights"]) == 0
        assert distance(rank["weights"], plain["weights"]) < 2e-5
        assert rank["metrics"] == pytest.approx(plain["metrics"], abs=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adagrad"])
@pytest.mark.parametrize(
    "trainer_options",
    [
        {},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
    ],
    ids=["plain", "norm", "value", "accumulate"],
)
def test_all_combinations_train_like_one_rank(
    pool: RankPool, ranks: int, servers: int, optimizer: str, trainer_options: dict[str, Any]
) -> None:
    arguments = {"model": {"optimizer": optimizer}, **trainer_options}
    (plain,) = pool.run(fit, 1, None, ranks=1, **arguments)
    ours = pool.run(fit, ranks, {"embedded_servers": servers}, ranks=ranks, **arguments)
    assert all(distance(rank["weights"], plain["weights"]) < 2e-5 for rank in ours)


def test_the_whole_loop_trains_like_one_rank(pool: RankPool) -> None:
    """Activations, parameters and optimizer leave the device in one Trainer."""
    arguments = {"model": {"optimizer": "adamw"}, "gradient_clip_val": 0.1, "max_epochs": 2}
    (plain,) = pool.run(fit, 1, None, ranks=1, **arguments)
    ours = pool.run(fit, 2, {"embedded_servers": 2}, ranks=2, callbacks=WholeLoop, **arguments)
    assert all(distance(rank["weights"], plain["weights"]) < 2e-5 for rank in ours)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor"])
def test_a_plain_trainer_resumes_from_a_checkpoint(
    pool: RankPool, optimizer: str, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"model": {"optimizer": optimizer}, "ranks": 2}
    path = str(tmp_path / "ours.ckpt")
    pool.run(fit, 2, {"embedded_servers": 2}, save=path, **arguments)
    (plain,) = pool.run(fit, 1, None, max_epochs=2, **arguments)
    (resumed,) = pool.run(fit, 1, None, max_epochs=2, resume=path, **arguments)
    assert distance(resumed["weights"], plain["weights"]) < 2e-5
    continued = pool.run(fit, 2, {}, max_epochs=2, resume=path, **arguments)
    assert distance(continued[1]["weights"], plain["weights"]) < 2e-5


def test_validation_sees_the_new_weights(pool: RankPool) -> None:
    arguments: dict[str, Any] = {"model": {"optimizer": "sgd"}, "evaluate": True, "ranks": 2}
    (plain,) = pool.run(fit, 1, None, **arguments)
    for rank in pool.run(fit, 2, {}, **arguments):
        assert rank["metrics"] == pytest.approx(plain["metrics"], abs=1e-4)
        assert rank["test"][0] == pytest.approx(plain["test"][0], abs=1e-4)


@pytest.mark.parametrize("consistency", ["ssp", "asp"])
def test_ranks_that_do_not_wait_for_each_other_train(pool: RankPool, consistency: str) -> None:
    arguments: dict[str, Any] = {"model": {"optimizer": "sgd"}, "ranks": 2, "max_epochs": 4}
    options = {"consistency": consistency, "staleness": 1}
    (plain,) = pool.run(fit, 1, None, **arguments)
    for rank in pool.run(fit, 2, options, gradient_clip_val=10.0, **arguments):
        assert rank["metrics"]["loss"] < 1.2 * plain["metrics"]["loss"]


def test_a_gradient_that_changes_after_its_push_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="overlap=False"):
        pool.run(change_pushed_gradients, 1)


def change_pushed_gradients(context: RankContext) -> None:
    class Changing(Regression):
        def on_train_start(self) -> None:
            # A hook that this package does not know of; the last layer is pushed before it runs.
            self.net[0].weight.register_post_accumulate_grad_hook(self.double_bias)

        def double_bias(self, *args: Any) -> None:
            gradient = self.net[-1].bias.grad
            assert gradient is not None
            gradient.mul_(2)

    trainer = Trainer(
        accelerator="cpu",
        strategy=ParameterServerStrategy(**OPTIONS),
        plugins=[context.environment],
        max_epochs=1,
        **QUIET,
    )
    data = TensorDataset(torch.randn(8, 64), torch.randn(8, 4))
    trainer.fit(Changing("sgd"), DataLoader(data, batch_size=4))


def test_an_optimizer_that_servers_cannot_make_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="updates each parameter by itself"):
        pool.run(fit, 1, {}, ranks=1, model={"optimizer": "lbfgs"})


def test_a_module_without_an_optimizer_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="must return an optimizer for a parameter server"):
        pool.run(fit, 1, {}, ranks=1, model={"optimizer": "none"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"consistency": "eventual"}, "consistency must be one of"),
        ({"staleness": -1}, "staleness must be"),
        ({"servers": []}, "servers must be"),
        ({"servers": "10.0.0.1:5600"}, "servers must be"),
        ({"servers": "tcp://10.0.0.1"}, "servers must be"),
        ({"servers": ["tcp://10.0.0.1:5600 "]}, "servers must be"),
        ({"servers": ["tcp://10.0.0.1:99999"]}, "servers must be"),
        ({"servers": ["tcp://10.0.0.1:5600"] * 2}, "servers must be different addresses"),
        ({"embedded_servers": 0}, "embedded_servers must be"),
        (
            {"embedded_servers": 2, "servers": ["tcp://10.0.0.1:5600"]},
            "embedded_servers must be 1 with servers that run elsewhere",
        ),
        ({"codec": "zip"}, "codec must be one of"),
        ({"codec_options": {"clip": 1}}, "codec_options must be None"),
        ({"key_bytes": "1KiB"}, "key_bytes must be"),
        ({"key_bytes": "257MiB"}, "key_bytes must be 64 KiB to 256 MiB"),
        ({"overlap": 1}, "overlap must be"),
        ({"worker_deadline": 0}, "worker_deadline must be"),
        ({"key": "me.key_secret"}, "key must be given together with server_key"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
def test_bad_options_are_refused_at_construction(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParameterServerStrategy(**options)
