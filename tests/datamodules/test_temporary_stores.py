"""Temporary stores end with their owners.

The next process removes the store of a killed process, but never that of a living one.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import TensorDataset

import lightning_dlres as dlres
from lightning_dlres.core.host.locks import locked
from lightning_dlres.datamodules import stores
from lightning_dlres.datamodules.stores import (
    own_temporary_directory,
    temporary_directory,
    write_store,
)
from tests.support.quiet import trainer


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def make_abandoned_store(job: str) -> Path:
    """Make the store of a killed process: the lock is free, but its file is still there."""
    directory = temporary_directory(job)
    directory.mkdir()
    (directory / "data").write_bytes(b"x")
    directory.with_name(f"{job}.lock").touch()
    return directory


def test_the_next_process_removes_the_store_of_a_killed_one(tmp_path: Path) -> None:
    remove_living = own_temporary_directory(temporary_directory("living"))
    living = temporary_directory("living")
    (living / "data").write_bytes(b"x")
    dead, base = make_abandoned_store("dead"), living.parent
    # Links in the store, or in place of a store, are not followed.
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_bytes(b"x")
    (dead / "link").symlink_to(outside)
    (base / "linked").symlink_to(outside)
    (base / "linked.lock").touch()
    (base / "trap.lock").symlink_to(outside / "data")
    (base / "unknown").mkdir()
    remove_next = own_temporary_directory(temporary_directory("next"))
    assert not dead.exists()
    assert (living / "data").exists()
    assert (outside / "data").read_bytes() == b"x"
    assert (base / "unknown").exists()
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    remove_living()
    assert not living.exists()
    assert temporary_directory("next").exists()
    remove_next()
    assert not [path for path in base.iterdir() if path.name.startswith(("living", "next"))]


def test_a_writer_of_a_lasting_store_removes_what_killed_writers_left_unfinished(
    tmp_path: Path,
) -> None:
    base = tmp_path / "stores"
    # A user's own files, which look like a directory and its lock.
    (base / "poetry").mkdir(parents=True)
    (base / "poetry.lock").touch()
    samples = TensorDataset(torch.arange(8.0))
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    unfinished: list[Path] = []

    def record_and_interrupt(*_: object, **__: object) -> None:
        # A store that is being written has another name than a finished one.
        unfinished.extend(path for path in base.iterdir() if path.name.startswith(".train-"))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stores, "put", record_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_store(strategy, samples, base / "train", is_writer=True)
    assert {path.name for path in base.iterdir()} == {"poetry", "poetry.lock"}
    (lock,) = unfinished
    # The name of an unfinished store ends with eight random characters.
    dead, living = lock.with_suffix(""), lock.with_name(lock.stem[:-8] + "00000000")
    lock.touch()
    for directory in (dead, living):
        directory.mkdir()
        (directory / "data").write_bytes(b"x")
    with locked(living.with_name(living.name + ".lock")):
        write_store(strategy, samples, base / "train", is_writer=True)
    assert {path.name for path in base.iterdir()} == {
        "poetry",
        "poetry.lock",
        "train",
        living.name,
        f"{living.name}.lock",
    }


def test_a_forked_process_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = temporary_directory("job")
    remove = own_temporary_directory(directory)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 1)
        remove()
    assert directory.exists()
    with locked(directory.with_name("job.lock")) as lock:
        assert lock is None
    remove()
    assert not directory.exists()


def test_a_directory_that_others_may_enter_is_refused() -> None:
    base = temporary_directory("job").parent
    base.chmod(0o755)
    with pytest.raises(dlres.ConfigError, match="this user alone"):
        temporary_directory("job")


def test_a_run_removes_its_own_store_and_abandoned_ones(tmp_path: Path) -> None:
    dead = make_abandoned_store("dead")
    data = dlres.PrefetchCacheDataModule(train=TensorDataset(torch.zeros(8, 32)), batch_size=4)
    during: list[list[str]] = []

    class Model(BoringModel):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            during.append([path.suffix for path in sorted(dead.parent.iterdir())])
            return self.layer(batch[0]).sum()

    trainer(tmp_path, max_epochs=1).fit(Model(), datamodule=data)
    assert during == [["", ".lock"]] * 2
    assert list(dead.parent.iterdir()) == []
