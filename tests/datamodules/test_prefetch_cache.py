"""PrefetchCacheDataModule under Lightning.

Every strategy gets the right samples, and training resumes with the very next one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset, TensorDataset

import lightning_dlres as dlres
from lightning_dlres.datamodules import prefetch_cache
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.loading.items import ENCODING, encode_item
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.loading.page_locked import pin_batch
from lightning_dlres.prefetch.loading.ranks import Ranks
from lightning_dlres.prefetch.order.sequence import shuffled
from lightning_dlres.prefetch.storage.writer import put
from tests.support.lr_search import FruitlessSearch
from tests.support.quiet import trainer
from tests.support.rank_pool import RankContext, RankPool

pytestmark = pytest.mark.usefixtures("own_runtime_directory")

COUNT = 50


def data_set() -> TensorDataset:
    values = torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(values, torch.arange(COUNT))


class Model(LightningModule):
    """Model that records the samples that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
        # Epoch and sample_ids of each batch.
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[int] = []

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append((self.current_epoch, batch[1].tolist()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated += batch[1].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def order(epoch: int, seed: int = 0) -> list[int]:
    return shuffled(COUNT, seed, epoch).tolist()


def ids_in(seen: list[tuple[int, list[int]]], epoch: int) -> list[int]:
    """Return the sample_ids that a model saw in an epoch."""
    return [sample_id for at, batch in seen if at == epoch for sample_id in batch]


def seen_in(model: Model, epoch: int) -> list[int]:
    return ids_in(model.seen, epoch)


def data_module(**options: Any) -> dlres.PrefetchCacheDataModule:
    return dlres.PrefetchCacheDataModule(
        **{"train": data_set(), "batch_size": 8, "capacity": "1MiB", **options}
    )


def test_epochs_and_validation_get_their_samples(tmp_path: Path) -> None:
    model = Model()
    data = data_module(val=data_set(), num_workers=1)
    trainer(tmp_path).fit(model, datamodule=data)
    for epoch in range(2):
        assert seen_in(model, epoch) == order(epoch)
    # The sanity check has two batches; two whole passes follow.
    assert model.validated == [*range(16), *range(COUNT), *range(COUNT)]
    assert not list(Path(tempfile.gettempdir()).glob(f"dlres-store-{data._job}"))


def test_weights_equal_those_of_a_plain_loop(tmp_path: Path) -> None:
    model, plain = Model(), Model()
    trainer(tmp_path).fit(model, datamodule=data_module())
    optimizer = plain.configure_optimizers()
    for epoch in range(2):
        for at in range(0, COUNT, 8):
            x = data_set()[order(epoch)[at : at + 8]][0]
            optimizer.zero_grad()
            plain.net(x).square().mean().backward()
            optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


@pytest.mark.parametrize("steps", [1, 4, 7, 10])
def test_a_resume_continues_with_the_next_sample(tmp_path: Path, steps: int) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    first = Model()
    trainer(
        tmp_path, callbacks=[saving], enable_checkpointing=True, max_steps=steps, max_epochs=-1
    ).fit(first, datamodule=data_module(seed=4))
    second = Model()
    trainer(tmp_path, max_epochs=3).fit(
        second, datamodule=data_module(seed=4), ckpt_path=tmp_path / "last.ckpt"
    )
    whole = [number for epoch in range(3) for number in order(epoch, 4)]
    assert [n for model in (first, second) for _, numbers in model.seen for n in numbers] == whole


@pytest.mark.parametrize("validates_first", [False, True])
@pytest.mark.parametrize("steps", [2, -1])
def test_a_checkpoint_that_is_saved_after_training_keeps_the_order(
    tmp_path: Path, steps: int, validates_first: bool
) -> None:
    first, data, options = Model(), data_module(seed=4, val=data_set()), {"max_steps": steps}
    training = trainer(tmp_path, max_epochs=-1 if steps > 0 else 2, **options)
    training.fit(first, datamodule=data)
    if validates_first:
        training.validate(first, datamodule=data, verbose=False)
    training.save_checkpoint(tmp_path / "after.ckpt")
    # The seed is that of the checkpoint.
    second = Model()
    trainer(tmp_path, max_epochs=4).fit(
        second, datamodule=data_module(seed=9, val=data_set()), ckpt_path=tmp_path / "after.ckpt"
    )
    # Lightning counts an epoch that max_steps has cut.
    begun = 1 if steps > 0 else 2
    trained = [n for _, numbers in first.seen for n in numbers]
    assert trained == [n for epoch in range(begun) for n in order(epoch, 4)][: len(trained)]
    rest = [n for epoch in range(begun, 4) for n in order(epoch, 4)]
    assert [n for _, numbers in second.seen for n in numbers] == rest


def test_a_second_training_starts_anew(tmp_path: Path) -> None:
    data, model = data_module(seed=4), Model()
    trainer(tmp_path).fit(model, datamodule=data)
    model.seen.clear()
    trainer(tmp_path).fit(model, datamodule=data)
    assert seen_in(model, 0) == order(0, 4)


@pytest.mark.parametrize("failing", ["training_step", "transfer_batch_to_device"])
def test_a_batch_that_was_not_trained_on_comes_again(tmp_path: Path, failing: str) -> None:
    class Failing(Model):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if failing == "training_step" and len(self.trained) == 4:
                raise RuntimeError("device error")
            self.trained.append(batch[1].tolist())
            return super().training_step(batch, batch_idx)

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            if failing == "transfer_batch_to_device" and len(self.trained) == 4:
                raise RuntimeError("device error")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def __init__(self) -> None:
            super().__init__()
            self.trained: list[list[int]] = []

    first, second = Failing(), Model()
    saving = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(RuntimeError, match="device error"):
        trainer(tmp_path, callbacks=[saving], enable_checkpointing=True).fit(
            first, datamodule=data_module()
        )
    trainer(tmp_path, max_epochs=1).fit(
        second, datamodule=data_module(), ckpt_path=tmp_path / "on_exception.ckpt"
    )
    trained = [*first.trained, *(numbers for _, numbers in second.seen)]
    assert [number for numbers in trained for number in numbers] == order(0)


class StepCountingModel(Model):
    """Model that reads the number of steps before a checkpoint is restored, or after."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self._when = when

    def setup(self, stage: str) -> None:
        if self._when == "setup":
            assert self.trainer.estimated_stepping_batches == 7

    def configure_optimizers(self) -> Any:
        if self._when == "configure_optimizers":
            assert self.trainer.estimated_stepping_batches == 7
        return super().configure_optimizers()


@pytest.mark.parametrize("when", ["setup", "configure_optimizers"])
def test_a_resume_works_before_and_after_steps_are_counted(tmp_path: Path, when: str) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    first, second = Model(), StepCountingModel(when)
    trainer(
        tmp_path, callbacks=[saving], enable_checkpointing=True, max_steps=3, max_epochs=-1
    ).fit(first, datamodule=data_module())
    trainer(tmp_path, max_epochs=1).fit(
        second, datamodule=data_module(), ckpt_path=tmp_path / "last.ckpt"
    )
    assert seen_in(first, 0) + seen_in(second, 0) == order(0)


def test_a_checkpoint_that_changes_counted_steps_is_refused(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    trainer(
        tmp_path, callbacks=[saving], enable_checkpointing=True, max_steps=3, max_epochs=-1
    ).fit(Model(), datamodule=data_module(batch_size=10))
    with pytest.raises(dlres.ConfigError, match="in configure_optimizers, not in setup"):
        trainer(tmp_path, max_epochs=1).fit(
            StepCountingModel("setup"), datamodule=data_module(), ckpt_path=tmp_path / "last.ckpt"
        )


def test_overfit_batches_gives_the_same_batches_in_every_epoch(tmp_path: Path) -> None:
    model = Model()
    with pytest.warns(UserWarning, match="overfit_batches"):
        trainer(tmp_path, overfit_batches=2).fit(model, datamodule=data_module())
    assert seen_in(model, 0) == seen_in(model, 1) == list(range(16))


def test_a_resume_after_a_cut_epoch_starts_the_next(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True)
    first, second, whole = Model(), Model(), Model()
    cut = {"limit_train_batches": 3}
    trainer(tmp_path, callbacks=[saving], enable_checkpointing=True, **cut).fit(
        first, datamodule=data_module()
    )
    trainer(tmp_path, max_epochs=4, **cut).fit(
        second, datamodule=data_module(), ckpt_path=tmp_path / "last.ckpt"
    )
    trainer(tmp_path, max_epochs=4, **cut).fit(whole, datamodule=data_module())
    assert first.seen + second.seen == whole.seen
    assert [seen_in(whole, epoch) for epoch in range(4)] == [order(e)[:24] for e in range(4)]


@pytest.mark.parametrize("cut", [{"limit_train_batches": 3}, {"overfit_batches": 3}])
@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 9}])
@pytest.mark.filterwarnings("ignore:overfit_batches")
def test_cut_epochs_resume_after_any_step(
    tmp_path: Path, cut: dict[str, Any], length: dict[str, Any]
) -> None:
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    whole = Model()
    trainer(tmp_path, callbacks=[saving], enable_checkpointing=True, **length, **cut).fit(
        whole, datamodule=data_module()
    )
    for step in (2, 3, 6):
        rest = Model()
        trainer(tmp_path, **length, **cut).fit(
            rest, datamodule=data_module(), ckpt_path=tmp_path / f"step={step}.ckpt"
        )
        assert whole.seen[step:] == rest.seen


class Skipping(Model):
    """Model that ends every epoch before its fourth batch.

    It does not use `batch_idx`, which may be one too small in a run that resumes after such an
    epoch.
    """

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> int | None:  # type: ignore[override]
        if batch[1][0] == order(self.current_epoch)[24]:
            return -1
        super().on_train_batch_start(batch, batch_idx)
        return None


def test_epochs_that_user_code_cuts_resume_after_any_step(tmp_path: Path) -> None:
    steps = ModelCheckpoint(
        tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}", save_last=True
    )
    ends = ModelCheckpoint(
        tmp_path, save_top_k=-1, save_on_train_epoch_end=True, filename="end-{epoch}"
    )
    whole = Skipping()
    trainer(tmp_path, max_epochs=3, callbacks=[steps, ends], enable_checkpointing=True).fit(
        whole, datamodule=data_module()
    )
    assert [seen_in(whole, epoch) for epoch in range(3)] == [order(e)[:24] for e in range(3)]
    for name, done in (("step=2", 2), ("end-epoch=0", 3), ("step=4", 4), ("end-epoch=1", 6)):
        rest = Skipping()
        trainer(tmp_path, max_epochs=3).fit(
            rest, datamodule=data_module(), ckpt_path=tmp_path / f"{name}.ckpt"
        )
        assert rest.seen == whole.seen[done:], name


def test_a_rest_too_small_for_a_batch_is_dropped(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=5)
    trainer(
        tmp_path, callbacks=[saving], enable_checkpointing=True, max_steps=5, max_epochs=-1
    ).fit(Model(), datamodule=data_module(drop_last=True))
    model = Model()
    trainer(tmp_path, max_epochs=3).fit(
        model,
        datamodule=data_module(drop_last=True, batch_size=16),
        ckpt_path=tmp_path / "last.ckpt",
    )
    # 10 samples are left of the first epoch.
    assert [seen_in(model, epoch) for epoch in range(3)] == [[], order(1)[:48], order(2)[:48]]


def test_an_existing_store_is_used_if_it_holds_the_data_set(tmp_path: Path) -> None:
    for _ in range(2):
        model = Model()
        trainer(tmp_path).fit(model, datamodule=data_module(store=tmp_path / "kept"))
        assert seen_in(model, 1) == order(1)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["train"]
    few = TensorDataset(torch.zeros(7, 4), torch.arange(7))
    with pytest.raises(dlres.ConfigError, match=r"the 7 samples of the data set .*got 50 samples"):
        trainer(tmp_path).fit(Model(), datamodule=data_module(train=few, store=tmp_path / "kept"))


def test_a_store_of_another_data_set_of_the_same_length_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).fit(Model(), datamodule=data_module(store=tmp_path / "kept"))
    scaled = TensorDataset(2 * data_set().tensors[0], torch.arange(COUNT))
    with pytest.raises(
        dlres.ConfigError, match=r"must hold the data set, got other bytes for sample 0"
    ):
        trainer(tmp_path).fit(
            Model(), datamodule=data_module(train=scaled, store=tmp_path / "kept")
        )


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_store_that_is_a_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(dlres.ConfigError, match="store must be in a directory that can be written"):
        trainer(tmp_path).fit(Model(), datamodule=data_module(store=tmp_path / name))


class Overtaken(TensorDataset):
    """Data set during whose writing another process finishes a store of other samples."""

    def __init__(self, directory: Path, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.directory = directory

    def __getitem__(self, index: int) -> Any:
        if not self.directory.exists():
            put(data_set(), self.directory, encode=encode_item, encoding=ENCODING)
        return super().__getitem__(index)


@pytest.mark.parametrize("factor", [1, 2])
def test_a_store_that_another_process_finishes_first_is_compared(
    factor: int, tmp_path: Path
) -> None:
    overtaken = Overtaken(
        tmp_path / "kept" / "train", factor * data_set().tensors[0], torch.arange(COUNT)
    )
    model = Model()
    raised = pytest.raises(dlres.ConfigError, match="got other bytes for sample 0")
    with raised if factor == 2 else nullcontext():
        trainer(tmp_path).fit(
            model, datamodule=data_module(train=overtaken, store=tmp_path / "kept")
        )
    assert seen_in(model, 1) == ([] if factor == 2 else order(1))
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["train"]


class Augmented(TensorDataset):
    """Data set with a random transform."""

    def __getitem__(self, index: int) -> Any:
        value, number = super().__getitem__(index)
        return value + torch.rand(4), number


def test_random_transforms_that_a_store_freezes_cause_a_warning(tmp_path: Path) -> None:
    augmented = Augmented(*data_set().tensors)
    with pytest.warns(UserWarning, match="Augmented had other bytes .* into `decode`"):
        trainer(tmp_path).fit(
            Model(), datamodule=data_module(train=augmented, store=tmp_path / "kept")
        )
    # The store is used again, although the items differ.
    trainer(tmp_path).fit(Model(), datamodule=data_module(train=augmented, store=tmp_path / "kept"))


class LengthRecorder(Model):
    """Model that gets samples without `decode`, and records their lengths."""

    def on_train_batch_start(self, batch: list[dlres.Sample], batch_idx: int) -> None:
        self.seen.append((self.current_epoch, [len(sample.data) for sample in batch]))

    def training_step(self, batch: list[dlres.Sample], batch_idx: int) -> Tensor:
        return self.net(batch[0].tensor()[:4] / 256).mean()


def test_a_step_may_get_the_samples_themselves(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for size in range(10, 30):
        (tmp_path / "train" / str(size)).write_bytes(bytes(size))
    model = LengthRecorder()
    trainer(tmp_path).fit(model, datamodule=data_module(train=tmp_path / "train"))
    assert seen_in(model, 1) == [10 + number for number in shuffled(20, 0, 1).tolist()]


class Unreadable(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise OSError("disk error")


def test_a_store_that_cannot_be_written_is_an_error_on_every_rank(
    pool: RankPool, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="dl") as runtime:
        options = {"train": Unreadable(torch.zeros(3, 4), torch.arange(3)), "temporary": runtime}
        writer, other = pool.run_expecting_errors(
            fit_on_ranks, 2, str(tmp_path), runtime, options, timeout=60
        )
        assert "disk error" in writer.error_message
        assert "got an error on another rank" in other.error_message
        assert not list(Path(runtime).glob("dlres-store-*"))


def test_the_error_of_a_too_small_split_names_a_large_enough_capacity(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "large").write_bytes(bytes(1000))
    data = data_module(train=None, val=tmp_path / "val", capacity=2000, storage="files")
    with pytest.raises(dlres.ConfigError, match=r"1/4 for this split.*Use capacity=8000"):
        trainer(tmp_path).validate(Model(), datamodule=data)


def fit_on_ranks(context: RankContext, work: str, runtime: str, options: dict[str, Any]) -> Any:
    """Train on the job's ranks; return what the model saw.

    `options` are those of the Trainer, the data sets `train` and `val`, and the settings `batch`,
    `resume` (a checkpoint) and `temporary` (a directory).
    """
    os.environ["XDG_RUNTIME_DIR"] = runtime
    model = Model()
    saving = ModelCheckpoint(work, save_last=True, every_n_train_steps=1)
    strategy = options.pop("strategy", "ddp")
    batch = options.pop("batch", 4)
    resume = options.pop("resume", None)
    source = {name: options.pop(name) for name in ("train", "val") if name in options}
    tempfile.tempdir = options.pop("temporary", None)
    trainer(
        Path(work),
        strategy=strategy,
        devices=context.world_size,
        plugins=[context.environment],
        callbacks=[saving],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
        **options,
    ).fit(model, datamodule=data_module(batch_size=batch, tail="pad", **source), ckpt_path=resume)
    return (model.seen, model.validated) if "val" in source else model.seen


def test_ranks_share_an_epoch_and_other_ranks_resume_it(pool: RankPool, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="dl") as runtime:
        first = pool.run(
            fit_on_ranks, 2, str(tmp_path), runtime, {"max_steps": 3, "max_epochs": -1}, timeout=100
        )
        assert [len(numbers) for _, numbers in first[0]] == [4, 4, 4]
        trained = [sample_id for seen in first for sample_id in ids_in(seen, 0)]
        assert sorted(trained) == sorted(order(0)[:24])
        resume = str(tmp_path / "last.ckpt")
        second = pool.run(
            fit_on_ranks,
            3,
            str(tmp_path),
            runtime,
            {"max_epochs": 3, "resume": resume},
            timeout=100,
        )
        rest = [sample_id for seen in second for sample_id in ids_in(seen, 0)]
        # 26 samples are left: three ranks pad them to 27 with the epoch's first.
        assert sorted(rest) == sorted([*order(0)[24:], order(0)[0]])
        for epoch in (1, 2):
            trained = [sample_id for seen in second for sample_id in ids_in(seen, epoch)]
            assert sorted(trained) == sorted([*order(epoch), order(epoch)[0]])


def test_a_pipeline_reads_each_batch_once_for_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="dl") as runtime:
        sets = [Subset(data_set(), [3, 1]), Subset(data_set(), range(12))]
        options = {"strategy": "dlres_hetero_pipe", "max_epochs": 2, "batch": 10, "val": sets}
        for seen, validated in pool.run(
            fit_on_ranks, 2, str(tmp_path), runtime, options, timeout=100
        ):
            assert validated == [3, 1, *range(12)] * 2
            for epoch in range(2):
                assert ids_in(seen, epoch) == order(epoch)


class Notes(Logger):
    """Logger that keeps all metrics."""

    name, version = "notes", 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_loggers_get_the_metrics(tmp_path: Path) -> None:
    notes = Notes()
    trainer(tmp_path, logger=notes, log_every_n_steps=2, max_epochs=3).fit(
        Model(), datamodule=data_module()
    )
    logged = {name: value for entry in notes.metrics for name, value in entry.items()}
    for name in ("hit_rate", "requests_per_sample", "bytes_per_sample", "stall_ms", "cache_bytes"):
        assert f"prefetch/{name}" in logged
    assert all(entry.get("prefetch/hit_rate", 0) <= 1 for entry in notes.metrics)


def test_a_missing_split_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(dlres.ConfigError, match=", got None"):
        trainer(tmp_path).fit(Model(), datamodule=dlres.PrefetchCacheDataModule())
    with pytest.raises(dlres.ConfigError, match="Nothing is there"):
        trainer(tmp_path).fit(Model(), datamodule=data_module(train=str(tmp_path / "nothing")))
    with pytest.raises(dlres.ConfigError, match="must be attached"):
        data_module().train_dataloader()


class WithOwnSetup(dlres.PrefetchCacheDataModule):
    def setup(self, stage: str) -> None:
        """Forget the call of the original."""


def test_a_setup_without_the_original_is_named(tmp_path: Path) -> None:
    with pytest.raises(dlres.ConfigError, match="setup must run before WithOwnSetup makes a load"):
        trainer(tmp_path).fit(Model(), datamodule=WithOwnSetup(train=str(tmp_path)))


def set_up(data: dlres.PrefetchCacheDataModule, stage: str, directory: Path) -> None:
    """Run `setup` as a Trainer does at the start of a stage."""
    data.trainer = trainer(directory)
    data.trainer.state.fn = TrainerFn(stage)
    data.setup(stage)


def test_a_loader_without_batches_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The only sample goes to another rank.
    ranks = Ranks(1, 2, (1,)), False
    monkeypatch.setattr(prefetch_cache, "data_parallel_ranks", lambda _: ranks)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "sample").write_bytes(b"x")
    data = data_module(predict=[tmp_path / "one"])
    set_up(data, "predict", tmp_path)
    (first,), (again,) = data.predict_dataloader(), data.predict_dataloader()  # type: ignore[misc]
    assert len(first) == 0
    assert again is first
    data.teardown("predict")


def test_use_after_setup_replaces_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "sample").write_bytes(b"x")
    data = data_module(predict=data_set(), batch_size=1)
    set_up(data, "predict", tmp_path)
    data.use("predict", tmp_path / "files")
    ((sample,),) = data.predict_dataloader()
    assert sample.key == "sample"
    data.teardown("predict")


def test_use_after_setup_refuses_a_data_set_without_a_store(tmp_path: Path) -> None:
    data = data_module(predict=[data_set(), data_set()])
    set_up(data, "predict", tmp_path)
    data.use("predict", data_set())
    with pytest.raises(dlres.ConfigError, match=r"Call use\(\) before super\(\)\.setup"):
        data.predict_dataloader()
    data.teardown("predict")


def test_a_list_of_arrays_has_one_loader_for_each(tmp_path: Path) -> None:
    arrays = [np.zeros((3, 2)), np.ones((3, 2))]
    data = data_module(val=arrays)
    set_up(data, "validate", tmp_path)
    for loader, array in zip(data.val_dataloader(), arrays, strict=True):
        (batch,) = loader
        assert batch.tolist() == array.tolist()
    data.teardown("validate")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_an_iterable_data_set_is_refused_when_it_is_set_late() -> None:
    with pytest.raises(dlres.ConfigError, match="IterableDataset Stream"):
        data_module().use("test", Stream())


@pytest.mark.parametrize("options", [{}, {"storage": "files"}], ids=["direct", "cached"])
def test_the_tuner_scales_the_batch_size(tmp_path: Path, options: dict[str, Any]) -> None:
    model, data = Model(), data_module(batch_size=2, **options)
    tuned_trainer = trainer(tmp_path)
    Tuner(tuned_trainer).scale_batch_size(
        model, datamodule=data, mode="power", init_val=1, max_trials=4, steps_per_trial=1
    )
    assert data.batch_size == 8
    model.seen.clear()
    tuned_trainer.fit(model, datamodule=data)
    assert seen_in(model, 0) == order(0)
    assert max(len(numbers) for _, numbers in model.seen) == 8
    with pytest.raises(dlres.ConfigError, match="batch"):
        data.batch_size = 0


@pytest.mark.parametrize("options", [{}, {"storage": "files"}], ids=["direct", "cached"])
@pytest.mark.parametrize("resumed_from", [0, 3, 7])
def test_a_search_at_the_start_of_fit_uses_up_no_samples(
    tmp_path: Path, options: dict[str, Any], resumed_from: int
) -> None:
    path = tmp_path / "last.ckpt"
    if resumed_from:
        saving = trainer(tmp_path, max_steps=resumed_from, max_epochs=-1)
        saving.fit(Model(), datamodule=data_module(**options))
        saving.save_checkpoint(path)
    model = Model()
    model.lr = 0.1
    steps = 5
    trainer(tmp_path, callbacks=[FruitlessSearch(steps)]).fit(
        model, datamodule=data_module(**options), ckpt_path=path if resumed_from else None
    )
    # The search ends early if the loss diverges, and at a resume it goes on from its step.
    trained = [number for _, numbers in model.seen for number in numbers]
    whole = [number for epoch in range(2) for number in order(epoch)]
    rest = whole[resumed_from * 8 if resumed_from < 7 else COUNT :]
    assert trained[-len(rest) :] == rest
    assert len(trained) > len(rest)


def test_a_search_uses_up_no_pass_over_the_validation_samples(tmp_path: Path) -> None:
    seeds: list[int] = []

    def decode(sample: dlres.Sample) -> Tensor:
        seeds.append(sample.seed)
        return torch.zeros(4)

    class Validated(Model):
        lr = 0.1

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            pass

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            seeds_of_passes.append(seeds[-1])

    passes = []
    for search in ([], [FruitlessSearch(COUNT // 8 + 1)]):
        seeds_of_passes: list[int] = []
        trainer(tmp_path, callbacks=search, num_sanity_val_steps=0).fit(
            Validated(), datamodule=data_module(val=data_set(), decode=decode)
        )
        passes.append(seeds_of_passes)
    plain, searched = passes
    assert len(searched) > len(plain)
    assert searched[-len(plain) :] == plain


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


def test_all_tensors_of_a_batch_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(NamedTuple):
        first: Any
        second: Any

    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)
    one = torch.ones(1)
    batch = {"a": [one, "text", 3], "b": Pair((one, None), Pinnable()), "c": b"bytes"}
    result = pin_batch(batch)
    assert result == {"a": [2, "text", 3], "b": Pair((2, None), "pinned"), "c": b"bytes"}
    assert type(result["b"]) is Pair


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}])
def test_batches_are_pinned_if_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: dict[str, Any]
) -> None:
    calls: list[int] = []

    def pin(tensor: Tensor) -> Tensor:
        calls.append(len(tensor))
        return tensor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    put(data_set(), tmp_path, encode=encode_item, encoding=ENCODING)
    config = host_config(tmp_path)
    with closing(PrefetchLoader("p", config, batch_size=25, pin_memory=True, **workers)) as loader:
        assert len(list(loader)) == 2
    assert calls == [25, 25, 25, 25]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch"),
        ({"batch_size": "8"}, "batch"),
        ({"decode": lambda s: s, "num_workers": 1, "worker_type": "process"}, "to another process"),
        ({"capacity": "large"}, "capacity"),
        ({"tail": "cut"}, "tail"),
        ({"tail": "drop"}, "or drop_last=True"),
        ({"drop_last": 1}, "drop_last must be True or False, got 1"),
        ({"pin_memory": "yes"}, "pin_memory must be True or False, got 'yes'"),
        ({"train": Stream()}, "train must be .* the IterableDataset Stream"),
        ({"val": Stream()}, "val must be .* the IterableDataset Stream"),
        ({"storage": "tape"}, "storage"),
        ({"storage": "tcp://a:1"}, "train"),
        ({"num_workers": -1}, "num_workers"),
        ({"replicas": 7}, "replicas"),
    ],
)
def test_arguments_out_of_range_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(dlres.ConfigError, match=words):
        data_module(**options)
