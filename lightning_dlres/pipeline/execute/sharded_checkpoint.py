"""Checkpoints in a directory: each rank writes what it holds, and reads what it needs.

The directory is one checkpoint of `torch.distributed.checkpoint`. Each shard is written and read
without collectives. The ranks only wait for each other, and one of them merges the shards' indices.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

# Stands for an object that is no tensor, until it is read.
_UNREAD = "not read"


def write_shard(directory: Path, shard: int, state: Mapping[str, Any]) -> None:
    """Write one rank's part of a checkpoint.

    Args:
        directory: Directory of the checkpoint, which exists.
        shard: Number of the part.
        state: Nested dicts of tensors and plain objects. No other shard has the same keys.
    """
    with _quiet():
        writer = FileSystemWriter(directory / str(shard))
        save(dict(state), storage_writer=writer, no_dist=True)


def merge_shards(directory: Path, shards: Collection[int]) -> None:
    """Make one checkpoint of the shards in a directory, without reading their tensors."""
    merged, results = Metadata({}, {}, {}), []
    for shard in shards:
        metadata = FileSystemReader(directory / str(shard)).read_metadata()
        merged.state_dict_metadata.update(metadata.state_dict_metadata)
        merged.planner_data.update(metadata.planner_data)
        for index, stored in metadata.storage_data.items():
            place = replace(stored, relative_path=f"{shard}/{stored.relative_path}")
            results.append(WriteResult(index, stored.length, place))
    with _quiet():
        FileSystemWriter(directory).finish(merged, [results])


class ShardedCheckpoint:
    """A checkpoint of `merge_shards`, of which any part can be read.

    Args:
        directory: Directory of the checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def _metadata(self) -> Metadata:
        return FileSystemReader(self._directory).read_metadata()

    @cached_property
    def paths(self) -> dict[tuple[Any, ...], str]:
        """Name in the files of each entry, by its keys in the nested dicts."""
        return {tuple(keys): name for name, keys in self._metadata.planner_data.items()}

    def shape(self, keys: tuple[Any, ...]) -> torch.Size | None:
        """Return the shape of a tensor; None for another object."""
        stored = self._metadata.state_dict_metadata[self.paths[keys]]
        return stored.size if isinstance(stored, TensorStorageMetadata) else None

    def read(self, targets: Mapping[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
        """Read some entries.

        Args:
            targets: Tensors that get the values, by the keys of the entries. None makes a new
                tensor on the CPU, or returns an object that is no tensor.

        Returns:
            The values, by the same keys.
        """
        state = {
            self.paths[keys]: self._empty(keys) if target is None else target
            for keys, target in targets.items()
        }
        # The planner's own copies of `state` would not get objects that are no tensors.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _quiet():
            load(
                state,
                storage_reader=FileSystemReader(self._directory),
                planner=planner,
                no_dist=True,
            )
        return {keys: state[self.paths[keys]] for keys in targets}

    def _empty(self, keys: tuple[Any, ...]) -> Any:
        stored = self._metadata.state_dict_metadata[self.paths[keys]]
        if not isinstance(stored, TensorStorageMetadata):
            return _UNREAD
        return torch.empty(stored.size, dtype=stored.properties.dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager without torch's advice to use collectives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
