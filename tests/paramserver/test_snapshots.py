"""A snapshot holds all that a restarted server needs, and is whole or refused."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.paramserver.execute.server import snapshots
from lightning_dlres.paramserver.execute.server.job_workers import JobWorkerRecord
from lightning_dlres.paramserver.execute.server.shard import Shard
from lightning_dlres.paramserver.execute.server.snapshots import SnapshotFiles, SnapshotTask
from tests.support.paramserver_shards import TOKEN, make_setup, push_of, small_keys, started_shard

OPTIMIZERS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam]
seeds = st.integers(0, 1 << 32)


def trained_shard(seed: int, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Shard:
    """Return a shard with keys of various versions, some within an update."""
    draw = random.Random(seed)
    sizes = [draw.choice([1, 3, 4096]) for _ in range(draw.randrange(5))]
    shard = started_shard(make_setup(small_keys(sizes), 2, optimizer=optimizer), is_persistent=True)
    for key in shard.setup.keys:
        for number in range(1, draw.randrange(5)):
            for worker in range(2):
                shard.push(*push_of(key, worker, number, draw.random()))
        if draw.random() < 0.5:
            version = shard.states[key.index].applied[0]
            shard.push(*push_of(key, draw.randrange(2), version + 1, draw.random()))
    return shard


def assert_same(restored: Shard, shard: Shard, *, has_previous: bool = True) -> None:
    assert restored.setup == shard.setup
    assert restored.is_started
    for index, state in shard.states.items():
        other = restored.states[index]
        assert torch.equal(other.parameter, state.parameter)
        assert (other.applied, other.durable) == (state.applied, state.applied)
        assert (other.updates, other.applied_norm) == (state.updates, state.applied_norm)
        assert other.has_previous == state.has_previous
        if state.has_previous:
            assert torch.equal(other.gradient, state.gradient)
        ours, theirs = (one.optimizer_state(s) for one, s in ((restored, other), (shard, state)))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert type(ours[name]) is type(value)
            if isinstance(value, torch.Tensor):
                assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape)
                assert torch.equal(ours[name], value)
            else:
                assert ours[name] == value


def save(files: SnapshotFiles, shard: Shard) -> SnapshotTask:
    task = SnapshotTask(files, shard)
    task.finish()
    assert task.is_done
    return task


@given(seed=seeds, optimizer=st.sampled_from(OPTIMIZERS))
def test_a_snapshot_restores_all_keys(seed: int, optimizer: type[torch.optim.Optimizer]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        files, shard = SnapshotFiles(Path(directory), 1), trained_shard(seed, optimizer)
        task = save(files, shard)
        assert task.error == ""
        task.note_durable()
        assert all(state.durable == state.applied for state in shard.states.values())
        restored = files.load(0.0)
        assert restored is not None
        assert_same(restored, shard)


@given(seed=seeds, optimizer=st.sampled_from(OPTIMIZERS))
def test_a_restored_key_goes_on_bitwise(seed: int, optimizer: type[torch.optim.Optimizer]) -> None:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        files, shard = SnapshotFiles(Path(directory), 1), trained_shard(seed, optimizer)
        save(files, shard)
        restored = files.load(0.0)
        assert restored is not None
        for key in shard.setup.keys:
            number = shard.states[key.index].applied[0] + 1
            # Of an update that had begun, all pushes are sent again.
            for worker in range(2):
                push = push_of(key, worker, number, draw.random())
                restored.push(*push)
                if not shard.states[key.index].pending and not shard.states[key.index].merged:
                    shard.push(*push)
            if shard.states[key.index].applied == restored.states[key.index].applied:
                assert torch.equal(
                    shard.states[key.index].parameter, restored.states[key.index].parameter
                )


def test_copies_of_keys_may_be_of_different_versions(tmp_path: Path) -> None:
    shard = started_shard(make_setup(small_keys([2, 2]), 1), is_persistent=True)
    files, task = SnapshotFiles(tmp_path, 1), SnapshotTask(SnapshotFiles(tmp_path, 1), shard)
    assert task.advance()
    for key in shard.setup.keys:
        shard.push(*push_of(key, 0, 1, 1.0))
    assert task.advance()
    assert not task.advance()
    task.finish()
    task.note_durable()
    assert [state.durable for state in shard.states.values()] == [[0], [1]]
    restored = files.load(0.0)
    assert restored is not None
    assert [state.applied for state in restored.states.values()] == [[0], [1]]
    assert [state.parameter.sum().item() for state in restored.states.values()] == [0.0, -2.0]


@given(
    seed=seeds,
    change=st.sampled_from(["flip", "cut", "insert", "swap"]),
    kind=st.sampled_from(["snapshot", "members"]),
)
def test_a_damaged_file_is_refused(seed: int, change: str, kind: str) -> None:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        files, shard = SnapshotFiles(Path(directory), 1), trained_shard(seed)
        save(files, shard)
        files.save_members(TOKEN, shard.members.records())
        path = files.values if kind == "snapshot" else files.members
        original = path.read_bytes()
        data = bytearray(original)
        position = draw.randrange(len(data))
        if change == "flip":
            data[position] ^= 1 << draw.randrange(8)
        elif change == "cut":
            del data[position:]
        elif change == "insert":
            data[position:position] = draw.randbytes(draw.randrange(1, 9))
        else:
            data[:position], data[position:] = data[position:], data[:position]
        if data == original:
            return
        path.write_bytes(data)
        message = rf"intact snapshots, got \S+\.{kind} .*Remove server-1.snapshot and server-1.mem"
        with pytest.raises(ConfigError, match=message):
            files.load(0.0)


def test_members_of_the_same_job_are_restored(tmp_path: Path) -> None:
    files, shard = SnapshotFiles(tmp_path, 1), trained_shard(0)
    save(files, shard)
    records = [
        JobWorkerRecord(incarnation=5, is_shut_out=True, has_left=False),
        JobWorkerRecord(incarnation=6, is_shut_out=False, has_left=True),
    ]
    files.save_members(TOKEN, records)
    restored = files.load(0.0)
    assert restored is not None
    assert restored.members.records() == records
    files.save_members(b"another job" + bytes(5), records)
    other = files.load(0.0)
    assert other is not None
    assert [one.incarnation for one in other.members.by_index] == [0, 0]


def test_a_partial_snapshot_is_ignored_and_replaced(tmp_path: Path) -> None:
    files, shard = SnapshotFiles(tmp_path, 1), trained_shard(1)
    partial = files.values.with_name(files.values.name + ".partial")
    partial.write_bytes(b"DLRESPS1 and no more")
    assert files.load(0.0) is None
    save(files, shard)
    whole = files.values.read_bytes()
    partial.write_bytes(whole[: len(whole) // 2])
    restored = files.load(0.0)
    assert restored is not None
    assert_same(restored, shard)
    save(files, shard)
    assert not partial.exists()
    files.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_snapshot(tmp_path: Path) -> None:
    files, shard = SnapshotFiles(tmp_path, 1), trained_shard(3)
    save(files, shard)
    old, key = files.values.read_bytes(), shard.setup.keys[0]
    number = shard.states[0].applied[0] + 1
    for worker in range(2):
        shard.push(*push_of(key, worker, number, 1.0))
    partial = files.values.with_name(files.values.name + ".partial")
    partial.symlink_to("/dev/full")
    failed = save(files, shard)
    assert "No space left on device" in failed.error
    assert files.values.read_bytes() == old
    assert not partial.is_symlink()
    assert save(files, shard).error == ""
    restored = files.load(0.0)
    assert restored is not None
    assert_same(restored, shard)


def test_any_error_of_the_writing_thread_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(snapshots, "_finish", fail)
    files = SnapshotFiles(tmp_path, 1)
    assert save(files, trained_shard(3)).error == "MemoryError"
    assert files.load(0.0) is None


def test_a_directory_that_is_gone_is_a_failure(tmp_path: Path) -> None:
    assert "No such file" in save(SnapshotFiles(tmp_path / "gone", 1), trained_shard(4)).error
