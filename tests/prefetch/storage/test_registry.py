"""Tests of the registry of storage backends, with a backend from another package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import lightning_dlres as dlres
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.cache.client import CacheClient
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.cache.samples import Sample
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.order.sequence import shuffled
from lightning_dlres.prefetch.storage import registry
from lightning_dlres.prefetch.storage.registry import (
    open_storage,
    register_storage,
    storage_names,
)
from lightning_dlres.prefetch.storage.source import source_classes
from tests.support.quiet import trainer

SAMPLES = 40
MODULE_NAME = "storage_of_squares"
OPENER = f"{MODULE_NAME}:open_squares"
# Module of a complete backend. The source "squares://n" has n samples in two folders. Sample i is
# the text of i * i.
BACKEND_SOURCE = """
from __future__ import annotations

import numpy as np

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.storage.base import Reply, Storage
from lightning_dlres.prefetch.storage.manifest import SampleTable


class Squares(Storage):
    def __init__(self, count, nodes):
        super().__init__()
        samples = [str(index * index).encode() for index in range(count)]
        keys = [f"{'even' if index % 2 == 0 else 'odd'}/{index}" for index in range(count)]
        self.table = SampleTable.build(keys, [len(sample) for sample in samples])
        self.nodes = nodes
        self._samples = samples

    def submit(self, fetch_id, node, sample_ids):
        joined = b"".join(self._samples[sample_id] for sample_id in sample_ids.tolist())
        self._reply(Reply(fetch_id, np.frombuffer(joined, dtype=np.uint8)))

    def close(self):
        pass


def open_squares(config, directory, report_progress):
    scheme, _, count = config.addresses[0].partition("://")
    if scheme != "squares":
        raise ConfigError(f"A source must be squares://COUNT, got {config.addresses[0]}.")
    return Squares(int(count), config.nodes)


def open_nothing(config, directory, report_progress):
    return None


not_a_function = 3
"""


@pytest.fixture(autouse=True)
def forked_caches() -> None:
    """Override the fixture that forks cache processes.

    A forked process could not import the module of the backend.
    """


@pytest.fixture(autouse=True)
def squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the backend "squares" for one test."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / f"{MODULE_NAME}.py").write_text(BACKEND_SOURCE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    register_storage("squares", OPENER)
    yield
    sys.modules.pop(MODULE_NAME, None)


def index_and_value(sample: Sample) -> tuple[int, int]:
    return sample.sample_id, int(bytes(sample.data))


@pytest.mark.parametrize("options", [{}, {"nodes": 3, "lookahead": 0}, {"pinned": "1KiB"}])
def test_a_loader_reads_a_third_party_backend_through_the_cache(options: dict[str, Any]) -> None:
    config = host_config(
        f"squares://{SAMPLES}", storage="squares", capacity="4KiB", prefetch=4, **options
    )
    loader = PrefetchLoader("squares", config, batch_size=7, decode=index_and_value, seed=2)
    with closing(loader):
        for epoch in range(2):
            batches = list(loader)
            order = shuffled(SAMPLES, 2, epoch)
            assert torch.cat([indices for indices, _ in batches]).tolist() == order.tolist()
            assert torch.cat([values for _, values in batches]).tolist() == (order**2).tolist()
        assert isinstance(loader.client, CacheClient)


class Model(LightningModule):
    """Module that records the values and labels of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        values, labels = batch
        self.seen += zip(values.tolist(), labels.tolist(), strict=True)
        return self.net(values.float().unsqueeze(1)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_data_module_trains_on_a_third_party_backend_with_labels(tmp_path: Path) -> None:
    model = Model()
    data = dlres.PrefetchCacheDataModule(
        train=f"squares://{SAMPLES}",
        storage="squares",
        labels="folder",
        batch_size=8,
        capacity="4KiB",
        decode=lambda sample: int(bytes(sample.data)),
    )
    trainer(tmp_path, max_epochs=1).fit(model, datamodule=data)
    assert data.classes == ["even", "odd"]
    order = shuffled(SAMPLES, 0, 0).tolist()
    assert model.seen == [(index * index, index % 2) for index in order]


def test_given_classes_must_match_the_folders_of_a_third_party_backend() -> None:
    config = host_config("squares://4", storage="squares").source
    assert source_classes(config) == ("even", "odd")
    config = host_config("squares://4", storage="squares", classes=("even",)).source
    with pytest.raises(ConfigError, match="the folder 'odd' in squares://4"):
        open_storage(config, Path())


def test_an_error_in_an_opener_reaches_the_loader() -> None:
    config = host_config("circles://4", storage="squares")
    with closing(PrefetchLoader("squares", config)) as loader:
        with pytest.raises(ConfigError, match=r"must be squares://COUNT, got circles://4"):
            _ = loader.data_set


@pytest.mark.parametrize(
    ("opener", "message"),
    [
        ("no_such_module_at_all:open", "'broken' must be importable.*No module named"),
        (f"{MODULE_NAME}:open_circles", "'broken' must be importable.*open_circles"),
        (f"{MODULE_NAME}:not_a_function", "'broken' must be a function.*int"),
    ],
)
def test_an_opener_that_cannot_be_imported_is_refused_by_the_config(
    opener: str, message: str
) -> None:
    register_storage("broken", opener)
    with pytest.raises(ConfigError, match=message):
        host_config("squares://4", storage="broken")


def test_an_opener_must_return_a_storage() -> None:
    register_storage("nothing", f"{MODULE_NAME}:open_nothing")
    config = host_config("squares://4", storage="nothing").source
    with pytest.raises(ConfigError, match="'nothing' must return a Storage, got a NoneType"):
        open_storage(config, Path())


@pytest.mark.parametrize(
    "opener", ["storage_of_squares", "a b:open", "module:", ":open", "a.:b", 3]
)
def test_a_malformed_import_path_is_refused(opener: Any) -> None:
    with pytest.raises(ConfigError, match="opener must be an import path 'module:function'"):
        register_storage("other", opener)


@pytest.mark.parametrize("name", ["auto", "direct", "files", "squares"])
def test_a_name_of_another_storage_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no other storage has, got '{name}'"):
        register_storage(name, "other_module:open_storage")


@pytest.mark.parametrize("name", ["", "tcp://host:1", 3])
def test_a_name_that_is_no_word_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="name must be a word"):
        register_storage(name, OPENER)


def test_the_same_backend_may_be_registered_again() -> None:
    register_storage("squares", OPENER)
    assert storage_names() == ("direct", "embedded", "files", "nodes", "squares")


def test_an_unknown_storage_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ConfigError, match=r"storage must be .* or 'squares', got 'cubes'"):
        host_config("squares://4", storage="cubes")
