"""Training through the Trainer, compared with Lightning's DDPStrategy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.strategies import CompressedDDPStrategy
from tests.support.examples import checkered
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool

# Options that compress all gradients, small ones included.
COMPRESS_ALL = {"min_bytes": 0}
# Options that leave nothing to be measured at the start.
FIXED = {"topology": "ps", "coordinator": "none"}


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Samples of a linear problem with noise."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 12, generator=generator)
        self.y = self.x.mean(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples of `Points` as an iterable-style dataset without a length."""

    def __init__(self, points: Points) -> None:
        self.points = points

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.points[index] for index in range(len(self.points)))


class SizedStream(Stream):
    """Iterable-style dataset with a length."""

    def __len__(self) -> int:
        return len(self.points)


class Regression(LightningModule):
    """Small network.

    Args:
        optimizer: "sgd" or "adamw".
        manual: True trains with manual optimization.
        unused: True adds a layer that no step uses.

    Attributes:
        losses: Loss of every step on this rank.
    """

    def __init__(
        self, optimizer: str = "sgd", *, manual: bool = False, unused: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
        self.unused = nn.Linear(2, 2) if unused else None
        self.automatic_optimization = not manual
        self._optimizer = optimizer
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        if self._optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def fit(
    context: RankContext,
    options: dict[str, Any] | None,
    *,
    model: dict[str, Any] | None = None,
    counts: tuple[int, ...] | None = None,
    streamed: bool | type[Stream] = False,
    resume: str | None = None,
    directory: str | None = None,
    scaler: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> dict[str, Any]:
    """Train with our strategy, or with DDPStrategy if `options` is None.

    Args:
        context: This rank.
        options: Arguments of the strategy.
        model: Arguments of the model.
        counts: Samples of each rank; None shards 96 samples by Lightning.
        streamed: True or a class makes the dataset iterable-style; needs `counts`.
        resume: Checkpoint to continue from.
        directory: Where to save a checkpoint after step 8, the end of an epoch of three ranks.
        scaler: Arguments of a gradient scaler for mixed precision.
        ddp: Arguments of both strategies.
        trainer_options: Further arguments of the Trainer.

    Returns:
        The weights, the losses of all steps on this rank, and the number of steps.
    """
    seed_everything(5, verbose=False)
    module = Regression(**(model or {}))
    arguments = ddp or {}
    strategy = (
        DDPStrategy(process_group_backend="gloo", **arguments)
        if options is None
        else CompressedDDPStrategy(**{"timeout": 30.0, **FIXED, **options, **arguments})
    )
    points: Dataset[Any] = Points(96)
    if counts is not None:
        points = Points(counts[context.rank], seed=context.rank)
        if streamed:
            points = (Stream if streamed is True else streamed)(points)  # type: ignore[arg-type]
        trainer_options["use_distributed_sampler"] = False
    plugins: list[Any] = [context.environment]
    if scaler is not None:
        plugins.append(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **scaler)))
    callbacks = []
    if directory is not None:
        callbacks.append(ModelCheckpoint(directory, "{step}", every_n_train_steps=8, save_top_k=-1))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=context.world_size,
        plugins=plugins,
        callbacks=callbacks,
        **{"max_epochs": 2, **QUIET, "enable_checkpointing": bool(callbacks), **trainer_options},
    )
    trainer.fit(module, DataLoader(points, batch_size=4), ckpt_path=resume)
    return {
        "weights": copy.deepcopy(module.state_dict()),
        "losses": module.losses,
        "steps": trainer.global_step,
    }


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of two weights."""
    return max(float((one[key] - other[key]).abs().max()) for key in one)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 3},
    "clip by norm": {"gradient_clip_val": 0.5},
    "clip by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "manual": {"model": {"manual": True}},
    "unused": {"model": {"unused": True}, "ddp": {"find_unused_parameters": True}},
    "static graph": {"ddp": {"static_graph": True}},
    "views": {"ddp": {"gradient_as_bucket_view": True}},
    "adamw": {"model": {"optimizer": "adamw"}},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("case", checkered(CASES))
def test_without_an_algorithm_training_is_that_of_ddp(pool: RankPool, case: str) -> None:
    plain = pool.run(fit, 2, None, **CASES[case])
    ours = pool.run(fit, 2, {"algorithm": "none"}, **CASES[case])
    for one, other in zip(plain, ours, strict=True):
        assert equal(one["weights"], other["weights"])
        assert one["losses"] == other["losses"]


@pytest.mark.parametrize("case", checkered(CASES, start=1))
def test_uncompressed_gradients_are_those_of_ddp(pool: RankPool, case: str) -> None:
    """Two ranks add in one order only, so the weights are equal bit for bit."""
    plain = pool.run(fit, 2, None, **CASES[case])
    ours = pool.run(fit, 2, {"algorithm": "raw"}, **CASES[case])
    assert equal(ours[0]["weights"], ours[1]["weights"])
    assert equal(plain[0]["weights"], ours[0]["weights"])


@pytest.mark.parametrize("case", checkered(CASES))
def test_compressed_training_is_near_that_of_ddp(pool: RankPool, case: str) -> None:
    plain = pool.run(fit, 3, None, **CASES[case])
    ours = pool.run(fit, 3, {"algorithm": "int8", **COMPRESS_ALL}, **CASES[case])
    assert all(equal(ours[0]["weights"], other["weights"]) for other in ours)
    assert 0 < distance(plain[0]["weights"], ours[0]["weights"]) < 0.05


def test_one_rank_trains_as_ddp(pool: RankPool) -> None:
    (plain,) = pool.run(fit, 1, None)
    (ours,) = pool.run(fit, 1, {"algorithm": "tbq"})
    assert equal(plain["weights"], ours["weights"])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("counts", [(20, 44), (40, 4, 24)])
def test_uneven_loaders_train_on_all_samples(
    pool: RankPool, counts: tuple[int, ...], streamed: bool
) -> None:
    """The mean is over the samples of all ranks, as if one loader held them."""
    ranks = pool.run(
        fit, len(counts), {"algorithm": "raw"}, counts=counts, streamed=streamed, max_epochs=2
    )
    assert all(equal(ranks[0]["weights"], other["weights"]) for other in ranks)
    torch.manual_seed(5)
    expected = Regression()
    optimizer = expected.configure_optimizers()
    data = [Points(count, seed=rank) for rank, count in enumerate(counts)]
    steps = max(counts) // 4
    for step in [*range(steps)] * 2:
        parts = [(d.x[4 * step : 4 * step + 4], d.y[4 * step : 4 * step + 4]) for d in data]
        optimizer.zero_grad()
        F.mse_loss(
            expected.net(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])
        ).backward()
        optimizer.step()
    assert ranks[0]["steps"] == 2 * steps
    assert distance(ranks[0]["weights"], expected.state_dict()) < 1e-5


def test_compressed_uneven_loaders_agree(pool: RankPool) -> None:
    ranks = pool.run(
        fit,
        3,
        {"algorithm": "tbq", **COMPRESS_ALL},
        counts=(12, 30, 5),
        max_epochs=3,
        accumulate_grad_batches=2,
    )
    assert all(equal(ranks[0]["weights"], other["weights"]) for other in ranks)


@pytest.mark.parametrize("counts", [(8, 0), (0, 8)])
@pytest.mark.parametrize("streamed", [True, SizedStream])
def test_an_empty_loader_is_refused(
    pool: RankPool, streamed: bool | type[Stream], counts: tuple[int, int]
) -> None:
    messages = pool.run(error_of_an_empty_loader, 2, streamed, counts)
    empty = counts.index(0)
    assert f"must have at least one batch on each rank, got 0 on rank {empty}" in messages[empty]
    assert f"rank {empty}" in messages[1 - empty]


def error_of_an_empty_loader(
    context: RankContext, streamed: bool | type[Stream], counts: tuple[int, int]
) -> str:
    try:
        fit(context, {"algorithm": "raw"}, counts=counts, streamed=streamed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("algorithm", ["tbq", "onebit", "dgc"])
def test_a_resumed_run_continues_exactly(pool: RankPool, algorithm: str, tmp_path: Path) -> None:
    options = {"algorithm": algorithm, **COMPRESS_ALL}
    whole = pool.run(fit, 3, options, directory=str(tmp_path), max_steps=16)
    resumed = pool.run(fit, 3, options, resume=str(tmp_path / "step=8.ckpt"), max_steps=16)
    assert all(equal(whole[0]["weights"], other["weights"]) for other in resumed)
    # Any Trainer can continue from the checkpoint, without the residuals.
    pool.run(fit, 2, None, resume=str(tmp_path / "step=8.ckpt"), max_steps=16)
    saved = torch.load(tmp_path / "step=8.ckpt", weights_only=True)
    assert [one["step"] for one in saved["dlres_gradient_sync"]] == [8, 8, 8]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_resumes_on_another_number_of_ranks(
    pool: RankPool, world_size: int, tmp_path: Path
) -> None:
    options = {"algorithm": "tbq", **COMPRESS_ALL}
    pool.run(fit, 3, options, directory=str(tmp_path), max_steps=16)
    resumed = pool.run(fit, world_size, options, resume=str(tmp_path / "step=8.ckpt"), max_steps=16)
    assert all(equal(resumed[0]["weights"], other["weights"]) for other in resumed)
    assert resumed[0]["steps"] > 8


def test_steps_that_overflow_leave_no_residual(pool: RankPool) -> None:
    """The first steps overflow, until the scaler has lowered its scale."""
    options = {"algorithm": "tbq", **COMPRESS_ALL}
    high = pool.run(
        fit, 2, options, scaler={"init_scale": 2.0**20, "growth_interval": 10**6}, max_epochs=4
    )
    assert equal(high[0]["weights"], high[1]["weights"])
    assert all(value.isfinite().all() for value in high[0]["weights"].values())
    assert high[0]["steps"] == 48
    assert sum(high[0]["losses"][-12:]) < sum(high[0]["losses"][:12])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_defaults_train_near_ddp(pool: RankPool, optimizer: str) -> None:
    model = {"optimizer": optimizer}
    plain = pool.run(fit, 2, None, model=model)
    options = {"algorithm": "auto", "topology": "auto", "coordinator": "auto"}
    ours = pool.run(fit, 2, options, model=model)
    assert equal(ours[0]["weights"], ours[1]["weights"])
    assert distance(plain[0]["weights"], ours[0]["weights"]) < 0.1


class Unfreezing(Regression):
    """Network whose first layer is trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def error_of_unfreezing(context: RankContext) -> str:
    trainer = Trainer(
        strategy=CompressedDDPStrategy(algorithm="raw", timeout=30.0, **FIXED),
        accelerator="cpu",
        devices=2,
        plugins=[context.environment],
        max_epochs=2,
        **QUIET,
    )
    with pytest.raises(UnsupportedStepError) as error:
        trainer.fit(Unfreezing(), DataLoader(Points(16), batch_size=4))
    return f"{trainer.current_epoch}: {error.value}"


def test_parameters_that_are_unfrozen_later_are_refused(pool: RankPool) -> None:
    """Their gradients would not be synchronised."""
    for message in pool.run(error_of_unfreezing, 2):
        assert message.startswith(
            "1: parameters must keep requires_grad during fit, got ['net.0.weight', 'net.0.bias']"
        )


def test_few_bits_with_adam_give_a_warning(pool: RankPool) -> None:
    messages = pool.run(warnings_with_adam, 2)
    assert all("algorithm='tbq' may diverge with AdamW" in message for message in messages)


def warnings_with_adam(context: RankContext) -> str:
    with pytest.warns(UserWarning, match="may diverge") as record:
        fit(context, {"algorithm": "tbq"}, model={"optimizer": "adamw"}, max_steps=1)
    return "".join(str(warning.message) for warning in record)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "zip"}, "algorithm must be one of"),
        ({"topology": "star"}, "topology must be one of"),
        ({"timeout": -1.0}, "timeout must be a time in seconds"),
        ({"algorithm": "qsgd", "codec_options": {"bits": 3}}, "bits must be 2, 4 or 8"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompressedDDPStrategy(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 8),
        ({"algorithm": "tbq"}, 8),
        ({"algorithm": "none"}, None),
        ({"algorithm": "powersgd"}, 1_000_000),
        ({"algorithm": "tbq", "bucket_cap_mb": 3}, 3),
    ],
)
def test_buckets_are_small_if_gradients_are_synchronised_by_us(
    options: dict[str, Any], expected: float | None
) -> None:
    assert CompressedDDPStrategy(**options)._ddp_kwargs["bucket_cap_mb"] == expected
