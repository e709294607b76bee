"""Labels from folders, and several sets of one split, with a Trainer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_dlres as dlres
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.cache.samples import Sample
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.order.sequence import shuffled
from lightning_dlres.prefetch.storage.writer import put
from tests.support.quiet import trainer
from tests.support.rank_pool import RankContext, RankPool

# In the order of bytes, as torchvision sorts them.
CLASSES = ["Zebra", "cat", "ünit"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Splits with up to three classes of four images, and other files beside these."""
    for split, classes in (("train", CLASSES), ("val", CLASSES[1:]), ("other", CLASSES[:1])):
        for number, name in enumerate(classes):
            folder = tmp_path / split / name / "deep"
            folder.mkdir(parents=True)
            for image in range(4):
                ending = "JPG" if image % 2 else "jpg"
                data = bytes([CLASSES.index(name), image, number])
                (folder.parent / f"{image}.{ending}").write_bytes(data)
            (folder / "notes.txt").write_text("no image")
        (tmp_path / split / "README.md").write_text("no image, and in no class")
    return tmp_path


def as_floats(sample: Sample) -> Tensor:
    return sample.tensor().float()


class Classifier(LightningModule):
    """Model that records the label of each sample beside the class in its file."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, len(CLASSES))
        self.trained: list[tuple[int, int, int]] = []
        self.validated: dict[int, list[tuple[int, int]]] = {}
        self.predicted: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        values, labels = batch
        for value, label in zip(values.tolist(), labels.tolist(), strict=True):
            self.trained.append((label, int(value[0]), int(value[1])))
        return nn.functional.cross_entropy(self.net(values), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        seen = zip(batch[1].tolist(), batch[0][:, 0].int().tolist(), strict=True)
        self.validated.setdefault(dataloader_idx, []).extend(seen)

    def test_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.predicted.append(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def one_epoch_trainer(directory: Path, **options: Any) -> Trainer:
    return trainer(directory, **{"max_epochs": 1, "num_sanity_val_steps": 0, **options})


def data_module(root: Path, **options: Any) -> dlres.PrefetchCacheDataModule:
    defaults = {"labels": "folder", "extensions": [".jpg"], "decode": as_floats, "batch_size": 5}
    return dlres.PrefetchCacheDataModule(**{"train": root / "train", **defaults, **options})


def test_labels_and_several_sets(root: Path) -> None:
    model = Classifier()
    data = data_module(
        root,
        val=[root / "val", f"file://{root}/train"],
        test=(root / "val", root / "other"),
        predict=root / "train",
    )
    # The classes are known without a Trainer, because models need their number.
    assert data.classes == CLASSES
    assert data.class_to_idx == {"Zebra": 0, "cat": 1, "ünit": 2}
    epoch_trainer = one_epoch_trainer(root)
    epoch_trainer.fit(model, datamodule=data)
    expected = [(at // 4, at // 4, at % 4) for at in shuffled(12, 0, 0).tolist()]
    assert model.trained == expected
    # The classes of the training samples count, not those of the set.
    val_labels, train_labels = [1] * 4 + [2] * 4, [0] * 4 + [1] * 4 + [2] * 4
    assert model.validated == {
        0: [(label, label) for label in val_labels],
        1: [(label, label) for label in train_labels],
    }
    model.validated.clear()
    epoch_trainer.test(model, datamodule=data, verbose=False)
    assert model.validated == {0: [(label, label) for label in val_labels], 1: [(0, 0)] * 4}
    epoch_trainer.predict(model, datamodule=data, return_predictions=False)
    assert [len(batch) for batch in model.predicted] == [5, 5, 2]


def test_each_set_of_a_list_has_its_own_cache(root: Path) -> None:
    model = Classifier()
    data = data_module(
        root, train=None, val=[root / "val", root / "other"], labels=CLASSES, storage="files"
    )
    one_epoch_trainer(root).validate(model, datamodule=data, verbose=False)
    assert model.validated == {0: [(1, 1)] * 4 + [(2, 2)] * 4, 1: [(0, 0)] * 4}


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "worker_type": "process"}])
def test_a_store_keeps_labels(root: Path, tmp_path: Path, workers: dict[str, Any]) -> None:
    put(root / "train", tmp_path / "store", packs=2)
    listing = root / "train" / "list.txt"
    listing.write_text("\n".join(f"{name}/{at}.jpg" for name in CLASSES for at in (0, 2)))
    for source, count in ((tmp_path / "store", 4), (listing, 2)):
        config = host_config(source, classes=tuple(CLASSES), extensions=".JPG")
        loader = PrefetchLoader(
            "labels", config, batch_size=12, shuffle=False, decode=as_floats, **workers
        )
        with closing(loader):
            ((values, labels),) = loader
        expected = [number for number in range(3) for _ in range(count)]
        assert labels.tolist() == values[:, 0].tolist() == expected
    assert data_module(root, train=tmp_path / "store").classes == CLASSES
    listing.write_text("\n".join(f"{name}/0.jpg" for name in reversed(CLASSES)))
    assert data_module(root, train=listing).classes == CLASSES


def test_without_decode_samples_come_with_their_labels(root: Path) -> None:
    config = host_config(root / "train", classes=tuple(CLASSES), extensions=(".jpg",))
    with closing(PrefetchLoader("plain", config, batch_size=12, shuffle=False)) as loader:
        (batch,) = loader
    assert [label for _, label in batch] == [0] * 4 + [1] * 4 + [2] * 4
    assert {sample.key.partition("/")[0] for sample, _ in batch} == set(CLASSES)


def test_passes_over_each_set_continue_after_a_checkpoint(root: Path) -> None:
    seeds: list[tuple[str, int]] = []

    def record_seed(sample: Sample) -> Tensor:
        if sample.key.endswith("/0.jpg"):
            seeds.append((sample.key, sample.seed))
        return as_floats(sample)

    def run(epochs: int, resume: Any) -> list[tuple[str, int]]:
        seeds.clear()
        saving = ModelCheckpoint(root / f"{epochs}", save_last=True)
        data = data_module(root, val=[root / "val", root / "other"], decode=record_seed)
        one_epoch_trainer(
            root, max_epochs=epochs, callbacks=[saving], enable_checkpointing=True
        ).fit(Classifier(), datamodule=data, ckpt_path=resume)
        return list(seeds)

    first = run(1, None)
    rest = run(3, root / "1" / "last.ckpt")
    whole = run(3, None)
    assert first + rest == whole
    assert len({seed for key, seed in whole if key == "Zebra/0.jpg"}) == 3


def test_given_classes_define_the_numbers(root: Path) -> None:
    data = data_module(root, val=root / "val", labels=["cat", "ünit", "Zebra"])
    model = Classifier()
    one_epoch_trainer(root).validate(model, datamodule=data, verbose=False)
    assert model.validated == {0: [(0, 1)] * 4 + [(1, 2)] * 4}
    with pytest.raises(dlres.ConfigError, match="labels must give the 3 classes of the check"):
        data.load_state_dict({"classes": CLASSES})
    data = data_module(root, train=None, val=root / "other", labels=["cat"])
    with pytest.raises(dlres.ConfigError, match=r"'Zebra' in .*labels=\['Zebra', 'cat'\]"):
        one_epoch_trainer(root).validate(model, datamodule=data)


def test_sources_without_classes_are_refused_with_their_names(root: Path) -> None:
    with pytest.raises(dlres.ConfigError, match=r"sample 'README.md' of .*train.*extensions"):
        _ = data_module(root, extensions=None).classes
    flat = root / "train" / "cat"
    with pytest.raises(dlres.ConfigError, match=f"sample '0.jpg' of {flat}"):
        one_epoch_trainer(root).fit(Classifier(), datamodule=data_module(root, train=flat))
    listing = root / "train" / "list.txt"
    listing.write_text("./cat/0.jpg\n")
    with pytest.raises(dlres.ConfigError, match=r"sample './cat/0.jpg' of"):
        _ = data_module(root, train=listing).classes
    with pytest.raises(dlres.ConfigError, match="labels must be 'folder' or a list"):
        _ = data_module(root, labels=None).classes
    with pytest.raises(dlres.ConfigError, match="train, val or test must be given"):
        _ = data_module(root, train=None, predict=flat).classes


def fit_on_ranks(context: RankContext, work: str, source: str, strategy: str) -> None:
    """Train on a folder with labels, on the job's ranks."""
    ranks = {"devices": context.world_size, "plugins": [context.environment]}
    data = data_module(Path(work), train=source)
    one_epoch_trainer(Path(work), strategy=strategy, **ranks).fit(Classifier(), datamodule=data)


@pytest.mark.parametrize("strategy", ["ddp", "dlres_hetero_pipe"])
@pytest.mark.parametrize(
    ("source", "words"), [("train/cat", "sample '0.jpg' of"), ("missing", "Nothing is there")]
)
def test_all_ranks_raise_the_error_of_the_rank_that_lists_folders(
    pool: RankPool, root: Path, strategy: str, source: str, words: str
) -> None:
    arguments = str(root), str(root / source), strategy
    outcomes = pool.run_expecting_errors(fit_on_ranks, 2, *arguments, timeout=60)
    assert [outcome.error_type for outcome in outcomes] == ["ConfigError"] * 2
    assert all(words in outcome.error_message for outcome in outcomes)


@pytest.mark.parametrize("source", ["folder", "store", "listing"])
def test_endings_that_no_sample_has_are_refused(root: Path, source: str) -> None:
    paths = {"folder": root / "train", "store": root / "store", "listing": root / "list.txt"}
    put(root / "train", paths["store"])
    paths["listing"].write_text("train/cat/0.jpg\n")
    with pytest.raises(dlres.ConfigError, match=r"extensions must .*got \['.png'\]"):
        _ = data_module(root, train=paths[source], extensions=".png").classes


DATA = TensorDataset(torch.zeros(3, 1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels": "folders"}, "labels must be 'folder', None, or a list"),
        ({"labels": ["a", "a"]}, "labels must be"),
        ({"labels": []}, "labels must be"),
        ({"labels": 5}, "labels must be"),
        ({"train": DATA}, "labels must be None where train is a map-style data set"),
        ({"val": ["a", DATA]}, "labels must be None where val is a map-style data set"),
        ({"extensions": "jpg"}, "extensions must be .* begin with a dot, got 'jpg'"),
        ({"extensions": []}, "extensions must be"),
        ({"extensions": 3}, "extensions must be"),
        ({"extensions": [".jpg", 3]}, "extensions must be"),
        ({"train": "tcp://a:1"}, "extensions must be None"),
        ({"train": ["a", "b"]}, "train must be one source, got a list of 2"),
        ({"val": []}, "val must be one source, or a list"),
        ({"val": ["a", None]}, "val must be one source, or a list"),
        ({"test": ["a", ["tcp://a:1", "b"]]}, "storage='files' must be one folder"),
        ({"storage_options": {"key": "x"}}, "storage_options must be None where no split is a URL"),
    ],
)
def test_bad_values_are_refused_at_construction(options: dict[str, Any], words: str) -> None:
    with pytest.raises(dlres.ConfigError, match=words):
        data_module(Path("data"), **options)
