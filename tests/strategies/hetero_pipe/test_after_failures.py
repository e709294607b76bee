"""Models and checkpoints after a run that has failed, and after hooks that copy or save layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlres import PipelinePlan
from lightning_dlres.core.comm import mailbox
from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Classifier, batches, trainer_for


class Layers(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5)
        )
        self.fails = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.fails and batch_idx == 2:
            raise ArithmeticError("all ranks")


def plan(split: tuple[int, int]) -> PipelinePlan:
    return PipelinePlan(replicas=((0, 1),), split=split)


def goes_on_after_a_failure(context: RankContext) -> tuple[str, float]:
    model = Layers()
    model.fails = True
    trainer = trainer_for(context, plan=plan((2, 3)))
    with pytest.raises(ArithmeticError):
        trainer.fit(model, batches())
    with pytest.raises(ConfigError, match="because its run has failed"):
        trainer.save_checkpoint(context.tmp / "failed.ckpt")
    with pytest.raises(UnsupportedStepError, match="must not be pickled or saved on this rank"):
        torch.save(model.state_dict(), context.tmp / f"state{context.rank}.pt")
    model.fails = False
    # Each rank lacks layers of the other one.
    moved = trainer_for(context, plan=PipelinePlan(replicas=((1, 0),), split=(2, 3)))
    with pytest.raises(ConfigError, match="had another split or has failed") as refusal:
        moved.fit(model, batches())
    trainer_for(context, plan=plan((2, 3))).fit(model, batches())
    return str(refusal.value), sum(float(p.detach().sum()) for p in model.parameters())


def test_a_model_goes_on_with_the_same_split_after_a_failed_run(pool: RankPool) -> None:
    (_, first), (_, second) = pool.run(goes_on_after_a_failure, 2)
    assert first == second


class CopiedInHook(Layers):
    """Classifier that keeps a copy of its layers, as one does with the best ones so far."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Linear(12, 5), nn.BatchNorm1d(5)
        )

    def on_train_epoch_end(self) -> None:
        self.best = copy.deepcopy(self.net)


def copies_in_hook(context: RankContext) -> list[Tensor]:
    model = CopiedInHook()
    trainer_for(context, plan=plan((2, 2))).fit(model, batches())
    states = (model.best.state_dict(), model.net.state_dict())
    return [value.clone() for state in states for value in state.values()]


def test_a_copy_of_layers_is_whole_after_the_run(pool: RankPool) -> None:
    for tensors in pool.run(copies_in_hook, 2):
        count = len(tensors) // 2
        for kept, trained in zip(tensors[:count], tensors[count:], strict=True):
            assert torch.equal(kept, trained)


class SavedInHook(Layers):
    def on_train_epoch_end(self) -> None:
        path = Path(self.trainer.default_root_dir) / f"hook{self.global_rank}.pt"
        with pytest.raises(UnsupportedStepError, match="must not be pickled or saved"):
            torch.save(self.state_dict(), path)


def saves_in_hook(context: RankContext) -> None:
    trainer_for(context, plan=plan((2, 3)), default_root_dir=context.tmp).fit(
        SavedInHook(), batches()
    )


def test_weights_of_other_ranks_are_not_saved_as_empty_tensors(pool: RankPool) -> None:
    pool.run(saves_in_hook, 2)


class Grouped(Layers):
    """Classifier whose groups have another order on each rank, as groups made from sets may."""

    def configure_optimizers(self) -> Any:
        step = -1 if self.global_rank == 1 else 1
        weights = [p for p in self.parameters() if p.dim() > 1][::step]
        others = [p for p in self.parameters() if p.dim() == 1][::step]
        groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "lr": 0.01}]
        return torch.optim.AdamW(groups)


def states_of_groups(context: RankContext) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    model: LightningModule = Grouped()
    trainer, path = trainer_for(context, plan=plan((2, 3))), context.tmp / "grouped.ckpt"
    trainer.fit(model, batches())
    trainer.save_checkpoint(path)
    parameters = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    states = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    return [(tuple(p.shape), tuple(states[i]["exp_avg"].shape)) for i, p in enumerate(parameters)]


def test_groups_have_the_order_of_rank_0(pool: RankPool) -> None:
    first, second = pool.run(states_of_groups, 2)
    assert first == second
    assert len(first) == 6
    assert all(parameter == state for parameter, state in first)


class OtherGroups(Layers):
    def configure_optimizers(self) -> Any:
        chosen = list(self.parameters())[self.global_rank :]
        return torch.optim.SGD(chosen, lr=0.1)


def fits_with_other_groups(context: RankContext) -> None:
    trainer_for(context, plan=plan((2, 3))).fit(OtherGroups(), batches())


def test_other_groups_than_on_rank_0_are_refused(pool: RankPool) -> None:
    outcome = pool.run_expecting_errors(fits_with_other_groups, 2)[1]
    assert outcome.error_type == ConfigError.__name__
    assert "must be the same on all ranks" in outcome.error_message


class Exhausted(Layers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            next(iter(()))
        return super().training_step(batch, batch_idx)


def fits_exhausted(context: RankContext) -> None:
    with pytest.raises(Exception, match="must not raise StopIteration"):
        trainer_for(context, plan=plan((2, 3))).fit(Exhausted(), batches())


def test_a_step_that_raises_stop_iteration_ends_the_run_on_all_ranks(pool: RankPool) -> None:
    pool.run(fits_exhausted, 2)


class StopsAlone(Layers):
    """Classifier that ends training on one rank, as a clock of each rank may decide."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == self.rank and batch_idx == 1:
            self.trainer.should_stop = True


def stops_alone(context: RankContext, rank: int) -> None:
    mailbox._EXPLAIN_SECONDS = 0.1
    trainer_for(context, plan=plan((2, 3)), timeout=8 if rank == 0 else 60).fit(
        StopsAlone(rank), batches()
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_training_alone_is_named(pool: RankPool, rank: int) -> None:
    outcome = pool.run_expecting_errors(stops_alone, 2, rank, timeout=120)[rank]
    text = outcome.error_message + outcome.output
    assert "at the end of the run" in text
    if rank == 1:
        assert "and stage 0 (rank 0) is in a training step" in text


class WithModules(Layers):
    """Classifier whose hyperparameters are modules, of which it makes its layers."""

    def __init__(self, first: nn.Module, last: nn.Module, net: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(first, nn.Tanh(), nn.Linear(12, 12), last)
        self.other = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) + self.other(batch[0]), batch[1])


def saves_hyperparameters(context: RankContext) -> None:
    torch.manual_seed(2)
    first = nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12))
    model, path = WithModules(first, nn.Linear(12, 5), nn.Linear(16, 5)), context.tmp / "hp.ckpt"
    trainer = trainer_for(context, plan=plan((2, 2)), module="net")
    saved: list[bool] = []

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.save_checkpoint(path)
            saved.append(True)

    trainer.callbacks.append(Save())  # type: ignore[attr-defined]
    trainer.fit(model, batches())
    assert saved
    checkpoint = torch.load(path, weights_only=False)
    for name, key in (("first", "net.0"), ("last", "net.3"), ("net", "other")):
        for inner, value in checkpoint["hyper_parameters"][name].state_dict().items():
            assert torch.equal(value, checkpoint["state_dict"][f"{key}.{inner}"])
    loaded = WithModules.load_from_checkpoint(path, weights_only=False)
    for mine, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
        assert type(mine) is nn.Parameter
        assert torch.equal(mine, theirs)
    loaded.net(torch.ones(2, 16))


def test_modules_among_hyperparameters_are_saved_whole(pool: RankPool) -> None:
    pool.run(saves_hyperparameters, 2)
