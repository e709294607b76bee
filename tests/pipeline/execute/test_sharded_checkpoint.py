"""Checkpoints that several ranks write, and of which each reads what it needs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dlres import ConfigError, consolidate_checkpoint
from lightning_dlres.pipeline.execute import sharded_checkpoint
from lightning_dlres.pipeline.execute.sharded_checkpoint import (
    REST,
    ShardedCheckpoint,
    by_index,
    is_sharded,
    save_sharded,
)

STATES: dict[int, dict[str, Any]] = {
    0: {
        "state_dict": {
            "net.0.weight": torch.arange(6.0).view(2, 3),
            "net.0.empty": torch.ones(0, 4),
            "net.0._extra_state": {"seen": [1, 2], "scale": torch.ones(1), "name": "a"},
        },
        "optimizer_0": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}},
    },
    2: {
        "state_dict": {"net.10.weight": torch.ones(5, dtype=torch.bfloat16) / 3},
        "optimizer_0": {10: {"step": 7, "blocks": [torch.zeros(2), torch.ones(3)]}, 2: {}},
    },
}
OTHERS = {"epoch": 1, "state_dict": {}, "optimizer_states": [{"param_groups": [{"lr": 0.1}]}]}


def save_together(path: Path, states: dict[int, dict[str, Any]], ranks: int = 3) -> None:
    """Save with one thread per rank."""
    barrier = threading.Barrier(ranks, timeout=30)

    def save(rank: int) -> None:
        save_sharded(
            path,
            states.get(rank, {}),
            OTHERS,
            rank=rank,
            writers=states.keys(),
            barrier=lambda: barrier.wait() and None,
        )

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(save, range(ranks)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_together(tmp_path / "a.ckpt", STATES)
    return tmp_path / "a.ckpt"


def test_a_part_is_read_into_tensors_that_exist(path: Path) -> None:
    weight = torch.zeros(5)
    read = ShardedCheckpoint(path).read("state_dict", ["net.10.weight"], {"net.10.weight": weight})
    assert read.keys() == {"net.10.weight"}
    assert torch.equal(weight, STATES[2]["state_dict"]["net.10.weight"].float())


def test_all_kinds_of_entries_come_back(path: Path) -> None:
    shards = ShardedCheckpoint(path)
    names = shards.shapes("state_dict")
    assert names == {
        "net.0.weight": torch.Size([2, 3]),
        "net.0.empty": torch.Size([0, 4]),
        "net.0._extra_state": None,
        "net.10.weight": torch.Size([5]),
    }
    state = shards.read("state_dict", names)
    assert state["net.10.weight"].dtype == torch.bfloat16
    assert state["net.0.empty"].shape == (0, 4)
    extra = state["net.0._extra_state"]
    assert (extra["seen"], extra["name"], extra["scale"].item()) == ([1, 2], "a", 1.0)
    states = by_index(shards.read("optimizer_0", shards.shapes("optimizer_0")))
    assert states[0]["step"].item() == 3.0
    assert states[10]["step"] == 7
    assert [block.tolist() for block in states[10]["blocks"]] == [[0, 0], [1, 1, 1]]


def test_an_ordinary_checkpoint_is_made_of_it(path: Path, tmp_path: Path) -> None:
    consolidate_checkpoint(path, tmp_path / "whole.ckpt")
    whole = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    assert whole["epoch"] == 1
    assert torch.equal(whole["state_dict"]["net.0.weight"], STATES[0]["state_dict"]["net.0.weight"])
    (optimizer,) = whole["optimizer_states"]
    assert list(optimizer["state"]) == [0, 10]
    assert optimizer["param_groups"] == [{"lr": 0.1}]
    with pytest.raises(ConfigError, match="file must be the path of a new file"):
        consolidate_checkpoint(path, tmp_path / "whole.ckpt")
    with pytest.raises(ConfigError, match="directory must be a checkpoint that ranks"):
        consolidate_checkpoint(tmp_path / "whole.ckpt", tmp_path / "other.ckpt")


def test_storage_that_is_not_shared_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_checkpoint, "save", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="on storage that all ranks share, got no part of rank 0"):
        save_together(tmp_path / "a.ckpt", {0: {"state_dict": {}}}, ranks=1)
    assert not (tmp_path / "a.ckpt").exists()


@pytest.mark.parametrize("kind", ["file", "directory", "checkpoint"])
def test_what_has_the_name_is_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.ckpt"
    if kind == "file":
        path.write_text("an ordinary checkpoint")
    elif kind == "directory":
        path.mkdir()
        (path / "note").write_text("old")
    else:
        save_together(path, {0: {"state_dict": {"old": torch.ones(1)}}}, ranks=2)
    save_together(path, STATES)
    assert "old" not in ShardedCheckpoint(path).shapes("state_dict")
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "0", "2", REST]
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_failed_save_leaves_the_old_checkpoint(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(sharded_checkpoint, "_merge_shards", fail)
        with pytest.raises(OSError, match="no space left"):
            save_together(path, {0: {"state_dict": {"new": torch.ones(1)}}}, ranks=1)
    assert is_sharded(path)
    assert "new" not in ShardedCheckpoint(path).shapes("state_dict")
    save_together(path, {0: {"state_dict": {"new": torch.ones(1)}}}, ranks=1)
    assert ShardedCheckpoint(path).shapes("state_dict").keys() == {"new"}
