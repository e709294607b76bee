"""Checkpoints in a directory: each rank writes what it holds, and reads what it needs.

The directory has tensors and optimizer states as one checkpoint of `torch.distributed.checkpoint`,
and all else in a file. Each shard is written and read without collectives. The ranks only wait for
each other, and rank 0 merges the indices of the shards.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from lightning_dlres.core.errors import ConfigError

# File with all that is in no shard.
REST = "trainer.pt"
Keys = tuple[Any, ...]
# Stands for an object that is no tensor, until it is read.
_UNREAD = "not read"


def save_sharded(
    path: Path,
    own: Mapping[str, Any],
    rest: Mapping[str, Any],
    *,
    rank: int,
    writers: Collection[int],
    barrier: Callable[[], None],
) -> None:
    """Write a checkpoint; called by all ranks, whose `path` is one place on shared storage.

    A checkpoint that exists is replaced when the new one is complete.

    Args:
        path: Directory of the checkpoint.
        own: What this rank writes: nested dicts of tensors and plain objects.
        rest: All else, which rank 0 writes.
        rank: This rank.
        writers: Ranks that write, each other keys.
        barrier: Waits for all ranks.
    """
    staging = path.with_name(f".{path.name}.saving")
    if rank == 0:
        _remove(staging)
        staging.mkdir(parents=True)
    barrier()
    if rank in writers:
        with _quiet():
            save(dict(own), storage_writer=FileSystemWriter(staging / str(rank)), no_dist=True)
    barrier()
    if rank == 0:
        _merge_shards(staging, sorted(writers))
        torch.save(dict(rest), staging / REST)
        # A directory cannot replace another one at once.
        old = path.with_name(f".{path.name}.old")
        _remove(old)
        if path.exists():
            path.rename(old)
        staging.rename(path)
        _remove(old)
    barrier()


def consolidate_checkpoint(directory: str | Path, file: str | Path) -> None:
    """Make an ordinary Lightning checkpoint of one that ranks have written in parts.

    The whole checkpoint must fit into memory. Its files are unpickled: it must be trusted.

    Args:
        directory: Checkpoint of `HeteroPipeStrategy(save_distributed_checkpoint=True)`.
        file: Path of the new checkpoint.

    Raises:
        ConfigError: If there is no such checkpoint, or the file exists.
    """
    path, target = Path(directory), Path(file)
    if not is_sharded(path):
        raise ConfigError(
            "directory must be a checkpoint that ranks have written in parts, got "
            f"{str(directory)!r}, which has no {REST}. An ordinary checkpoint needs no change."
        )
    if target.exists():
        raise ConfigError(
            f"file must be the path of a new file, got {str(file)!r}, which exists. Delete it, or "
            "choose another path."
        )
    partial = target.with_name(f".{target.name}.saving")
    torch.save(ShardedCheckpoint(path).consolidated(), partial)
    partial.replace(target)


def is_sharded(path: Path) -> bool:
    """Return True for a directory that `save_sharded` has written."""
    return (path / REST).is_file()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _merge_shards(directory: Path, shards: Collection[int]) -> None:
    """Make one checkpoint of the shards in a directory, without reading their tensors."""
    merged, results = Metadata({}, {}, {}), []
    for shard in shards:
        if not (directory / str(shard) / ".metadata").is_file():
            raise ConfigError(
                f"The checkpoint {str(directory)!r} must be on storage that all ranks share, got "
                f"no part of rank {shard} there. Use another path, or "
                "save_distributed_checkpoint=False."
            )
        metadata = FileSystemReader(directory / str(shard)).read_metadata()
        merged.state_dict_metadata.update(metadata.state_dict_metadata)
        merged.planner_data.update(metadata.planner_data)
        for index, stored in metadata.storage_data.items():
            place = replace(stored, relative_path=f"{shard}/{stored.relative_path}")
            results.append(WriteResult(index, stored.length, place))
    with _quiet():
        FileSystemWriter(directory).finish(merged, [results])


class ShardedCheckpoint:
    """A checkpoint of `save_sharded`, of which any part can be read.

    Args:
        path: Directory of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _metadata(self) -> Metadata:
        return FileSystemReader(self.path).read_metadata()

    @cached_property
    def _entries(self) -> dict[str, dict[Keys, str]]:
        """Names of entries in the files, by the first key and the keys."""
        entries: dict[str, dict[Keys, str]] = {}
        for name, keys in self._metadata.planner_data.items():
            entries.setdefault(str(keys[0]), {})[tuple(keys[1:])] = name
        return entries

    def shapes(self, section: str) -> dict[str, torch.Size | None]:
        """Return the shape of each tensor of a section; None for other objects."""
        shapes = {}
        for keys, name in self._entries.get(section, {}).items():
            stored = self._metadata.state_dict_metadata[name]
            shape = stored.size if isinstance(stored, TensorStorageMetadata) else None
            shapes[str(keys[0])] = shape if len(keys) == 1 else None
        return shapes

    def read(
        self, section: str, names: Collection[str], into: Mapping[str, Tensor] | None = None
    ) -> dict[str, Any]:
        """Read some objects of a section.

        Args:
            section: First key, such as "state_dict".
            names: Second keys of the objects.
            into: Tensors that get the values of those of the same names; the others are new.

        Returns:
            The objects, by name.
        """
        into = into or {}
        entries = {k: n for k, n in self._entries.get(section, {}).items() if k[0] in names}
        state = {
            name: self._empty(name) if len(keys) > 1 else into.get(str(keys[0]), self._empty(name))
            for keys, name in entries.items()
        }
        # With flattening, objects that are no tensors would go to a copy of `state`.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = FileSystemReader(self.path)
        with _quiet(), torch.no_grad():
            load(state, storage_reader=reader, planner=planner, no_dist=True)
        objects: dict[Any, Any] = {}
        for keys, name in entries.items():
            place = objects
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            place[keys[-1]] = state[name]
        return {name: _with_lists(value) for name, value in objects.items()}

    def _empty(self, name: str) -> Any:
        stored = self._metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            return _UNREAD
        return torch.empty(stored.size, dtype=stored.properties.dtype)

    def consolidated(self) -> dict[str, Any]:
        """Return the whole checkpoint as that of a single device."""
        whole: dict[str, Any] = torch.load(self.path / REST, map_location="cpu", weights_only=False)
        shapes = self.shapes("state_dict")
        whole["state_dict"].update(self.read("state_dict", shapes))
        for number, state in enumerate(whole.get("optimizer_states", [])):
            section = optimizer_section(number)
            state["state"] = by_index(self.read(section, self.shapes(section)))
        return whole


def optimizer_section(number: int) -> str:
    """Return the section of an optimizer's states."""
    return f"optimizer_{number}"


def by_index(states: Mapping[str, Any]) -> dict[int, Any]:
    """Return states of parameters by index, in order: the files have texts as names."""
    return dict(sorted((int(index), state) for index, state in states.items()))


def _with_lists(value: Any) -> Any:
    """Return nested dicts with lists in the place of those whose keys are positions."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if items and all(type(key) is int for key in items):
        return [items[key] for key in sorted(items)]
    return items


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager without torch's advice to use collectives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
