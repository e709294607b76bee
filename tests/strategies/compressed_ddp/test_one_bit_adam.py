"""The optimizer OneBitAdam through the Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.optimizers.momentum_sync import MomentumSync
from lightning_dlres.gradsync.optimizers.one_bit_adam import OneBitAdam
from lightning_dlres.strategies import CompressedDDPStrategy, HeteroPipeStrategy
from lightning_dlres.strategies.compressed_ddp.optimizers import momentum_of
from tests.strategies.compressed_ddp.test_training import Points, Regression, equal
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool


class Model(Regression):
    """The small network with OneBitAdam, or with AdamW if `freeze_step` is None."""

    def __init__(self, freeze_step: int | None) -> None:
        super().__init__()
        self._freeze_step = freeze_step

    def configure_optimizers(self) -> Any:
        if self._freeze_step is None:
            return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.0)
        return OneBitAdam(
            self.parameters(),
            lr=0.01,
            freeze_step=self._freeze_step,
            sync=MomentumSync(min_bytes=0, timeout=30.0),
        )


def fit(
    context: RankContext,
    freeze_step: int | None,
    directory: str | None = None,
    resume: str | None = None,
    epochs: int = 2,
    after: str | None = None,
) -> dict[str, Tensor]:
    """Return the weights after some epochs of `24 / ranks` steps.

    Args:
        context: This rank.
        freeze_step: Option of OneBitAdam; None trains with AdamW.
        directory: Directory for a checkpoint of each epoch.
        resume: Checkpoint to continue from.
        epochs: Number of epochs.
        after: Path of a checkpoint that is saved after the training.
    """
    seed_everything(5, verbose=False)
    model = Model(freeze_step)
    callbacks = []
    if directory is not None:
        callbacks = [ModelCheckpoint(directory, "{epoch}", save_top_k=-1)]
    trainer = Trainer(
        strategy=CompressedDDPStrategy(
            algorithm="none" if freeze_step is None else "raw", topology="ps", timeout=30.0
        ),
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        max_epochs=epochs,
        callbacks=callbacks,
        **{**QUIET, "enable_checkpointing": bool(callbacks)},
    )
    trainer.fit(model, DataLoader(Points(96), batch_size=4), ckpt_path=resume)
    if after is not None:
        trainer.save_checkpoint(after)
    return copy.deepcopy(model.state_dict())


def test_the_warm_up_is_adamw(pool: RankPool) -> None:
    expected = pool.run(fit, 2, None)
    assert all(map(equal, pool.run(fit, 2, 1000), expected))


def test_ranks_agree_after_the_warm_up(pool: RankPool) -> None:
    warm = pool.run(fit, 3, 1000)
    ranks = pool.run(fit, 3, 4)
    assert all(equal(ranks[0], other) for other in ranks)
    assert not equal(ranks[0], warm[0])


@pytest.mark.parametrize(("world_size", "freeze_step"), [(3, 4), (2, 20)])
def test_a_resumed_run_continues_exactly(
    pool: RankPool, world_size: int, freeze_step: int, tmp_path: Path
) -> None:
    """The variance is frozen before the checkpoint, or after it.

    A resumed warm-up is exact with two ranks only. The first step has other buckets, in which more
    ranks would add in another order.
    """
    whole = pool.run(fit, world_size, freeze_step, str(tmp_path))
    resumed = pool.run(fit, world_size, freeze_step, None, str(tmp_path / "epoch=0.ckpt"))
    assert all(equal(whole[0], other) for other in resumed)


def test_a_checkpoint_after_the_training_has_what_was_not_sent(
    pool: RankPool, tmp_path: Path
) -> None:
    whole = pool.run(fit, 2, 4)
    path = str(tmp_path / "after.ckpt")
    pool.run(fit, 2, 4, epochs=1, after=path)
    assert all(equal(whole[0], other) for other in pool.run(fit, 2, 4, None, path))


def test_other_optimizers_beside_it_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizers = [OneBitAdam([parameter]), torch.optim.SGD([parameter], lr=0.1)]
    with pytest.raises(ConfigError, match="optimizers must be a single one with OneBitAdam"):
        momentum_of(optimizers)
    assert momentum_of(optimizers[:1]) is optimizers[0].sync  # type: ignore[attr-defined]
    assert momentum_of(optimizers[1:]) is None


class GroupsFromSets(Regression):
    """Network whose groups have another order on each rank, as those of sets may have."""

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        if self.trainer.global_rank:
            parameters.reverse()
        return OneBitAdam(
            parameters, lr=0.01, freeze_step=4, sync=MomentumSync(min_bytes=0, timeout=30.0)
        )


def fit_with_plugins(
    context: RankContext, model_class: Any, has_scaler: bool, **options: Any
) -> dict[str, Tensor]:
    seed_everything(5, verbose=False)
    model = model_class()
    plugins: list[Any] = [context.environment]
    if has_scaler:
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        plugins.append(MixedPrecision("16-mixed", "cpu", scaler))
    trainer = Trainer(
        strategy=CompressedDDPStrategy(timeout=30.0),
        accelerator="cpu",
        devices=context.world_size,
        plugins=plugins,
        max_epochs=1,
        **QUIET,
        **options,
    )
    trainer.fit(model, DataLoader(Points(96), batch_size=4))
    return copy.deepcopy(model.state_dict())


def test_groups_have_the_order_of_rank_0(pool: RankPool) -> None:
    expected = pool.run(fit, 2, 4, epochs=1)
    ranks = pool.run(fit_with_plugins, 2, GroupsFromSets, False)
    assert all(map(equal, ranks, [expected[0]] * 2))


def frozen_after_four() -> Model:
    return Model(4)


def test_gradients_are_clipped_beside_a_gradient_scaler(pool: RankPool) -> None:
    ranks = pool.run(fit_with_plugins, 2, frozen_after_four, True, gradient_clip_val=0.5)
    assert equal(ranks[0], ranks[1])
    assert all(value.isfinite().all() for value in ranks[0].values())


class PipelinedModel(Model):
    """The small network with OneBitAdam, which a pipeline refuses."""

    def __init__(self) -> None:
        super().__init__(4)


def refusal_of_pipeline(context: RankContext) -> str:
    trainer = Trainer(
        strategy=HeteroPipeStrategy(stages=2, timeout=30.0),
        accelerator="cpu",
        devices=2,
        plugins=[context.environment],
        max_epochs=1,
        **QUIET,
    )
    with pytest.raises(ConfigError) as error:
        trainer.fit(PipelinedModel(), DataLoader(Points(96), batch_size=4))
    return str(error.value)


def test_the_pipeline_refuses_it(pool: RankPool) -> None:
    for message in pool.run(refusal_of_pipeline, 2):
        assert message.startswith("optimizers must not be OneBitAdam with dlres_hetero_pipe")
